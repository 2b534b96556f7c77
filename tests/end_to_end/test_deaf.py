"""Consumers are made deaf on the server's side; the engine notices and works again, without a restart."""

import asyncio
from collections.abc import Awaitable, Callable

import nats
import pika
import pytest
import redis.asyncio

from oraculo.brokers.nats.layout import stream_of
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, recording_app
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
