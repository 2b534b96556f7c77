"""How much runs at once, and that answers leave together."""

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from oraculo.worker import App

from .stage import Stage, quiesce


class Crowd:
    """A handler that counts how many are inside, and lets them go when told."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.go_on = asyncio.Event()

    async def enter(self, payload: Any) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self.go_on.wait()
        self.inside -= 1


async def test_the_app_has_one_limit_over_all_queues(stage: Stage) -> None:
    app, crowd = App("a"), Crowd()
    app.queue("q1")(crowd.enter)
    app.queue("q2")(crowd.enter)
    async with stage.worker(app, concurrency=3):
        for number in range(20):
            await stage.send(f"q{number % 2 + 1}")
        await quiesce()
        assert crowd.inside == 3
        crowd.go_on.set()
        for _ in range(20):
            await stage.answer()
    assert crowd.most == 3


async def test_a_handler_has_its_own_limit_and_does_not_block_others(stage: Stage) -> None:
    app, narrow, wide = App("a"), Crowd(), Crowd()
    app.queue("narrow", concurrency=1)(narrow.enter)
    app.queue("wide")(wide.enter)
    async with stage.worker(app, concurrency=4):
        for _ in range(5):
            await stage.send("narrow")
            await stage.send("wide")
        await quiesce()
        assert (narrow.inside, wide.inside) == (1, 3)
        narrow.go_on.set()
        wide.go_on.set()
        for _ in range(10):
            await stage.answer()
    assert narrow.most == 1


async def test_queues_take_turns(stage: Stage) -> None:
    app, order = App("a"), []
    app.queue("q1")(lambda payload: order.append(1))
    app.queue("q2")(lambda payload: order.append(2))
    for _ in range(4):
        await stage.send("q1")
        await stage.send("q2")
    async with stage.worker(app, concurrency=1):
        for _ in range(8):
            await stage.answer()
    assert sorted(order[:4]) == [1, 1, 2, 2] or sorted(order[1:5]) == [1, 1, 2, 2]


async def test_plain_handlers_run_side_by_side(stage: Stage) -> None:
    app, barrier = App("a"), threading.Barrier(3)

    @app.queue("q")
    def meet(payload: Any) -> None:
        barrier.wait(5)

    async with stage.worker(app, concurrency=3):
        for _ in range(3):
            await stage.send("q")
        assert {(await stage.payload())["status"] for _ in range(3)} == {"ok"}


@pytest.mark.parametrize(("own", "prefetch"), [(None, 8), (1, 2), (100, 8)])
async def test_the_prefetch_follows_the_limit(stage: Stage, own: int | None, prefetch: int) -> None:
    app = App("a")
    app.queue("q", concurrency=own)(lambda payload: None)
    async with stage.worker(app, concurrency=4):
        await stage.send("q")
        await stage.answer()
    assert stage.broker.consumed == [("q", prefetch)]


async def test_what_is_not_fetched_ahead_is_there_for_another_worker(stage: Stage) -> None:
    crowds = Crowd(), Crowd()
    apps = App("a"), App("b")
    for app, crowd in zip(apps, crowds, strict=True):
        app.queue("q")(crowd.enter)
    for _ in range(4):
        await stage.send("q")
    async with stage.worker(apps[0], concurrency=2, ahead=0):
        await quiesce()
        async with stage.worker(apps[1], concurrency=2, ahead=0):
            await quiesce()
            assert [crowd.inside for crowd in crowds] == [2, 2]
            for crowd in crowds:
                crowd.go_on.set()
            for _ in range(4):
                await stage.answer()


async def test_answers_that_are_ready_together_are_published_and_acked_together(stage: Stage) -> None:
    app = App("a")

    @app.queue("q")
    async def work(payload: Any) -> None: ...

    for _ in range(10):
        await stage.send("q")
    async with stage.worker(app, concurrency=10):
        for _ in range(10):
            await stage.answer()
    assert [len(batch) for batch in stage.broker.batches] == [10]
    assert len(stage.broker.acked.get_nowait()) == 10


async def test_context_variables_of_one_command_are_not_seen_by_the_next(stage: Stage) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    app = App("a")

    @app.queue("q")
    async def work(payload: Any) -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    async with stage.worker(app, concurrency=1):
        for _ in range(3):
            await stage.send("q")
        assert [(await stage.payload())["resultado"] for _ in range(3)] == [1, 1, 1]
