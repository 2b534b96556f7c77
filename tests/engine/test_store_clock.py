"""Engines on machines whose clocks differ: who lives is told by the clock of the store that they share."""

import time
from collections.abc import AsyncIterator

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.cluster.store_clock import FAR, read_clock
from oraculo.engine.retention import RunRetention
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import LoopFailed, Record
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness


class OnAServer(SqliteStore):
    """As one that has a clock of its own."""

    async def clock(self) -> float | None:
        return time.time()


class Off:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return time.time() + self._seconds


class Told:
    def __init__(self) -> None:
        self.faults: list[str] = []

    def emit(self, record: Record) -> None:
        if isinstance(record, LoopFailed) and record.duty == "clock":
            self.faults.append(record.reason)


@pytest.fixture
async def store() -> AsyncIterator[OnAServer]:
    store = OnAServer(MEMORY)
    await store.start()
    yield store
    await store.close()


async def test_engines_whose_clocks_differ_see_each_other(store: OnAServer) -> None:
    told = Told()
    ahead, right, behind = (Peers(store, Off(seconds), told, f"{seconds}", 1.0) for seconds in (600, 0, -600))
    for _ in range(2):
        for one in (ahead, right, behind):
            await one.attend()
    assert {tuple(one.engines) for one in (ahead, right, behind)} == {("-600", "0", "600")}
    assert list(await Peers(store, Off(-600), told, "api", 1.0).living()) == ["-600", "0", "600"]


async def test_a_clock_that_is_far_off_is_told_once(store: OnAServer) -> None:
    told = Told()
    engine = Peers(store, Off(42), told, "a", 1.0)
    for _ in range(3):
        await engine.attend()
    assert engine.clock_fault is not None
    assert told.faults == [engine.clock_fault]
    assert "42 s ahead of that of the store: deadlines ring early here" in engine.clock_fault
    assert "those of runs that start here late elsewhere" in engine.clock_fault
    behind = (await read_clock(store, Off(-42))).fault or ""
    assert "42 s behind that of the store: deadlines ring late here" in behind
    assert "those of runs that start here early elsewhere" in behind


@pytest.mark.parametrize("seconds", [40 * 86400, 0, -40 * 86400])
async def test_what_is_young_is_deleted_by_no_engine_whose_clock_is_off(store: OnAServer, seconds: float) -> None:
    async with Harness(store=store) as harness:
        run_id = await harness.submit({"destinos": ["escavador_a"]})
        await harness.operations.cancel(run_id)
        assert await RunRetention(store, Off(seconds), Told(), days=30).prune() == 0
        assert await RunRetention(store, Off(0), Told(), days=-1).prune() == 1, "it was there to be deleted"


async def test_a_store_that_is_slow_to_answer_is_no_clock_that_is_off(store: OnAServer) -> None:
    """It said so at some moment between the question and the answer."""

    class Slow(Off):
        def now(self) -> float:
            self._seconds += 4 * FAR  # passes while the store is asked
            return super().now()

    assert (await read_clock(store, Slow(-4 * FAR))).fault is None
    assert (await read_clock(store, Slow(0))).fault is not None


async def test_a_small_difference_is_no_fault_and_the_stores_clock_holds(store: OnAServer) -> None:
    assert await read_clock(store, Off(FAR - 1)) == (pytest.approx(time.time(), abs=1), None)


async def test_a_store_without_a_clock_goes_by_this_machines() -> None:
    assert await read_clock(SqliteStore(MEMORY), Off(0)) == (pytest.approx(time.time(), abs=60), None)


async def test_readiness_tells_of_it_and_work_goes_on() -> None:
    async with Harness(broker=MemoryBroker(SystemClock()), store=OnAServer(MEMORY), clock=Off(-42)) as harness:
        health = await harness.engine.parts.health.look()
        assert "42 s behind" in (health.parts["clock"] or "")
        assert health.is_ready
    async with Harness(broker=MemoryBroker(SystemClock()), store=OnAServer(MEMORY)) as harness:
        assert "clock" not in (await harness.engine.parts.health.look()).parts
