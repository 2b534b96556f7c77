"""NATS JetStream: the removal of unused queues, ended half way or with others who publish meanwhile."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from oraculo.brokers.nats import NatsBroker, removal
from oraculo.errors import BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import Outgoing, ensure_taken, publish_all
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import bodies, eventually, is_empty, running, take

url, queue = stage.url, stage.queue  # fixtures


async def _stop_a_removal_half_way(url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process does that is killed when it has closed the stream of an unused queue."""
    async with running(url) as killed:
        with monkeypatch.context() as patch:
            patch.setattr(removal, "delete", AsyncMock(side_effect=BrokerUnavailable("killed")))
            with pytest.raises(BrokerUnavailable, match="killed"):
                await killed.remove_unused([queue])


async def test_a_queue_whose_removal_ended_half_way_takes_messages_again(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url) as knows_it:
        await knows_it.declare([queue])
        await _stop_a_removal_half_way(url, queue, monkeypatch)
        async with running(url) as starts_now:
            await starts_now.publish([Outgoing(queue, b"1"), Outgoing(queue, b"letter", reason="bad")])
        await _empty(knows_it, queue)
        await _stop_a_removal_half_way(url, queue, monkeypatch)
        with pytest.raises(QueueUnavailable, match="maximum bytes"):
            ensure_taken(await knows_it.publish([Outgoing(queue, b"2")]))
        await knows_it.publish([Outgoing(queue, b"2")])
        assert await knows_it.remove_unused([queue]) == []


async def test_what_is_sent_while_another_process_removes_a_queue_is_not_lost(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url) as remover, running(url) as publisher:
        await remover.declare([queue])
        removing, delete = asyncio.Event(), removal.delete

        async def slowly_removed(*arguments: Any) -> None:
            removing.set()
            await asyncio.sleep(0.3)
            await delete(*arguments)

        monkeypatch.setattr(removal, "delete", slowly_removed)
        removed = asyncio.create_task(remover.remove_unused([queue]))
        await removing.wait()
        await publish_all(publisher, [Outgoing(queue, b"kept")])
        assert await removed == [queue]
        assert bodies(await take(await publisher.consume(queue, prefetch=1), 1)) == [b"kept"]


async def test_a_removal_that_takes_long_is_given_up_and_the_queue_stays(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url) as broker:
        await broker.declare([queue])
        update = removal._update

        async def slowly_updated(*arguments: Any) -> Any:
            answers = await update(*arguments)
            await asyncio.sleep(0.6)
            return answers

        monkeypatch.setattr(removal, "_update", slowly_updated)
        assert await broker.remove_unused([queue]) == []
        await publish_all(broker, [Outgoing(queue, b"kept")])


async def _empty(broker: NatsBroker, queue: str) -> None:
    consumer = await broker.consume(queue, prefetch=1)
    await consumer.ack(await take(consumer, 1))
    await consumer.close()
    await broker.discard(queue, [letter.id for letter in await broker.dead_letters(queue, limit=9)])
    await eventually(lambda: is_empty(broker, queue))
