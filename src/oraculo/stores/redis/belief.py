"""Which copies of runs may still be believed."""

from collections.abc import Iterable

MOST_KNOWN = 100_000


class Belief:
    """The runs that were read or written over the present connection.

    A server that was started again, or another in its place, may have lost its last commits, and then the number of a
    version is given twice, to two different states. An engine that decides on a copy from before could overwrite what
    others have committed since. So after the first connection a copy counts as outdated until the run is read again.
    """

    def __init__(self) -> None:
        self._connection = 1
        self._runs: set[str] = set()

    def note(self, run_ids: Iterable[str], connection: int) -> None:
        """They were read or written over that connection alone."""
        if connection <= 1 or connection < self._connection:
            return
        if connection > self._connection or len(self._runs) > MOST_KNOWN:  # forgotten: then it is read once more
            self._connection, self._runs = connection, set()
        self._runs.update(run_ids)

    def holds(self, run_id: str, connection: int) -> bool:
        return connection <= 1 or (connection == self._connection and run_id in self._runs)
