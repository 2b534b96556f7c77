"""Which copies of runs may still be believed."""

from collections.abc import Iterable
from weakref import WeakValueDictionary

from oraculo.core.run import RunHead


class TrustedCopies:
    """The copies that were read or written over the present connection.

    A server that was started again, or another in its place, may have lost its last commits, and then the number of a
    version is given twice, to two different states. An engine that decides on a copy from before could overwrite what
    others have committed since. So after the first connection a copy from before it counts as outdated, though the run
    was read since for somebody else.
    """

    def __init__(self) -> None:
        self._connection = 1
        self._copies: WeakValueDictionary[int, RunHead] = WeakValueDictionary()  # by their identity

    def note(self, copies: Iterable[RunHead], connection: int) -> None:
        """They were read or written over that connection alone."""
        if connection <= 1 or connection < self._connection:
            return
        if connection > self._connection:
            self._connection, self._copies = connection, WeakValueDictionary()
        self._copies.update((id(copy), copy) for copy in copies)

    def holds(self, copy: RunHead, connection: int) -> bool:
        return connection <= 1 or (connection == self._connection and self._copies.get(id(copy)) is copy)
