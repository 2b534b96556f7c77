"""Whether the files that SQLite has open are still those in the folder.

SQLite goes on writing to a file that was deleted, or that another was put in the place of, and says nothing: whatever
is committed from then on is gone with the process.
"""

import os
import time
from math import inf

from oraculo.errors import StoreRefuses
from oraculo.stores.sqlite.connections import MEMORY

LOOKED_AT_EVERY = 0.1  # seconds: whatever was committed just before they went is gone all the same


class OpenFiles:
    def __init__(self, path: str) -> None:
        self._path = path
        self._known: dict[str, tuple[int, int]] = {}
        self._looked_at = -inf  # monotonic, when they were last the same

    def remember(self) -> None:
        """Once the file is open, and with it the log, in which the last commits are."""
        if self._path == MEMORY:
            return
        path = os.path.abspath(self._path)  # a handler may change the current folder
        log = f"{os.path.realpath(path)}-wal"  # SQLite follows links before it names it
        self._known = {name: found for name in (path, log) if (found := _identity(name))}

    def expect_same(self) -> None:
        """Raises StoreRefuses. One that is put back, and no copy of it, is the same again."""
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
