"""An engine that dies after it sent a command and before it noted so: the next cannot know, and sends it again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest

from oraculo.bootstrap import make_broker, make_worker
from oraculo.brokers.nats.layout import stream_of
from oraculo.engine.inbox import Inbox
from oraculo.ports.broker import Broker
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.wire.naming import QueueNames
from oraculo.worker import App
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import BROKERS, Fleet
from tests.servers.proxy import Proxy
from tests.waiting import until

QUEUE = "escavador_a"


@pytest.mark.parametrize("name", BROKERS)
async def test_a_command_that_is_sent_again_comes_once_where_the_broker_can_tell(
    name: str, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = settings_for(fleet.url(name)), str(tmp_path / "oraculo.db")
    with monkeypatch.context() as dying:
        dying.setattr(Inbox, "note", lambda self, notes, **how: None)
        async with Stage(settings, store=SqliteStore(path)) as before:
            request = {"correlation_id": "ação 1%", "destinos": [QUEUE], "timeout": 60}
            await before.submit(request)
            await until(lambda: waiting(before, 1))
    store = SqliteStore(path)
    async with Stage(settings, store=store) as after:
        await until(lambda: nothing_unsent(store))
        expected = 1 if name == "nats" else 2  # a worker tells the second by its identity
        await until(lambda: waiting(after, expected))


async def test_a_run_with_the_id_of_one_that_is_gone_gets_its_commands(fleet: Fleet) -> None:
    settings = settings_for(fleet.url("nats"))
    for count in (1, 2):
        async with Stage(settings) as oraculo:  # with an empty store
            await oraculo.submit({"correlation_id": "the same", "destinos": [QUEUE], "timeout": 60})
            await until(lambda count=count, oraculo=oraculo: waiting(oraculo, count))


async def test_a_command_is_sent_again_when_its_answer_was_lost(fleet: Fleet) -> None:
    """NATS lost its other streams. It still knows the command, and must not drop it as a repeat."""
    url = fleet.url("nats")
    with Proxy(url) as proxy:
        settings = settings_for(proxy.url)
        of_worker = settings_for(url, prefix=settings.broker.prefix)
        names = QueueNames(settings.broker.prefix)
        answers = names.answers
        app, started, may_end = App("w"), asyncio.Event(), asyncio.Event()

        @app.queue(QUEUE)
        async def work(payload: dict[str, object]) -> str:
            started.set()
            await may_end.wait()
            return "ok"

        async with Stage(settings) as oraculo, working(app, of_worker) as broker:
            run_id = await oraculo.submit({"destinos": [QUEUE], "timeout": 60})
            await asyncio.wait_for(started.wait(), 10)
            await until(lambda: is_noted(oraculo, run_id))
            await until(lambda: held(broker, names.memory, 1), saying="the broker's mark")
            proxy.refuses = True
            proxy.cut()
            may_end.set()
            await until(lambda: held(broker, answers, 1))
            await until(lambda: held(broker, f"{settings.broker.prefix}{QUEUE}", 0))
            await broker.remove([answers, names.memory])
            proxy.refuses = False
            assert (await oraculo.ended(run_id))["status"] == "concluida"


async def test_a_reply_queue_that_its_client_deletes_leaves_nothing_behind(fleet: Fleet) -> None:
    settings = settings_for(fleet.url("nats"))
    replies = f"{settings.broker.prefix}respostas"
    async with Stage(settings) as oraculo:
        for _ in range(2):
            await oraculo.submit({"destinos": ["escavador_b"], "timeout": 0.05, "responder_em": "respostas"})
            await until(lambda: oraculo.broker.queues([replies]), saying="the reply queue")
            await until(lambda: held(oraculo.broker, replies, 1), saying="the reply")
            await delete_stream(fleet.url("nats"), replies)
        assert await oraculo.broker.queues([replies]) == []


@asynccontextmanager
async def working(app: App, settings: Settings) -> AsyncIterator[Broker]:
    broker = make_broker(settings, SystemClock())
    await broker.start()
    async with make_worker(app, broker, settings, SystemClock()):
        yield broker
    await broker.close()


async def is_noted(stage: Stage, run_id: str) -> bool:
    return "tarefa_enviada" in [entry.what for entry in await stage.operations.history(run_id)]


async def held(broker: Broker, queue: str, count: int) -> bool:
    states = await broker.queues([queue])
    return [state.ready + (state.unacked or 0) for state in states] == [count]


async def delete_stream(url: str, queue: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().delete_stream(stream_of(queue))
    await client.close()


async def waiting(stage: Stage, count: int) -> bool:
    states = await stage.broker.queues([stage.engine.parts.queues.names.physical(QUEUE)])
    return [state.ready for state in states] == [count]


async def nothing_unsent(store: SqliteStore) -> bool:
    return not await store.unsent(1)
