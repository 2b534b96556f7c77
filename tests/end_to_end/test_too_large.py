"""A command that is larger than a real broker takes: its task fails at once, and runs once the limit is raised. Of
RabbitMQ, whose limit takes long to be set, see its own tests."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from redis.asyncio import Redis

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.ports.broker import Broker
from oraculo.settings import BrokerSettings, LimitSettings, Settings
from oraculo.testing.harness import Harness
from tests.brokers.nats_stage import BareNats, api, plain_client
from tests.engine.workers import Journal, recording_app
from tests.servers.fleet import Fleet
from tests.waiting import until

Raise = Callable[[], Awaitable[object]]  # of the limit
Limited = Callable[[Fleet, str], AbstractAsyncContextManager[tuple[Broker, Raise]]]
QUEUE = "executador_a"
SMALL, LARGE = 1_000, 1_100_000  # bytes


@asynccontextmanager
async def redis(fleet: Fleet, prefix: str) -> AsyncIterator[tuple[Broker, Raise]]:
    server = fleet.breakable("redis")
    async with Redis.from_url(server.url) as client:

        async def limit(megabytes: int) -> None:
            await client.config_set("proto-max-bulk-len", megabytes * 1024 * 1024)

        await limit(1)
        try:
            yield RedisStreamsBroker(server.url), lambda: limit(512)
        finally:
            await limit(512)


@asynccontextmanager
async def nats(fleet: Fleet, prefix: str) -> AsyncIterator[tuple[Broker, Raise]]:
    with BareNats("max_payload: 1MB") as server:
        broker = NatsBroker(server.url)

        async def restart() -> None:
            await asyncio.to_thread(server.restart_with, "max_payload: 2MB")
            await until(lambda: broker.capabilities.max_message == 2 * 1024 * 1024, saying="it to be connected again")

        yield broker, restart


@asynccontextmanager
async def nats_stream(fleet: Fleet, prefix: str) -> AsyncIterator[tuple[Broker, Raise]]:
    broker, stream = NatsBroker(fleet.url("nats")), prefix + QUEUE
    async with plain_client(fleet.url("nats")) as client:
        await broker.start()
        await broker.declare([stream])

        async def limit(size: int) -> None:
            config = (await api(client, f"STREAM.INFO.{stream}"))["config"]
            assert "error" not in await api(client, f"STREAM.UPDATE.{stream}", {**config, "max_msg_size": size})

        await limit(1_000_000)
        yield broker, lambda: limit(-1)


@pytest.mark.parametrize(
    ("limited", "told"),
    [
        (redis, "redis: a message of 1100"),
        (nats, "nats: a message of 1100"),
        (nats_stream, "nats: NATS at 127.0.0.1:"),
    ],
)
async def test_a_command_that_is_too_large_fails_at_once_and_can_be_repeated(
    fleet: Fleet, limited: Limited, told: str
) -> None:
    prefix = f"t{uuid.uuid4().hex[:8]}-"
    settings = Settings(broker=BrokerSettings(prefix=prefix), limits=LimitSettings(payload_bytes=2 * LARGE))
    destinations = [
        {"id": f"t{size}", "fila": QUEUE, "payload": {"texto": "x" * size}} for size in (SMALL, LARGE, 2 * SMALL)
    ]
    async with limited(fleet, prefix) as (broker, raise_limit):
        app = recording_app(Journal(), (QUEUE,))
        async with Harness(app, broker=broker, settings=settings) as oraculo:
            aggregate = await oraculo.run({"destinos": destinations, "timeout": 600}, wait=10)
            assert aggregate["status"] == "parcial"
            [(task, failure)] = aggregate["falhas"].items()
            assert (task, failure["status"], failure["tentativas"]) == (f"t{LARGE}", "erro", 1)
            assert failure["motivo"].startswith(f"its command is too large for {told}")
            assert "1100" in failure["motivo"]
            assert "raise that limit" in failure["motivo"]
            [state] = await oraculo.broker.queues([prefix + QUEUE])
            assert state.dead_letters == 0
            await raise_limit()
            await oraculo.operations.repeat(aggregate["correlation_id"])
            assert (await oraculo.ended(aggregate["correlation_id"]))["status"] == "concluida"
