"""Looking at runs: lists, searches and histories.

Every call may raise StoreUnavailable (cannot be reached now: try again) or StoreError (refused).
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from oraculo.core.history import HistoryEntry
from oraculo.core.run import RunHead, RunStatus


class RunQuery(msgspec.Struct, frozen=True):
    """Which runs a list shows: those that fit every field that is given."""

    statuses: frozenset[RunStatus] = frozenset()  # in one of these; none named: in any
    name: str | None = None  # pipeline or route
    text: str | None = None  # anywhere in the id or the name, any case
    since: float | None = None  # created then or later
    until: float | None = None  # created before then
    limit: int = 50
    cursor: str | None = None  # as a page before gave it


class Page(msgspec.Struct, frozen=True):
    heads: Sequence[RunHead]  # newest first
    cursor: str | None  # None: there is no more


class Browse(Protocol):
    """Looking at runs: lists, searches, histories and counts."""

    async def runs(self, query: RunQuery) -> Page:
        """Raises InvalidInput when the cursor is not one of ours."""
        ...

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        """Entries with `seq` above `after`, in order."""
        ...

    async def census(self) -> dict[RunStatus, int]:
        """How many runs there are in each status."""
        ...
