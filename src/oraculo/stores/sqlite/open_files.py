"""A check that SQLite's open files are still the ones in the folder.

SQLite keeps writing to a file that was deleted or replaced, and reports nothing. All later commits are gone when the
process ends.
"""

import os
import time
from math import inf

from oraculo.errors import StoreRefuses
from oraculo.stores.sqlite.connections import MEMORY

LOOKED_AT_EVERY = 0.1  # seconds between two checks


class OpenFiles:
    """The identities of the file and its log at the time when they were opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: dict[str, tuple[int, int]] = {}
        self._looked_at = -inf  # monotonic time of the last good check

    def remember(self) -> None:
        """Record the file and its log, which holds the last commits. Call it once they are open."""
        if self._path == MEMORY:
            return
        path = os.path.abspath(self._path)  # the current folder may change later
        log = f"{os.path.realpath(path)}-wal"  # SQLite resolves links before it names the log
        self._known = {name: found for name in (path, log) if (found := _identity(name))}

    def expect_same(self) -> None:
        """Raise StoreRefuses when the files were replaced. Moving the original back, not a copy, repairs that."""
        now = time.monotonic()
        if now - self._looked_at < LOOKED_AT_EVERY:
            return
        for name, known in self._known.items():
            if _identity(name) != known:
                raise StoreRefuses(
                    f"SQLite file {name} was deleted, replaced or made unreachable while it was open: "
                    "put it back, or stop this process"
                )
        self._looked_at = now


def _identity(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino
