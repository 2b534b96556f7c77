"""Redis Streams: consumers that must not go deaf."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import publish_all
from tests.brokers import redis_streams_stage as stage
from tests.brokers.redis_streams_stage import (
    PROMPTLY,
    bodies,
    fresh_name,
    messages,
    own_consumers,
    seconds_of,
    started,
    state,
    take,
    waiting,
)
from tests.servers.process import Server

url, plain, queue, server = stage.url, stage.plain, stage.queue, stage.server  # fixtures


class TestDeafConsumers:
    """Whatever is done to it on the server, a consumer works again, with nothing but another consume at most."""

    @pytest.mark.parametrize(
        "harm",
        [
            lambda plain, queue: plain.xgroup_destroy(queue, queue),
            lambda plain, queue: plain.delete(queue),
            lambda plain, queue: plain.flushall(),
            lambda plain, queue: plain.script_flush(),
            lambda plain, queue: plain.rename(queue, queue + "-away"),
        ],
        ids=["group destroyed", "key deleted", "flushed", "scripts flushed", "renamed"],
    )
    async def test_it_heals_by_itself(self, server: Server, harm: Callable[[Any, str], object]) -> None:
        queue = fresh_name()
        with redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                consumer = await broker.consume(queue, prefetch=10)
                taking = await waiting(consumer)
                harm(plain, queue)
                plain.xadd(queue, {"body": b"7"})
                async with asyncio.timeout(PROMPTLY):
                    taken = await taking
                assert bodies(taken) == [7]
                await consumer.ack(taken)
                await publish_all(broker, messages(queue, 2))
                assert bodies(await take(consumer, 2)) == [0, 1]

    async def test_a_lost_group_loses_nothing_of_what_is_in_the_stream(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 4))
            consumer = await broker.consume(queue, prefetch=3)
            first, *held = await take(consumer, 3)
            await consumer.ack([first])
            plain.xgroup_destroy(queue, queue)
            await consumer.ack(held[:1])  # nothing is out any more: it must not touch what will be delivered again
            assert sorted(bodies(await take(consumer, 3))) == [1, 2, 3]
            await consumer.ack(held)
            assert (await state(broker, queue)).unacked == 3

    @pytest.mark.parametrize("how", ["kill", "unblock", "unblock with an error"])
    async def test_a_wait_that_an_operator_ends(self, url: str, plain: Any, queue: str, how: str) -> None:
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            taking = await waiting(consumer)
            (client,) = [each for each in plain.client_list() if each["name"] in own_consumers(plain, queue)]
            if how == "kill":
                plain.client_kill_filter(_id=client["id"])
                took, error = await seconds_of(taking)
                assert isinstance(error, BrokerUnavailable)
                assert took < PROMPTLY
                consumer = await broker.consume(queue, prefetch=10)
                taking = await waiting(consumer)
            else:
                plain.client_unblock(client["id"], error="error" in how)
            await publish_all(broker, messages(queue, 1))
            async with asyncio.timeout(PROMPTLY):
                assert bodies(await taking) == [0]

    async def test_a_queue_that_becomes_something_else_is_told(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            taking = await waiting(await broker.consume(queue, prefetch=1))
            plain.delete(queue)
            plain.set(queue, "mine")
            _, error = await seconds_of(taking)
            assert isinstance(error, BrokerError)
            assert "not a stream" in str(error)
