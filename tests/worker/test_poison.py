"""Commands that were delivered often begin one by one: one of them may be what ends the process each time."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.ports.clock import SystemEntropy
from oraculo.worker import App, poison
from oraculo.worker.jobs import Job
from tests.waiting import until

from .stage import Stage, quiesce
from .test_concurrency import Crowd

OFTEN = poison.MOST_TRUSTED + 1


@pytest.fixture(autouse=True)
def gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "_GATHERING", 0)


async def send_often(stage: Stage, count: int, *, redeliveries: int = OFTEN) -> None:
    """As they are when so many processes have died of them."""
    for number in range(count):
        await stage.send("q", {"n": number}, tarefa=f"t{number}", tentativa=1)
    for _ in range(redeliveries):
        consumer = await MemoryBroker.consume(stage.broker, "q", prefetch=1000)
        assert len(await consumer.take(1000)) == count
        await consumer.close()


async def test_the_next_begins_when_the_one_before_is_settled(stage: Stage) -> None:
    app, held = App("a"), []

    @app.queue("q")
    async def work(payload: Any) -> None:
        held.append((await stage.left("q"))[1])

    await send_often(stage, 20)
    async with stage.worker(app):
        for _ in range(20):
            await stage.answer()
    assert held == list(range(20, 0, -1)), "each that began before was acked"


async def test_they_begin_in_no_order(stage: Stage) -> None:
    app, begun = App("a"), []

    @app.queue("q")
    async def work(payload: dict[str, int]) -> None:
        begun.append(payload["n"])

    await send_often(stage, 50)
    async with stage.worker(app, concurrency=50):
        for _ in range(50):
            await stage.answer()
    assert sorted(begun) == list(range(50))
    assert begun != sorted(begun), "the first would always be the first, and its neighbours never have a turn"


@pytest.mark.parametrize(("slow", "turns"), [(-1.0, [1, 2, 4, 3]), (60.0, [1] * 10)])
async def test_after_a_turn_that_took_long_the_next_is_for_twice_as_many(
    slow: float, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten that take six seconds each would else take as long as a minute's deadline, and none need be guilty."""
    monkeypatch.setattr(poison, "_SLOW", slow)
    begun: list[Any] = []
    waiting = poison.Suspects(0, SystemEntropy(), begun.append)
    delivery = SimpleNamespace(redeliveries=1)
    for _ in range(10):
        job = SimpleNamespace(received=[SimpleNamespace(delivery=delivery)], is_settled=False)
        assert waiting.takes(cast("Job", job))
    seen = []
    while sum(seen) < 10:
        await until(lambda: begun, saying="a turn")
        seen.append(len(begun))
        for job in begun:
            job.is_settled = True
        begun.clear()
    assert seen == turns


class Last(SystemEntropy):
    def jitter(self) -> float:
        return 0.999


async def test_those_that_arrive_later_have_the_same_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first would else be first in every life of the process, and its neighbours never have a turn."""
    monkeypatch.setattr(poison, "_GATHERING", 0.05)
    begun: asyncio.Queue[Job] = asyncio.Queue()
    waiting = poison.Suspects(0, Last(), begun.put_nowait)
    delivery = SimpleNamespace(redeliveries=1)
    jobs = [SimpleNamespace(name=name, received=[SimpleNamespace(delivery=delivery)], is_settled=True) for name in "ab"]
    for job in jobs:
        assert waiting.takes(cast("Job", job))
        await quiesce()
    async with asyncio.timeout(5):
        assert [await begun.get(), await begun.get()] == jobs[::-1]


async def test_others_begin_beside_them(stage: Stage) -> None:
    app, crowd = App("a"), Crowd()
    app.queue("q")(crowd.enter)
    await send_often(stage, 3)
    async with stage.worker(app, concurrency=10):
        for _ in range(3):
            await stage.send("q")
        await quiesce()
        assert crowd.inside == 1 + 3
        crowd.go_on.set()
        for _ in range(6):
            await stage.answer()


@pytest.mark.parametrize(
    ("redeliveries", "limit", "at_once"), [(OFTEN - 1, 20, 5), (OFTEN, 20, 1), (1, 4, 5), (2, 4, 1), (1, 3, 1)]
)
async def test_how_often_is_often_depends_on_the_limit(
    stage: Stage, redeliveries: int, limit: int, at_once: int
) -> None:
    app, crowd = App("a"), Crowd()
    app.queue("q")(crowd.enter)
    await send_often(stage, 5, redeliveries=redeliveries)
    async with stage.worker(app, concurrency=10, delivery_limit=limit):
        await quiesce()
        assert crowd.inside == at_once
        crowd.go_on.set()
        for _ in range(5):
            await stage.answer()


async def test_one_that_hangs_holds_up_the_others_for_a_while_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison, "ALONE", 0.01)
    app, crowd = App("a"), Crowd()
    app.queue("q")(crowd.enter)
    await send_often(stage, 3)
    async with stage.worker(app, concurrency=10), asyncio.timeout(5):
        while crowd.inside < 3:  # noqa: ASYNC110 - what is waited for is the handler's own count
            await asyncio.sleep(0.005)
        crowd.go_on.set()
        for _ in range(3):
            await stage.answer()


async def test_a_worker_that_stops_gives_back_those_that_wait(stage: Stage) -> None:
    app, crowd = App("a"), Crowd()
    app.queue("q")(crowd.enter)
    await send_often(stage, 3)
    worker = stage.worker(app, concurrency=10)
    await worker.start()
    await quiesce()
    assert crowd.inside == 1
    stopping = asyncio.create_task(worker.stop())
    await quiesce()
    assert await stage.left("q") == (2, 1, 0)
    crowd.go_on.set()
    await stopping
    assert crowd.most == 1
    assert await stage.left("q") == (2, 0, 0)
