"""An explanation says why a step behind a bridge waits, as BullMQ's Redis and Celery's broker report it."""

import asyncio
import contextlib
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from bullmq import Queue
from kombu import Connection
from structlog.testing import capture_logs

from oraculo.bootstrap import make_foreign_queues
from oraculo.bridges.bullmq import BullmqQueues
from oraculo.bridges.celery import CeleryQueues, queue_state
from oraculo.bridges.celery.connections import CeleryBroker
from oraculo.pipeline.bridges import Bridge, ForeignQueue, read_bridge
from oraculo.ports.bridge import ForeignQueues
from oraculo.settings import BullmqSettings, CelerySettings, Settings
from oraculo.testing.harness import Harness
from tests.bridges.celery_stage import Bridged
from tests.bridges.node.stage import BullStage, bull_settings
from tests.servers import listener
from tests.servers.fleet import Fleet
from tests.waiting import until


def seen(queues: ForeignQueues, url: str, *, is_as: Callable[[ForeignQueue], bool]) -> Callable[[], object]:
    destination = read_bridge(url)
    assert isinstance(destination, Bridge)

    async def look() -> ForeignQueue | None:
        found = await queues.state_of(destination)
        return found if found is not None and is_as(found) else None

    return look


async def explained(oraculo: Harness, run_id: str, part: str) -> None:
    async def is_told() -> bool:
        return part in await oraculo.operations.explain(run_id)

    await until(is_told, within=20, saying=part)


@pytest.mark.parametrize("legacy", [False, True])
async def test_jobs_that_wait_in_a_queue_of_bullmq_are_counted_and_a_pause_is_told(legacy: bool, fleet: Fleet) -> None:
    settings = bull_settings("memory://", fleet.url("redis"), legacy=legacy, priority=False)
    async with BullStage(settings) as oraculo:
        oraculo.engine.parts.bridges.running = [oraculo.bridge]
        run_id = await oraculo.submit({"destinos": ["bullmq://videos"], "payload": {}})
        found = await until(
            seen(oraculo.queues, "bullmq://videos", is_as=lambda found: found.waiting == 1), saying="the job"
        )
        assert found == ForeignQueue("BullMQ's queue videos", 1, held=0)
        await oraculo.redis.lmove(oraculo.key("videos", "wait"), oraculo.key("videos", "active"))
        assert await oraculo.queues.state_of(Bridge("bullmq", "videos")) == ForeignQueue(
            "BullMQ's queue videos", 0, held=1
        )
        if legacy:
            await oraculo.redis.set(oraculo.key("videos", "meta-paused"), "1")
        else:
            await Queue("videos", {"connection": oraculo.redis, "prefix": oraculo.settings.bullmq.prefix}).pause()
        await explained(oraculo, run_id, " to bullmq://videos, and BullMQ's queue videos is paused);")


async def test_a_mark_of_bullmq_4_is_no_job_and_what_cannot_be_counted_is_not_told(fleet: Fleet) -> None:
    async with BullStage(bull_settings("memory://", fleet.url("redis"))) as oraculo:
        await oraculo.redis.rpush(oraculo.key("videos", "wait"), "7", "0:1700000000000")
        await oraculo.redis.rpush(oraculo.key("videos", "paused"), "8")
        await oraculo.redis.zadd(oraculo.key("videos", "prioritized"), {"9": 1})
        assert await oraculo.queues.state_of(Bridge("bullmq", "videos")) == ForeignQueue(
            "BullMQ's queue videos", 3, held=0
        )
        await oraculo.redis.set(oraculo.key("fotos", "wait"), "not a list")
        assert await oraculo.queues.state_of(Bridge("bullmq", "fotos")) is None


@contextlib.asynccontextmanager
async def listening(url: str, queue: str) -> AsyncIterator[None]:
    with Connection(url) as connection:
        consumer = connection.SimpleQueue(queue)
        try:
            await asyncio.to_thread(consumer.consumer.consume)
            yield
        finally:
            consumer.close()


async def test_nobody_listens_on_a_queue_of_celery(fleet: Fleet) -> None:
    url, queue = fleet.url("rabbitmq"), f"fila-{uuid.uuid4().hex[:8]}"
    async with Bridged(url, queue) as oraculo:
        await oraculo.is_connected()
        run_id = await oraculo.submit({"destinos": ["celery://loja.cobrar"], "payload": {}})
        await explained(oraculo, run_id, f" to celery://loja.cobrar, and nobody listens on Celery's queue {queue});")
        async with listening(url, queue):
            look = seen(oraculo.queues, "celery://loja.cobrar", is_as=lambda found: found.listening == 1)
            assert await until(look, saying="somebody to listen")
        missing = await oraculo.queues.state_of(Bridge("celery", "t", queue=f"{queue}-ausente"))
        assert missing == ForeignQueue(f"Celery's queue {queue}-ausente", 0, listening=0)
    with Connection(url) as connection:
        connection.channel().queue_delete(queue)


