"""The broker that a process publishes to, of several: the first that works.

An answer goes back by the broker that brought its command, and a reply by the one that brought its request.

A broker counts as working for a process when nothing has gone wrong between the two for a while, and the broker itself
was neither away nor came back meanwhile.
"""

from collections.abc import Callable, Collection, Sequence

QUIET = 15.0  # seconds without trouble, after which a process must use a broker


class Routes:
    """The connections of each process, by the names of the brokers, in order of preference."""

    def __init__(self, servers: Sequence[str], report: Callable[[str], None]) -> None:
        self._servers = servers
        self._report = report
        self._troubled_until: dict[tuple[object, str], float] = {}  # of a process and a broker
        self._away: set[str] = set()

    def is_troubled(self, process: object, server: str, until: float) -> None:
        """Something goes wrong between the two, or will until then."""
        key = (process, server)
        self._troubled_until[key] = max(self._troubled_until.get(key, until), until)

    def leaves(self, server: str) -> None:
        self._away.add(server)

    def comes_back(self, server: str, moment: float) -> None:
        self._away.discard(server)
        self.changes(server, moment)

    def changes(self, server: str, moment: float) -> None:
        """Note that a broker comes back, or forgets everything."""
        for process, name in list(self._troubled_until):
            if name == server:
                self.is_troubled(process, server, moment)

    def chose(self, process: object, server: str, moment: float, what: str, brought_by: Collection[str]) -> None:
        """`brought_by`: the brokers that brought what this answers; none for what answers nothing.

        What came by several may be answered as if it came by any of them."""
        if server in brought_by:
            return
        before = self._servers[: self._servers.index(server)]
        better = [name for name in before if self._is_quiet(process, name, moment)]
        if brought_by and all(self._is_quiet(process, name, moment) for name in brought_by):
            better += sorted(brought_by)
        if better:
            self._report(f"{what} went by {server}, and {better[0]} works")

    def _is_quiet(self, process: object, server: str, moment: float) -> bool:
        return server not in self._away and moment - self._troubled_until.get((process, server), moment) > QUIET
