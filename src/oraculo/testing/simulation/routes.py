"""The choice among several brokers: a process must publish to the first that works.

An answer goes to the broker that delivered its command, and a reply to the one that delivered its request.

A broker works for a process when nothing went wrong between the two for a while, and the broker was neither away nor
back meanwhile.
"""

from collections.abc import Callable, Collection, Sequence

QUIET = 15.0  # seconds without faults after which a process must use a broker


class Routes:
    """The connections of each process, by the names of the brokers, in order of preference."""

    def __init__(self, servers: Sequence[str], report: Callable[[str], None]) -> None:
        self._servers = servers
        self._report = report
        self._troubled_until: dict[tuple[object, str], float] = {}  # (process, broker) -> moment
        self._away: set[str] = set()

    def is_troubled(self, process: object, server: str, until: float) -> None:
        """Record a fault between the two, until that moment."""
        key = (process, server)
        self._troubled_until[key] = max(self._troubled_until.get(key, until), until)

    def leaves(self, server: str) -> None:
        self._away.add(server)

    def comes_back(self, server: str, moment: float) -> None:
        self._away.discard(server)
        self.changes(server, moment)

    def changes(self, server: str, moment: float) -> None:
        """Record that a broker comes back or forgets everything."""
        for process, name in list(self._troubled_until):
            if name == server:
                self.is_troubled(process, server, moment)

    def chose(self, process: object, server: str, moment: float, what: str, brought_by: Collection[str]) -> None:
        """Check the choice of a broker. `brought_by` are the brokers that delivered the message that this one answers.

        It may be answered as if any of them delivered it.
        """
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
