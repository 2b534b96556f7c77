"""An orderly end: what runs may finish, what cannot is given back."""

import asyncio
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.errors import BrokerUnavailable, InvalidInput, OraculoError
from oraculo.worker import App, runner
from oraculo.worker.outbox import AnswerOutbox

from .stage import Stage, quiesce


async def test_a_handler_in_work_finishes_in_the_grace(stage: Stage) -> None:
    app, started, go_on = App("a"), asyncio.Event(), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> str:
        started.set()
        await go_on.wait()
        return "finished"

    worker = stage.worker(app)
    await worker.start()
    await stage.send("q")
    await started.wait()
    stopping = asyncio.create_task(worker.stop())
    await quiesce()
    assert not stopping.done()
    go_on.set()
    await stopping
    assert (await stage.payload())["resultado"] == "finished"
    assert await stage.left("q") == (0, 0, 0)


@pytest.mark.parametrize("broken", ["_next_batch", "_reply_message", "_read_receipts"])
async def test_a_worker_whose_answers_cannot_leave_ends_loudly_and_loses_no_command(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(AnswerOutbox, broken, fail)
    app = App("a")
    app.queue("q")(lambda payload: 1)
    await stage.send("q")
    with capture_logs() as logs:
        async with asyncio.timeout(5):
            with pytest.raises(OraculoError, match=r"worker 'a' stopped.*a fault of ours"):
                await stage.worker(app).run()
    assert any(line["log_level"] == "critical" for line in logs)
    assert await stage.left("q") == (1, 0, 0)


async def test_what_is_still_running_after_the_grace_is_cancelled_and_given_back(stage: Stage) -> None:
    app, started, cancelled = App("a"), asyncio.Event(), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with stage.worker(app, stop_grace=0.01):
        await stage.send("q")
        await started.wait()
    assert cancelled.is_set()
    assert await stage.left("q") == (1, 0, 0)
    assert stage.broker.batches == []


async def test_a_thread_that_does_not_end_is_given_up_and_its_command_given_back(stage: Stage) -> None:
    app, started, go_on = App("a"), threading.Event(), threading.Event()

    @app.queue("q")
    def work(payload: Any) -> None:
        started.set()
        go_on.wait(10)

    try:
        async with stage.worker(app, stop_grace=0.01):
            await stage.send("q")
            assert await asyncio.to_thread(started.wait, 5)
        assert await stage.left("q") == (1, 0, 0)
    finally:
        go_on.set()
    assert stage.broker.batches == []


async def test_what_has_not_begun_is_given_back_before_the_grace_ends(stage: Stage) -> None:
    app, started, go_on = App("a"), asyncio.Event(), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> None:
        started.set()
        await go_on.wait()

    for _ in range(2):
        await stage.send("q")
    worker = stage.worker(app, concurrency=1)
    await worker.start()
    await started.wait()
    stopping = asyncio.create_task(worker.stop())
    other = await stage.broker.consume("q", prefetch=10)
    async with asyncio.timeout(5):
        assert len(await other.take(10)) == 1
    assert not stopping.done()
    go_on.set()
    await stopping


async def test_what_ends_while_others_are_given_back_starts_none_of_them_and_breaks_off_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a broker that takes a while to give back, as all but this one do."""
    app, started, given_back, stops = App("a"), asyncio.Queue[str](), asyncio.Queue[None](), asyncio.Event()
    retry = MemoryConsumer.retry

    async def retry_slowly(*given: Any) -> None:
        stops.set()
        await quiesce()
        await retry(*given)
        given_back.put_nowait(None)

    @app.queue("long", concurrency=1)
    async def until_both_are_given_back(payload: Any) -> None:
        started.put_nowait("long")
        for _ in range(2):
            await given_back.get()

    @app.queue("short", concurrency=1)
    async def until_the_stop(payload: Any) -> None:
        started.put_nowait("short")
        await stops.wait()

    monkeypatch.setattr(MemoryConsumer, "retry", retry_slowly)
    for queue in ("long", "long", "short", "short"):
        await stage.send(queue)
    async with asyncio.timeout(5), stage.worker(app):
        assert {await started.get(), await started.get()} == {"long", "short"}
    assert started.empty()
    assert [(await stage.payload())["status"] for _ in range(2)] == ["ok", "ok"]
    assert await stage.left("long") == await stage.left("short") == (1, 0, 0)


async def test_nothing_is_taken_after_the_stop(stage: Stage) -> None:
    app, runs = App("a"), []
    app.queue("q")(lambda payload: runs.append(1))
    worker = stage.worker(app)
    await worker.start()
    await worker.stop()
    await stage.send("q")
    await worker.start()
    await quiesce()
    assert runs == []
    assert await stage.left("q") == (1, 0, 0)


async def test_stop_is_idempotent_and_every_caller_waits_for_the_end(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: None)
    worker = stage.worker(app)
    await worker.start()
    await asyncio.gather(worker.stop(), worker.stop())
    await worker.stop()
    assert not any(state.consumers for state in await stage.broker.queues(["q"]))


async def test_a_caller_that_gives_up_does_not_break_off_the_stop(stage: Stage) -> None:
    app, started, go_on = App("a"), asyncio.Event(), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> None:
        started.set()
        await go_on.wait()

    worker = stage.worker(app)
    await worker.start()
    await stage.send("q")
    await started.wait()
    impatient = asyncio.create_task(worker.stop())
    await quiesce()
    impatient.cancel()
    await quiesce()
    go_on.set()
    await worker.stop()
    assert (await stage.payload())["status"] == "ok"
    assert await stage.left("q") == (0, 0, 0)


async def test_stop_before_start_makes_run_return(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: None)
    worker = stage.worker(app)
    await worker.stop()
    async with asyncio.timeout(5):
        await worker.run()


async def test_run_works_until_it_is_stopped(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: 1)
    worker = stage.worker(app)
    running = asyncio.create_task(worker.run())
    await stage.send("q")
    await stage.answer()
    assert not running.done()
    await worker.stop()
    await running


async def test_run_that_is_cancelled_stops_in_order(stage: Stage) -> None:
    app, started, go_on = App("a"), asyncio.Event(), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> None:
        started.set()
        await go_on.wait()

    running = asyncio.create_task(stage.worker(app).run())
    await stage.send("q")
    await started.wait()
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await stage.payload())["status"] == "ok"


async def test_an_answer_that_cannot_be_published_by_the_end_gives_its_command_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PUBLISH_GRACE", 0.01)
    app, runs = App("a"), asyncio.Queue[int]()

    @app.queue("q")
    async def work(payload: Any) -> None:
        runs.put_nowait(1)

    stage.broker.refuses = lambda message: BrokerUnavailable("away")
    async with stage.worker(app):
        await stage.send("q")
        await runs.get()
    assert await stage.left("q") == (1, 0, 0)


async def test_an_app_without_handlers_is_refused(stage: Stage) -> None:
    with pytest.raises(InvalidInput, match="no handlers"):
        await stage.worker(App("empty")).start()


async def test_the_broker_stays_open(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: None)
    async with stage.worker(app):
        pass
    assert "memory" in await stage.broker.check()


async def test_a_broker_that_says_nothing_takes_its_time_once_and_not_of_each_queue(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, gone = App("a"), BrokerUnavailable("no answer in time")

    async def silent(*_: object) -> None:
        await asyncio.sleep(0.2)
        raise gone

    for n in range(10):
        app.queue(f"q{n}", concurrency=1)(lambda payload: asyncio.sleep(60))
    for n in range(10):
        await stage.send(f"q{n}")
        await stage.send(f"q{n}")
    worker = stage.worker(app, concurrency=1, stop_grace=0.0)
    await worker.start()
    await quiesce()
    monkeypatch.setattr(MemoryConsumer, "retry", silent)
    monkeypatch.setattr(MemoryConsumer, "close", silent)
    async with asyncio.timeout(1.5):
        await worker.stop()
