"""Consumers are made deaf on the server's side, or may not read; the engine notices, says why, and works again, without
a restart."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import nats
import pika
import pytest
import redis.asyncio

from oraculo.brokers.nats.layout import stream_of
from oraculo.brokers.vigil import VigilantBroker, VigilantConsumer
from oraculo.ports.broker import Consumer, Delivery
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, answer, recording_app
from tests.servers.fleet import BROKERS, Fleet
from tests.waiting import until


async def delete_the_queue(url: str, queue: str) -> None:
    """RabbitMQ then cancels the consumer."""

    def delete() -> None:
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            connection.channel().queue_delete(queue)

    await asyncio.to_thread(delete)


async def destroy_the_group(url: str, queue: str) -> None:
    client = redis.asyncio.from_url(url)
    await client.xgroup_destroy(queue, queue)
    await client.aclose()


async def delete_the_consumer(url: str, queue: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().delete_consumer(stream_of(queue), stream_of(queue))
    await client.close()


DEAFEN: dict[str, Callable[[str, str], Awaitable[None]]] = {
    "rabbitmq": delete_the_queue,
    "redis": destroy_the_group,
    "nats": delete_the_consumer,
}


@pytest.mark.parametrize("name", BROKERS)
async def test_a_consumer_made_deaf_on_the_server_works_again(name: str, fleet: Fleet) -> None:
    settings = settings_for(fleet.url(name), silence=1.0)
    request = {"destinos": ["executador_x"], "payload": {}, "timeout": 60}
    async with Stage(settings, recording_app(Journal(), ("executador_x",))) as oraculo:
        assert (await oraculo.run(request))["status"] == "concluida"
        for queue in ("resultados", "executador_x"):
            await DEAFEN[name](fleet.url(name), oraculo.engine.names.physical(queue))
            aggregate = await oraculo.run(request, wait=45)
            assert aggregate["status"] == "concluida", f"after the consumer of {queue} was made deaf"

        async def is_ready() -> bool:
            return (await oraculo.operations.health()).is_ready

        await until(is_ready, saying="readiness")


@pytest.mark.parametrize("name", BROKERS)
async def test_a_consumer_that_gets_nothing_for_no_reason_anybody_knows_is_found_out(
    name: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is delivered to it is swallowed on the way: no client can notice that."""
    settings = settings_for(fleet.url(name), silence=0.5)
    async with Stage(settings, recording_app(Journal(), ("executador_x",))) as oraculo:
        vigil = oraculo.broker
        assert isinstance(vigil, VigilantBroker)
        monkeypatch.setattr(vigil, "_patience", 1.0)
        await swallow(oraculo.engine.own_queues._consumers[oraculo.engine.names.answers], monkeypatch)

        async def has_status(ready: bool) -> bool:
            return (await oraculo.operations.health()).is_ready is ready

        run_id = await oraculo.submit({"destinos": ["executador_x"], "payload": {}, "timeout": 60})
        await until(lambda: has_status(False), within=30, saying="readiness to turn red")
        assert (await oraculo.ended(run_id, wait=45))["status"] == "concluida"
        await until(lambda: has_status(True), within=30, saying="readiness to turn green")


async def swallow(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing that the server delivers reaches whoever takes; the consumer itself lives."""
    assert isinstance(consumer, VigilantConsumer)
    inner, closed = consumer._inner, asyncio.Event()
    close = inner.close

    async def take(_limit: int) -> list[Delivery]:
        await closed.wait()
        return []

    async def close_both() -> None:
        closed.set()
        await close()

    monkeypatch.setattr(inner, "take", take)
    monkeypatch.setattr(inner, "close", close_both)


Reader = tuple[str, Callable[[str], Awaitable[None]]]


@pytest.fixture
async def reader(fleet: Fleet) -> AsyncIterator[Reader]:
    """The URL of a Redis user who may do everything but read queues, and how to give or take a right."""
    client = redis.asyncio.from_url(fleet.url("redis"))
    name = f"user-{uuid.uuid4().hex[:8]}"

    async def allow(right: str) -> None:
        await client.execute_command("ACL", "SETUSER", name, right)

    await client.execute_command("ACL", "SETUSER", name, "on", f">{name}", "~*", "&*", "+@all", "-xreadgroup")
    yield fleet.url("redis").replace("://", f"://{name}:{name}@"), allow
    await client.execute_command("ACL", "DELUSER", name)
    await client.aclose()


async def test_an_engine_that_may_not_read_answers_says_so_and_reads_them_once_it_may(
    reader: Reader,
) -> None:
    url, allow = reader
    async with Stage(settings_for(url)) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"], "payload": {}, "timeout": 60})

        async def explanation() -> str:
            told = await oraculo.operations.explain(run_id)
            return told if "queue resultados cannot be used" in told else ""

        assert "xreadgroup" in await until(explanation)
        health = await oraculo.operations.health()
        assert not health.is_ready
        assert "xreadgroup" in (health.parts["consumers"] or "")
        await oraculo.publish("resultados", answer(run_id, tipo_evento="resultado_execucao"))
        await allow("+xreadgroup")
        assert (await oraculo.ended(run_id))["status"] == "concluida"


async def test_with_another_broker_runs_go_over_that_one(reader: Reader, fleet: Fleet) -> None:
    """Though the first takes commands, and never breaks."""
    url, allow = reader
    settings = settings_for(f"{url},{fleet.url('nats')}")
    request = {"destinos": ["executador_x"], "payload": {}, "timeout": 60}
    async with Stage(settings, recording_app(Journal(), ("executador_x",))) as oraculo:
        assert (await oraculo.run(request))["status"] == "concluida"
        assert "xreadgroup" in ((await oraculo.operations.health()).parts["broker redis"] or "")
        await allow("+xreadgroup")

        async def is_ready() -> bool:
            return (await oraculo.operations.health()).is_ready

        await until(is_ready, saying="readiness, though nothing comes over Redis")
