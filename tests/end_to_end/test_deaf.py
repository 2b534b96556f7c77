"""Consumers are made deaf on the server's side, or may not read; the engine notices, says why, and works again, without
a restart."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta

import nats
import pika
import pytest
import redis.asyncio

from oraculo.brokers.liveness import LivenessBroker, LivenessConsumer
from oraculo.brokers.nats.layout import stream_of
from oraculo.ports.broker import Consumer, Delivery
from oraculo.wire.timestamps import to_iso
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, answer, recording_app
from tests.servers.fleet import BROKERS, REDIS_FIRST, Fleet
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
            await DEAFEN[name](fleet.url(name), oraculo.engine.parts.queues.names.physical(queue))
            aggregate = await oraculo.run(request, wait=45)
            assert aggregate["status"] == "concluida", f"after the consumer of {queue} was made deaf"

        async def is_ready() -> bool:
            return (await oraculo.operations.health()).is_ready

        await until(is_ready, saying="readiness")


@pytest.mark.parametrize("name", REDIS_FIRST)
async def test_a_consumer_that_gets_nothing_for_no_reason_anybody_knows_is_found_out(
    name: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is delivered to it is swallowed on the way: no client can notice that."""
    settings = settings_for(fleet.url(name), silence=0.5)
    async with Stage(settings, recording_app(Journal(), ("executador_x",))) as oraculo:
        vigil = oraculo.broker
        assert isinstance(vigil, LivenessBroker)
        monkeypatch.setattr(vigil, "_patience", 1.0)
        await swallow(oraculo.engine.parts.consumers._consumers[oraculo.engine.parts.queues.names.answers], monkeypatch)

        async def has_status(ready: bool) -> bool:
            return (await oraculo.operations.health()).is_ready is ready

        run_id = await oraculo.submit({"destinos": ["executador_x"], "payload": {}, "timeout": 60})
        await until(lambda: has_status(False), within=30, saying="readiness to turn red")
        assert (await oraculo.ended(run_id, wait=45))["status"] == "concluida"
        await until(lambda: has_status(True), within=30, saying="readiness to turn green")


async def pause(url: str, queue: str, until: datetime) -> None:
    client = await nats.connect(url)
    request = json.dumps({"pause_until": until.isoformat()}).encode()
    await client.request(f"$JS.API.CONSUMER.PAUSE.{stream_of(queue)}.{stream_of(queue)}", request)
    await client.close()


async def test_a_paused_consumer_of_nats_is_named_and_no_worker_is_blamed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.core.explain._SLOW", 0.0)
    url, request = fleet.url("nats"), {"destinos": ["executador_x"], "payload": {}, "timeout": 5}
    async with Stage(settings_for(url, silence=0.5), recording_app(Journal(), ("executador_x",))) as oraculo:
        assert isinstance(oraculo.broker, LivenessBroker)
        monkeypatch.setattr(oraculo.broker, "_patience", 1.0)
        answers, resumes_at = oraculo.engine.parts.queues.names.answers, datetime.now(UTC) + timedelta(hours=1)
        paused = f"its consumer is paused at the server until {to_iso(resumes_at.timestamp())}"
        await pause(url, answers, resumes_at)
        run_id = await oraculo.submit(request)

        async def explanation() -> str:
            told = await oraculo.operations.explain(run_id)
            return told if "ORÁCULO itself" in told else ""

        told = await until(explanation, within=15)
        assert f"; ORÁCULO itself hears nothing on queue resultados now ({paused});" in told
        assert "at work, or gone" not in told
        health = await oraculo.operations.health()
        assert not health.is_ready
        assert (health.parts["broker nats"] or "").endswith(f"; {answers}: {paused}")
        motive = (await oraculo.ended(run_id, wait=45))["falhas"]["executador_x"]["motivo"]
        assert motive == f"no answer in 5 s; ORÁCULO itself heard nothing on queue resultados ({paused})"
        await pause(url, answers, datetime.now(UTC) - timedelta(hours=1))
        assert (await oraculo.run(request, wait=45))["status"] == "concluida"


async def test_a_paused_consumer_of_a_workers_queue_is_named(fleet: Fleet) -> None:
    url = fleet.url("nats")
    async with Stage(settings_for(url)) as oraculo:
        queue, resumes_at = (
            oraculo.engine.parts.queues.names.physical("executador_x"),
            datetime.now(UTC) + timedelta(hours=1),
        )
        await oraculo.broker.declare([queue])
        await pause(url, queue, resumes_at)
        run_id = await oraculo.submit({"destinos": ["executador_x"], "payload": {}, "timeout": 3})
        paused = f"its consumer is paused at the server until {to_iso(resumes_at.timestamp())}"

        async def is_named() -> bool:
            told = await oraculo.operations.explain(run_id)
            return f", and nobody is given what is in queue executador_x ({paused}));" in told

        await until(is_named)
        motive = (await oraculo.ended(run_id))["falhas"]["executador_x"]["motivo"]
        assert motive == f"no answer in 3 s; nobody was given what is in queue executador_x ({paused})"


async def swallow(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing that the server delivers reaches whoever takes; the consumer itself lives."""
    assert isinstance(consumer, LivenessConsumer)
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
            return told if "ORÁCULO itself hears nothing on queue resultados now" in told else ""

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
