"""The copies of runs that may still be trusted."""

from collections.abc import Iterable
from weakref import WeakValueDictionary

from oraculo.core.run import RunHead


class TrustedCopies:
    """The copies that were read or written over the present connection.

    A server that restarted or was replaced may have lost its last commits. Then one version number is given to two
    states, and an engine that decides on an older copy could overwrite a commit. So a new connection makes all copies
    from before it outdated, even if the run was read since for another caller.
    """

    def __init__(self) -> None:
        self._connection = 1
        self._copies: WeakValueDictionary[int, RunHead] = WeakValueDictionary()  # by identity

    def note(self, copies: Iterable[RunHead], connection: int) -> None:
        """Record copies that were read or written over that connection alone."""
        if connection <= 1 or connection < self._connection:
            return
        if connection > self._connection:
            self._connection, self._copies = connection, WeakValueDictionary()
        self._copies.update((id(copy), copy) for copy in copies)

    def holds(self, copy: RunHead, connection: int) -> bool:
        return connection <= 1 or (connection == self._connection and self._copies.get(id(copy)) is copy)
