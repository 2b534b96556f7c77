"""Finds the runs that ended while the system behind a bridge was away: nobody wants their steps any more."""

import asyncio
from collections.abc import Iterable

from oraculo.clients.subscription import LONGEST_HELD
from oraculo.errors import OraculoError
from oraculo.ports.clock import Clock
from oraculo.ports.store import Store
from oraculo.wire.message import Message
from oraculo.wire.timestamps import from_iso


class EndedRuns:
    """Asks the store only about commands that waited: those written before the last attempt that failed."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._failed_at: float | None = None

    def note_failure(self) -> None:
        """Note that commands cannot be handed over now: they wait, and so do those behind them."""
        self._failed_at = self._clock.now()

    async def among(self, commands: Iterable[Message]) -> set[str]:
        """Return the ended runs among those of the commands that waited.

        A run that the store does not know may be somebody else's, and goes on. All go on while the store does not
        answer: no step may wait for both systems.
        """
        if self._failed_at is None:
            return set()
        waited = {command.correlation_id for command in commands if self._has_waited(command, self._failed_at)}
        if not waited:
            return set()
        try:
            async with asyncio.timeout(LONGEST_HELD):
                heads = await self._store.heads(list(waited))
        except (OraculoError, TimeoutError):
            return set()
        return {run_id for run_id, head in heads.items() if head.ended_at is not None}

    def _has_waited(self, command: Message, failed_at: float) -> bool:
        written_at = from_iso(command.timestamp)
        return written_at is not None and written_at <= failed_at
