"""RabbitMQ: the queues of clients, to which replies go."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq.connection import Channel, Refused
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.wire.naming import dlq_of
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.rabbitmq_stage import (
    forget,
    messages,
    plain_channel,
    take,
)
from tests.receipts import reasons, takers

url, queue, broker, nothing_goes_unheard = stage.url, stage.queue, stage.broker, stage.nothing_goes_unheard  # fixtures


class TestReplyQueues:
    @pytest.mark.parametrize("name", ["named", ""], ids=["named", "named by the server"])
    @pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "shared"])
    async def test_a_client_gets_its_answer_on_a_queue_that_lives_as_long_as_it_does(
        self, broker: RabbitMQBroker, url: str, queue: str, name: str, exclusive: bool
    ) -> None:
        """As in RabbitMQ's own tutorial on RPC."""
        with plain_channel(url) as channel:
            asked = f"{name}-{queue}" if name else ""
            reply = channel.queue_declare(asked, exclusive=exclusive, auto_delete=True).method.queue
            await publish_all(broker, [*messages(reply, 1), *messages(queue, 1)])
            assert channel.basic_get(reply, auto_ack=True)[2] == b"0"
            assert await broker._queues.depth(dlq_of(reply)) is None
            assert [found.queue for found in await broker.queues() if found.queue == queue] == [queue]
            channel.queue_delete(reply)
        if not name:
            receipts = await broker.publish([*messages(reply, 1), *messages(queue, 1)])
            assert takers(receipts) == [None, "rabbitmq"]
            assert isinstance(receipts[0].error, Refused)
            assert reply in reasons(receipts)

    @pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "shared"])
    async def test_those_of_clients_that_have_gone_are_not_looked_for_again(
        self, broker: RabbitMQBroker, url: str, queue: str, exclusive: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each look at one would cost a channel, and a line in the server's log."""
        replies = [f"{queue}-{n}" for n in range(3)]
        with plain_channel(url) as channel:
            for reply in replies:
                channel.queue_declare(reply, exclusive=exclusive)
                await publish_all(broker, messages(reply, 1))
            await broker.declare([queue])
            shown = {found.queue for found in await broker.queues()}
            assert shown == ({queue} if exclusive else {queue, *replies})
            if exclusive:  # which nobody but its client can look at
                assert await looked_for(broker, monkeypatch) == [queue, dlq_of(queue)]
            for reply in replies:
                channel.queue_delete(reply)
        await broker.queues()
        assert await looked_for(broker, monkeypatch) == [queue, dlq_of(queue)]
        await publish_all(broker, messages(replies[0], 1))  # which nobody reads: it is made, and shown
        assert {found.queue: found.ready for found in await broker.queues()} == {queue: 0, replies[0]: 1}
        forget(url, replies[:1])

    @pytest.mark.parametrize("theirs", [{"x-expires": 60_000}, {}])
    async def test_how_long_a_client_keeps_its_replies_is_its_own(
        self, broker: RabbitMQBroker, url: str, queue: str, theirs: dict[str, Any]
    ) -> None:
        """And whether they have dead letters."""
        with plain_channel(url) as channel, capture_logs() as logs:
            channel.queue_declare(queue, durable=True, arguments=theirs)
            await publish_all(broker, [Outgoing(queue, b"x", is_reply=True)])
        assert logs == []

    async def test_one_that_is_made_for_a_reply_has_no_dead_letter_queue_until_it_is_consumed_here(
        self, broker: RabbitMQBroker, queue: str
    ) -> None:
        """A client may name one for each run, and leave them all behind."""
        await publish_all(broker, [Outgoing(queue, b"0", is_reply=True)])
        assert await broker._queues.depth(queue) is not None
        assert await broker._queues.depth(dlq_of(queue)) is None
        consumer = await broker.consume(queue, prefetch=1)
        [delivery] = await take(consumer, 1)
        await consumer.dead_letter(delivery, "bad")
        assert [letter.reason for letter in await broker.dead_letters(queue, limit=5)] == ["bad"]

    async def test_a_destination_that_was_deleted_and_made_by_others_is_shown(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await broker.declare([queue])
        with plain_channel(url) as channel:
            channel.queue_delete(queue)
            assert [found.queue for found in await broker.queues()] == [queue], "its dead letters are seen here alone"
            channel.queue_delete(dlq_of(queue))
            assert await broker.queues() == []
            channel.queue_declare(queue, durable=True)
            assert [found.queue for found in await broker.queues()] == [queue]

    async def test_one_that_was_exclusive_to_its_client_is_shown_once_it_can_be_looked_at(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        reply = f"{queue}-reply"
        await broker.declare([queue])
        with plain_channel(url) as channel:
            channel.queue_delete(queue)
            for name in (queue, reply):
                channel.queue_declare(name, exclusive=True)
            await publish_all(broker, messages(reply, 1))
            assert await broker.queues() == []
        with plain_channel(url) as channel:
            for name in (queue, reply):
                channel.queue_declare(name, durable=True)
            assert [found.queue for found in await broker.queues()] == [queue], "a destination is always looked for"
            assert [found.queue for found in await broker.queues([reply])] == [reply]
            assert {found.queue for found in await broker.queues()} == {queue, reply}
        forget(url, [reply])


async def looked_for(broker: RabbitMQBroker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queues that the server is asked for to show all."""
    asked, call = list[str](), Channel.call

    async def noted(channel: Channel, method: str, **arguments: Any) -> Any:
        asked.append(arguments["queue"])
        return await call(channel, method, **arguments)

    with monkeypatch.context() as watched:
        watched.setattr(Channel, "call", noted)
        await broker.queues()
    return asked
