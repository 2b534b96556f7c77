"""The deletion of ended runs that are older than the settings keep."""

import asyncio

from oraculo.engine.cluster.store_clock import surely_past
from oraculo.ports.clock import Clock
from oraculo.ports.store import Storage
from oraculo.ports.telemetry import RunsPruned, Telemetry

EVERY = 300.0
_TOGETHER = 500


class RunRetention:
    """The loop that deletes old runs."""

    def __init__(self, store: Storage, clock: Clock, telemetry: Telemetry, days: float) -> None:
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._days = days

    async def run(self) -> None:
        while self._days > 0:
            await self.prune()
            await asyncio.sleep(EVERY)
        await asyncio.Event().wait()

    async def prune(self) -> int:
        """Delete old runs in small portions, so that commits of live runs get their turn. Return how many."""
        before = await surely_past(self._store, self._clock, self._days * 86400)
        total = 0
        while pruned := await self._store.prune(before, _TOGETHER):
            total += pruned
            await asyncio.sleep(0)
        if total:
            self._telemetry.emit(RunsPruned(total))
        return total
