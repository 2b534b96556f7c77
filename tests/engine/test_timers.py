"""Timers ring when they are due, and the store is not asked for them more often than that needs."""

from collections.abc import Sequence

import pytest

from oraculo.ports.store import Due
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.stores.sqlite.connections import MEMORY
from oraculo.testing.harness import Harness
from tests.engine.workers import Journal, recording_app
from tests.waiting import until

SELDOM = Settings(engine=EngineSettings(poll=60.0))  # no look but at a timer's own time


class Asked(SqliteStore):
    """Counts how often it was asked which timers are due, and when the next one is."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.due_asked = 0
        self.next_told = 0

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        self.due_asked += 1
        return await super().due(now, limit)

    async def next_due(self) -> float | None:
        told = await super().next_due()
        self.next_told += 1
        return told


async def test_a_run_that_ends_long_before_its_deadline_makes_nobody_look_for_timers() -> None:
    store = Asked()
    async with Harness(recording_app(Journal(), ("escavador_a",)), store=store, settings=SELDOM) as oraculo:
        await until(lambda: store.next_told == 1, saying="at the start it looks, and sleeps then")
        for _ in range(20):
            await oraculo.run({"destinos": ["escavador_a"]})
        assert store.due_asked == 1


@pytest.mark.parametrize("known", [[], [3600], [3600, 5]], ids=["none", "a later one", "two later ones"])
async def test_a_timer_that_comes_before_those_that_are_known_rings_in_time(known: list[float]) -> None:
    store = Asked()
    async with Harness(store=store, settings=SELDOM) as oraculo:
        await until(lambda: store.next_told == 1, saying="at the start it looks, and sleeps then")
        for timeout in known:
            await oraculo.submit({"destinos": ["escavador_a"], "timeout": timeout})
        await until(lambda: store.next_told == 1 + (5 in known), saying="one within its sleep is looked for")
        ended = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.2}, wait=4)
        assert ended["status"] == "timeout"