async def test_a_process_that_runs_no_bridge_sees_the_same(fleet: Fleet) -> None:
    queue = f"fila-{uuid.uuid4().hex[:8]}"
    async with BullStage(bull_settings("memory://", fleet.url("redis"))) as oraculo:
        settings = msgspec.structs.replace(
            oraculo.settings, celery=CelerySettings(broker_url=fleet.url("redis"), queue=queue)
        )
        await oraculo.redis.rpush(oraculo.key("videos", "wait"), "7")
        await oraculo.redis.rpush(queue, "{}")
        await oraculo.redis.rpush(f"{queue}-b", "{}", "{}")
        celery, bullmq = make_foreign_queues(settings)
        assert await celery.state_of(Bridge("celery", "loja.cobrar")) == ForeignQueue(f"Celery's queue {queue}", 1)
        other = Bridge("celery", "loja.cobrar", queue=f"{queue}-b")
        assert await celery.state_of(other) == ForeignQueue(f"Celery's queue {queue}-b", 2)
        assert await bullmq.state_of(Bridge("bullmq", "videos")) == ForeignQueue("BullMQ's queue videos", 1, held=0)
        for system in (celery, bullmq):
            await system.stop()
        await oraculo.redis.delete(queue, f"{queue}-b")


@pytest.mark.parametrize(("missing", "left"), [("celery", ["bullmq"]), ("bullmq", ["celery"])])
def test_an_api_without_what_a_bridge_needs_goes_without_its_queues(
    missing: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith(f"oraculo.bridges.{missing}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    celery, bullmq = CelerySettings(broker_url="redis://x"), BullmqSettings(url="redis://x")
    assert [system.name for system in make_foreign_queues(Settings(celery=celery, bullmq=bullmq))] == left
    assert make_foreign_queues(Settings()) == []


def test_an_api_goes_without_queues_that_cannot_be_looked_at() -> None:
    bullmq = BullmqSettings(url="redis://x")
    settings = Settings(celery=CelerySettings(broker_url="nonsense://x"), bullmq=bullmq)
    with capture_logs() as logged:
        assert [system.name for system in make_foreign_queues(settings)] == ["bullmq"]
    assert [line["bridge"] for line in logged] == ["celery"]


async def test_tasks_that_wait_in_a_redis_of_celery_are_counted_and_no_connection_is_left(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, opened, connect = f"fila-{uuid.uuid4().hex[:8]}", list[Connection](), CeleryBroker.connect

    def noted(broker: CeleryBroker, connection: Connection) -> None:
        if threading.current_thread().name.startswith("oraculo-celery-queues"):
            opened.append(connection)
        connect(broker, connection)

    monkeypatch.setattr(CeleryBroker, "connect", noted)
    async with Bridged(fleet.url("redis"), queue) as oraculo:
        await oraculo.is_connected()
        await oraculo.submit({"destinos": ["celery://loja.cobrar"], "payload": {}})
        look = seen(oraculo.queues, "celery://loja.cobrar", is_as=lambda found: found.waiting == 1)
        assert await until(look, saying="the task") == ForeignQueue(f"Celery's queue {queue}", 1)
    assert opened
    assert not [connection for connection in opened if connection.connected]


async def test_a_redis_of_bullmq_that_says_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.bridges.bullmq.queue_state.PATIENCE", 0.05)
    async with listener.listening(listener.says_nothing) as port, asyncio.timeout(5):
        queues = BullmqQueues(BullmqSettings(url=f"redis://127.0.0.1:{port}/0"))
        assert await queues.state_of(Bridge("bullmq", "videos")) is None
        await queues.stop()


async def test_a_broker_of_celery_that_is_away_tells_nothing(unused_tcp_port: int) -> None:
    async with Bridged(f"redis://127.0.0.1:{unused_tcp_port}/0", "fila") as oraculo:
        assert await oraculo.queues.state_of(Bridge("celery", "loja.cobrar")) is None
        await oraculo.queues.stop()
        assert await oraculo.queues.state_of(Bridge("celery", "loja.cobrar")) is None, "stopped, and asked all the same"


async def test_a_broker_of_celery_that_says_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_state, "_TIMEOUT", 0.05)
    async with listener.listening(listener.says_nothing) as port, asyncio.timeout(5):
        queues = CeleryQueues(CelerySettings(broker_url=f"redis://127.0.0.1:{port}/0"))
        asked = [queues.state_of(Bridge("celery", "loja.cobrar", queue=str(number))) for number in range(20)]
        assert await asyncio.gather(*asked) == [None] * 20
        await queues.stop()
