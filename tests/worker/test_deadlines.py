"""Handlers that outlive their deadline: the run is told, and the worker stays able to work."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from oraculo.wire.timestamps import to_iso
from oraculo.worker import App, dispatch
from tests.waiting import until

from .stage import Stage, quiesce

GIVEN_UP = {"status": "erro", "erros": ["deadline passed"], "repetir": False}


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DEADLINE_GRACE", 0.0)


def soon(seconds: float = 0.1) -> str:
    return to_iso(time.time() + seconds)


class Hanging:
    """A plain handler that hangs when it is told to, until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def work(self, payload: dict[str, Any]) -> str:
        if payload.get("hang"):
            self.over.wait(30)
        return "done"


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    handler = Hanging()
    yield handler
    handler.over.set()


async def test_an_async_handler_is_cancelled_and_its_place_is_free(stage: Stage) -> None:
    app, cancelled = App("a"), asyncio.Event()

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> str:
        try:
            await asyncio.sleep(30 if payload.get("hang") else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "done"

    async with stage.worker(app, concurrency=1):
        await stage.send("q", {"hang": True}, prazo=soon())
        assert await stage.payload() == GIVEN_UP
        await stage.send("q")
        assert (await stage.payload())["resultado"] == "done"
    assert cancelled.is_set()
    assert await stage.left("q") == (0, 0, 0)


async def test_an_async_handler_that_will_not_be_cancelled_loses_its_place_too(stage: Stage) -> None:
    app, over = App("a"), asyncio.Event()

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> str:
        while payload.get("hang") and not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        return "done"

    async with stage.worker(app, concurrency=1):
        await stage.send("q", {"hang": True}, prazo=soon())
        assert await stage.payload() == GIVEN_UP
        await stage.send("q")
        assert (await stage.payload())["resultado"] == "done"
        over.set()
        await quiesce()
        assert len(stage.broker.batches) == 2, "what it says in the end is not sent"


async def test_a_plain_handler_gives_its_place_to_the_next(stage: Stage, hanging: Hanging) -> None:
    app = App("a")
    app.queue("q", concurrency=1)(hanging.work)
    worker = stage.worker(app, concurrency=1, stop_grace=30)
    async with worker:
        for _ in range(3):
            await stage.send("q", {"hang": True}, prazo=soon())
            assert await stage.payload() == GIVEN_UP
        await stage.send("q")
        assert (await stage.payload())["resultado"] == "done"
        assert await stage.left("q") == (0, 0, 0)
        async with asyncio.timeout(5):  # it was answered: the stop does not wait for it
            await worker.stop()


async def test_plain_handlers_are_given_up_in_a_bounded_number_only(stage: Stage, hanging: Hanging) -> None:
    app = App("a")
    app.queue("q")(hanging.work)
    with capture_logs() as logs:
        async with stage.worker(app, concurrency=1):
            for _ in range(dispatch.OVERDUE_PER_PLACE + 1):
                await stage.send("q", {"hang": True}, prazo=soon(0.5))  # each is begun in time
                assert await stage.payload() == GIVEN_UP
            assert any("outlive their deadline" in line["event"] for line in logs if line["log_level"] == "error")
            before = len(stage.broker.batches)
            await stage.send("q")
            await asyncio.sleep(0.1)
            assert len(stage.broker.batches) == before, "it waits"
            hanging.over.set()
            assert (await stage.payload())["resultado"] == "done"


async def test_what_waited_for_a_thread_until_its_deadline_is_not_begun(
    stage: Stage, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, begun = App("a"), list[str]()

    @app.queue("q")
    def work(payload: dict[str, Any]) -> str:
        begun.append(payload["name"])
        return hanging.work(payload)

    async with stage.worker(app):
        await stage.send("q", {"name": "first", "hang": True})
        await until(lambda: begun, saying="the first to begin")
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            await stage.send("q", {"name": "late"}, prazo=soon())
            assert await stage.payload() == GIVEN_UP
            await stage.send("q", {"name": "last"})
            hanging.over.set()
            assert [(await stage.payload())["resultado"] for _ in range(2)] == ["done", "done"]
    assert begun == ["first", "last"]


async def test_a_repeat_of_what_was_given_up_is_answered_alike(stage: Stage, hanging: Hanging) -> None:
    app = App("a")
    app.queue("q")(hanging.work)
    async with stage.worker(app):
        for _ in range(2):
            await stage.send("q", {"hang": True}, tarefa="t", tentativa=1, prazo=soon())
            assert await stage.payload() == GIVEN_UP


async def test_the_orchestrator_tells_of_a_timeout_first(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after the deadline an answer still counts as the handler's own."""
    monkeypatch.setattr(dispatch, "DEADLINE_GRACE", 5.0)
    app = App("a")

    @app.queue("q")
    async def work(payload: Any) -> str:
        await asyncio.sleep(0.15)
        return "a little late"

    assert (await stage.payload_for(app, "q", prazo=soon()))["resultado"] == "a little late"
