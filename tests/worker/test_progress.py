"""Progress: from threads and coroutines, coalesced, before the answer, and a renewal of the lease."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from oraculo.errors import BrokerUnavailable
from oraculo.worker import App, Context, outbox

from .stage import Stage, quiesce


async def test_progress_is_published_while_an_async_handler_works(stage: Stage) -> None:
    app, go_on = App("a"), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any, ctx: Context) -> None:
        ctx.progress(40, "almost half")
        await go_on.wait()

    async with stage.worker(app):
        await stage.send("q", correlation_id="c", tarefa="t", tentativa=2, responder_em="mine")
        message = await stage.answer("mine")
        go_on.set()
        assert (await stage.payload("mine"))["status"] == "ok"
    assert msgspec.json.decode(message.payload) == {"percentual": 40.0, "mensagem": "almost half"}
    assert (message.tipo_evento, message.correlation_id) == ("progresso", "c")
    assert (message.tarefa, message.tentativa) == ("t", 2)


async def test_progress_is_published_while_a_thread_works(stage: Stage) -> None:
    app, go_on = App("a"), threading.Event()

    @app.queue("q")
    def work(payload: Any, ctx: Context) -> None:
        ctx.progress(10, "begun")
        assert go_on.wait(5)

    async with stage.worker(app):
        await stage.send("q")
        try:
            assert (await stage.payload()) == {"percentual": 10.0, "mensagem": "begun"}
        finally:
            go_on.set()
        assert (await stage.payload())["status"] == "ok"


async def test_progress_renews_the_lease_of_its_command(stage: Stage) -> None:
    app, go_on = App("a"), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any, ctx: Context) -> None:
        ctx.progress(1)
        await go_on.wait()

    async with stage.worker(app):
        await stage.send("q")
        async with asyncio.timeout(5):
            extended = await stage.broker.extended.get()
        go_on.set()
        await stage.answer()
    (acked,) = stage.broker.acked.get_nowait()
    assert extended == [acked.token]


@pytest.mark.parametrize("in_thread", [True, False])
async def test_a_flood_of_progress_is_coalesced_and_ends_with_the_last(stage: Stage, in_thread: bool) -> None:
    app = App("a")

    def flood(payload: Any, ctx: Context) -> None:
        for number in range(50_000):
            ctx.progress(number / 500, str(number))

    async def flood_async(payload: Any, ctx: Context) -> None:
        flood(payload, ctx)

    app.queue("q")(flood if in_thread else flood_async)
    async with stage.worker(app):
        await stage.send("q")
        told = [await stage.payload()]
        while "status" not in told[-1]:
            told.append(await stage.payload())
    assert told[-2]["mensagem"] == "49999"
    assert len(told) < 100


def test_a_flood_announces_itself_once_until_it_is_read() -> None:
    announced: list[int] = []
    ctx = Context(correlation_id="c", queue="q", announce=lambda: announced.append(1))
    for percent in range(1000):
        ctx.progress(percent / 10)
    assert len(announced) == 1
    assert ctx.take_news() == (99.9, "")
    ctx.progress(100, "all")
    assert len(announced) == 2


async def test_later_progress_follows_by_itself(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second state comes too soon to be sent at once; it is sent when its time has come, with no further call."""
    monkeypatch.setattr(outbox, "PROGRESS_INTERVAL", 0.01)
    app, first_is_out, go_on = App("a"), asyncio.Event(), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any, ctx: Context) -> None:
        ctx.progress(1, "one")
        await first_is_out.wait()
        ctx.progress(2, "two")
        await go_on.wait()

    async with stage.worker(app):
        await stage.send("q")
        assert (await stage.payload())["mensagem"] == "one"
        first_is_out.set()
        assert (await stage.payload())["mensagem"] == "two"
        go_on.set()


async def test_what_comes_too_soon_after_other_progress_waits_and_the_last_goes_with_the_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "PROGRESS_INTERVAL", 30.0)
    app, first_is_out, second_is_told, go_on = App("a"), asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any, ctx: Context) -> None:
        ctx.progress(1, "one")
        await first_is_out.wait()
        ctx.progress(2, "two")
        second_is_told.set()
        await go_on.wait()

    async with stage.worker(app):
        await stage.send("q")
        assert (await stage.payload())["mensagem"] == "one"
        first_is_out.set()
        await second_is_told.wait()
        await quiesce()
        sent_so_far = len(stage.broker.batches)
        go_on.set()
        assert sent_so_far == 1
        assert (await stage.payload())["mensagem"] == "two"
        assert (await stage.payload())["status"] == "ok"


@pytest.mark.parametrize(("given", "told"), [(-5, 0.0), (250, 100.0), (33, 33.0)])
async def test_percent_stays_between_0_and_100(stage: Stage, given: float, told: float) -> None:
    app = App("a")
    app.queue("q")(lambda payload, ctx: ctx.progress(given, "x\0" + "y" * 5000))
    async with stage.worker(app):
        await stage.send("q")
        progress = await stage.payload()
    assert progress["percentual"] == told
    assert len(progress["mensagem"]) == 500


@pytest.mark.parametrize("message", [b"a line of a subprocess", ["a", "list"], None])
async def test_a_message_that_is_no_text_fails_its_handler_alone(stage: Stage, message: Any) -> None:
    app = App("a")
    app.queue("q")(lambda payload, ctx: ctx.progress(50, message))
    async with stage.worker(app):
        for _ in range(2):
            await stage.send("q")
            (told,) = (await stage.payload())["erros"]
    right = "the message of progress() must be a str, as 'half done'"
    assert told == f"TypeError: {right}; got {type(message).__name__}"


async def test_progress_that_cannot_be_written_is_dropped_and_said(stage: Stage) -> None:
    class Odd(str):
        def __getitem__(self, key: Any) -> Any:
            return 7

    app = App("a")
    app.queue("q")(lambda payload, ctx: ctx.progress(5, Odd()))
    with capture_logs() as logs:
        async with stage.worker(app):
            await stage.send("q", correlation_id="c")
            assert (await stage.payload())["status"] == "ok"
    (line,) = [log for log in logs if log["event"] == "progress dropped"]
    assert line["correlation_id"] == "c"


async def test_progress_that_cannot_be_published_does_not_hurt_the_answer(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload, ctx: ctx.progress(5))
    stage.broker.fail("publish", BrokerUnavailable("away"))
    async with stage.worker(app):
        await stage.send("q")
        assert (await stage.payload())["status"] == "ok"


async def test_a_thread_that_outlives_the_loop_may_still_tell_its_progress(stage: Stage) -> None:
    loop = asyncio.new_event_loop()
    app, contexts = App("a"), []
    app.queue("q")(lambda payload, ctx: contexts.append(ctx))
    async with stage.worker(app) as worker:
        await stage.send("q")
        await stage.answer()
        loop.close()
        worker._outbox._loop = loop
        thread = threading.Thread(target=contexts[0].progress, args=(1,))
        thread.start()
        thread.join()
