"""Reading runs for people: lists, searches, histories and counts.

Every call may raise StoreUnavailable (cannot be reached now, try again) or another StoreError (refused).
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from oraculo.core.history import HistoryEntry
from oraculo.core.run import RunHead, RunStatus


class RunQuery(msgspec.Struct, frozen=True):
    """A filter for a list of runs. A run is listed when it fits every field that is given."""

    statuses: frozenset[RunStatus] = frozenset()  # any of these; empty: any status
    name: str | None = None  # name of the pipeline or route
    text: str | None = None  # part of the id or the name, in any case
    since: float | None = None  # earliest creation
    until: float | None = None  # creation must be earlier
    limit: int = 50
    cursor: str | None = None  # from the page before


class Page(msgspec.Struct, frozen=True):
    """One page of a list of runs."""

    heads: Sequence[RunHead]  # newest first
    cursor: str | None  # for the next page; None: this is the last


class Browse(Protocol):
    """The reads that lists and screens need."""

    async def runs(self, query: RunQuery) -> Page:
        """Return one page of runs. Raises InvalidInput when the cursor is not one of ours."""
        ...

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        """Return the entries with `seq` above `after`, in order."""
        ...

    async def census(self) -> dict[RunStatus, int]:
        """Return the number of runs in each status."""
        ...
