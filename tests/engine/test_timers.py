"""Timers ring when they are due, and the store is not asked for them more often than that needs."""

import asyncio
from collections.abc import Sequence

import pytest

from oraculo.core.run import Changes
from oraculo.engine import timers
from oraculo.engine.decide import batches, intake
from oraculo.engine.timers import Timers
from oraculo.ports.store import Committed, Creation, Due, Snapshot
from oraculo.settings import EngineSettings, RunSettings, Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.stores.sqlite.connections import MEMORY
from oraculo.testing.harness import Harness
from tests.engine.workers import Journal, failing_app, recording_app
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
        at_the_start = store.due_asked
        for _ in range(20):
            await oraculo.run({"destinos": ["escavador_a"]})
        assert store.due_asked == at_the_start


@pytest.mark.parametrize("known", [[], [3600], [3600, 30]], ids=["none", "a later one", "two later ones"])
async def test_a_timer_that_comes_before_those_that_are_known_rings_in_time(known: list[float]) -> None:
    store = Asked()
    async with Harness(store=store, settings=SELDOM) as oraculo:
        await until(lambda: store.next_told == 1, saying="at the start it looks, and sleeps then")
        for timeout in known:
            await oraculo.submit({"destinos": ["escavador_a"], "timeout": timeout})
        await until(lambda: store.next_told == 1 + (30 in known), saying="one within its sleep is looked for")
        ended = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.2}, wait=20)
        assert ended["status"] == "timeout"


async def test_the_retry_of_a_task_rings_in_time_though_its_run_has_long() -> None:
    settings = Settings(engine=SELDOM.engine, runs=RunSettings(backoff=0.05))
    async with Harness(failing_app("executador_x", failures=1), settings=settings) as oraculo:
        ended = await oraculo.run({"destinos": ["executador_x"], "timeout": 3600}, wait=20)
        assert ended["status"] == "concluida"


@pytest.mark.parametrize("turns", range(6))
async def test_timers_end_when_they_are_cancelled_though_one_has_just_woken_them(turns: int) -> None:
    async with Harness() as oraculo:
        engine = oraculo.engine
        own = Timers(Asked(), engine.parts.runs.inbox, oraculo.clock, engine.parts.peers, 60.0, dict)
        await own._store.start()
        running = asyncio.create_task(own.run())
        await until(lambda: own._wakes_at > 0, saying="it sleeps")
        own._expect_at(oraculo.clock.now() + 0.5)
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=5)
        assert done


class Unreadable(Asked):
    """Of some runs nothing can be decided."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        if self.broken & set(run_ids):
            raise ValueError("a definition that this version cannot read")
        return await super().load(run_ids)


async def many_that_break(oraculo: Harness, store: Unreadable, count: int) -> None:
    ids = [await oraculo.submit({"destinos": ["escavador_a"], "timeout": 0.2}) for _ in range(count)]
    store.broken |= set(ids)
    for run_id in ids:
        oraculo.engine.parts.intake._decider.hot.drop(run_id)


async def test_timers_that_cannot_be_set_apart_are_not_rung_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_MOST_SET_APART", 3)
    store = Unreadable()
    async with Harness(store=store, settings=Settings(engine=EngineSettings(poll=0.5))) as oraculo:
        await many_that_break(oraculo, store, 10)
        await until(lambda: len(oraculo.engine.parts.timers._set_apart) == 3)
        before = store.due_asked
        await oraculo.run({"destinos": ["escavador_a"], "timeout": 1}, wait=10)
        assert store.due_asked - before < 50


async def test_a_timer_that_broke_once_and_is_gone_keeps_no_other_from_its_time() -> None:
    store = Unreadable()
    async with Harness(store=store, settings=SELDOM) as oraculo:
        await many_that_break(oraculo, store, 1)
        [broken] = store.broken
        await until(lambda: oraculo.engine.parts.timers._set_apart, saying="it is set apart")
        store.broken.clear()
        await oraculo.operations.cancel(broken)
        for timeout in (0.1, 0.3):  # the first makes it look, and find that the other is gone
            ended = await oraculo.run({"destinos": ["escavador_a"], "timeout": timeout}, wait=5)
            assert ended["status"] == "timeout"
        assert not oraculo.engine.parts.timers._set_apart


WIDTH = 200


class SlowlyEnding(SqliteStore):
    """Takes its time to write the end of a wide run."""

    def __init__(self) -> None:
        super().__init__(MEMORY)

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        if any(len(one.tasks) == WIDTH and not one.run.is_open for one in changes):
            await asyncio.sleep(0.3)
        return await super().commit(creations, changes)


async def test_a_small_run_ends_in_time_though_wide_ones_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (batches, intake):
        monkeypatch.setattr(place, "MOST_TASKS", WIDTH)
    async with Harness(store=SlowlyEnding()) as oraculo:
        steps = [{"fila": "escavador_a", "id": f"t{number}"} for number in range(WIDTH)]
        wide = [await oraculo.submit({"destinos": steps, "timeout": 1.0}) for _ in range(10)]
        small = await oraculo.submit({"destinos": ["escavador_a"], "timeout": 1.5})
        assert (await oraculo.ended(small))["status"] == "timeout"
        assert any([(await oraculo.operations.run(run_id)).is_open for run_id in wide])
        for run_id in wide:
            assert (await oraculo.ended(run_id))["status"] == "timeout"
        assert not oraculo.engine.parts.timers._set_apart
