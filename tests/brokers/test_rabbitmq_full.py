"""RabbitMQ: queues that are full, and queues that say nothing."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq.consumer import RabbitMQConsumer
from oraculo.brokers.rabbitmq.frames import Parcel
from oraculo.errors import BrokerUnavailable, MessageTooLarge, QueueFull, QueueUnavailable
from oraculo.ports.broker import Outgoing, Receipt, ensure_taken, publish_all
from oraculo.testing.harness import Harness
from oraculo.wire.naming import dlq_of
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.rabbitmq_stage import (
    bodies,
    eventually,
    forget,
    fresh_name,
    letters,
    messages,
    plain_channel,
    published,
    running,
    state,
    take,
    trouble,
)
from tests.receipts import places_down, reasons, takers
from tests.servers.fleet import Fleet
from tests.servers.rabbitmq import RabbitMQ, suspended
from tests.waiting import until

url, queue, broker, nothing_goes_unheard = stage.url, stage.queue, stage.broker, stage.nothing_goes_unheard  # fixtures


def fill_quarantine(channel: BlockingChannel, queue: str) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    channel.queue_declare(dlq_of(queue), durable=True, arguments=arguments)
    channel.basic_publish("", dlq_of(queue), b"the one that it has room for")


@asynccontextmanager
async def largest_message(server: RabbitMQ, size: int) -> AsyncIterator[None]:
    """For the channels that are opened from now on."""
    set_limit = "N = {}, application:set_env(rabbit, max_message_size, N), persistent_term:put(max_message_size, N)."
    await asyncio.to_thread(server.evaluate, set_limit.format(size))
    try:
        yield
    finally:
        await asyncio.to_thread(server.evaluate, set_limit.format(134217728))


class TestFull:
    @pytest.mark.parametrize("other", ["is there", "must be made"])
    async def test_what_a_full_queue_does_not_take_is_told_and_the_others_go(
        self, broker: RabbitMQBroker, url: str, queue: str, other: str
    ) -> None:
        """Also when one of the others comes back, because its queue vanished, and is published again."""
        elsewhere = fresh_name()
        await broker.declare([elsewhere])
        with plain_channel(url) as channel:
            arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
            channel.queue_declare(queue, durable=True, arguments=arguments)
            if other == "must be made":
                channel.queue_delete(elsewhere)
        batch = [one for both in zip(messages(queue, 4), messages(elsewhere, 4), strict=True) for one in both]
        receipts = await broker.publish(batch)
        assert re.search(f"2 of 4 messages for {queue}: it is full", reasons(receipts))
        assert takers(receipts) == ["rabbitmq"] * 4 + [None, "rabbitmq", None, "rabbitmq"]
        assert not places_down(receipts)
        assert trouble(broker) == ""  # it works
        assert ((await state(broker, queue)).ready, (await state(broker, elsewhere)).ready) == (2, 4)
        assert bodies(await take(await broker.consume(queue, prefetch=2), 2)) == [b"0", b"1"]
        forget(url, [elsewhere])

    async def test_a_channel_that_was_refused_is_not_used_again(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        """In a cluster it may be the channel that is refused, by a queue that would take what comes by another."""
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=True, arguments={"x-max-length": 500, "x-overflow": "reject-publish"})
        for _ in range(2):  # on its own channel, and on the shared one
            await publish_all(broker, messages(queue, 1))
        refused = broker._publisher._lanes[""]
        outcomes = await asyncio.gather(*(broker.publish(messages(queue, 100)) for _ in range(10)))
        taken = sum(takers(receipts).count("rabbitmq") for receipts in outcomes)
        assert broker._publisher._lanes.get("") is not refused
        await until(lambda: not refused.channel.is_open, saying="the old channel to close")
        assert (await state(broker, queue)).ready == 2 + taken

    async def test_a_quarantine_that_is_full_keeps_the_message_where_it_was(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        with plain_channel(url) as channel:
            fill_quarantine(channel, queue)
        await publish_all(broker, messages(queue, 1))
        consumer = await broker.consume(queue, prefetch=1)
        (held,) = await take(consumer, 1)
        with pytest.raises(QueueFull):
            await consumer.dead_letter(held, "broken")
        (again,) = await take(consumer, 1)
        assert again.body == held.body

    @pytest.mark.parametrize("owner", ["ours", "the user's"])
    async def test_what_a_full_quarantine_has_no_room_for_waits_uncounted_and_keeps_its_reason(
        self, broker: RabbitMQBroker, url: str, queue: str, owner: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A queue that has a limit and no dead letters would drop it."""
        monkeypatch.setattr("oraculo.brokers.rabbitmq.consumer.FAILED_MOVE_PAUSE", 0.01)
        with plain_channel(url) as channel:
            fill_quarantine(channel, queue)
            if owner == "the user's":
                limited = {"x-queue-type": "quorum", "x-delivery-limit": 1}
                channel.queue_declare(queue, durable=True, arguments=limited)
            await publish_all(broker, messages(queue, 5))
            consumer = await broker.consume(queue, prefetch=2)
            tries = _count_publishes(consumer, monkeypatch)
            bad, good = await take(consumer, 2)
            await consumer.dead_letter(bad, "broken")
            await consumer.ack([good])
            for number in range(2, 5):
                (good,) = await take(consumer, 1)
                assert (good.body, good.redeliveries) == (b"%d" % number, 0)
                await consumer.ack([good])
            await until(lambda: len(tries) > 4, saying="several tries")
            channel.queue_purge(dlq_of(queue))
        (letter,) = await letters(broker, queue, 1)
        assert (letter.body, letter.reason, letter.redeliveries) == (b"0", "broken", 0)
        await eventually(lambda: state(broker, queue), lambda now: now.ready + now.unacked == 0)

    async def test_a_consumer_with_something_kept_is_closed_though_whoever_closes_it_is_cancelled(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        with plain_channel(url) as channel:
            fill_quarantine(channel, queue)
            consumer = await broker.consume(queue, prefetch=10)
            await publish_all(broker, messages(queue, 1))
            [delivery] = await take(consumer, 1)
            await consumer.dead_letter(delivery, "no such run")  # there is no room for it
            closing = asyncio.create_task(consumer.close())
            await asyncio.sleep(0)
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
            # Which RabbitMQ counts a moment after it has closed the channel.
            await until(lambda: channel.queue_declare(queue, passive=True).method.consumer_count == 0)

    async def test_of_several_that_are_buried_together_only_those_wait_that_the_quarantine_has_no_room_for(
        self, broker: RabbitMQBroker, url: str, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("oraculo.brokers.rabbitmq.consumer.FAILED_MOVE_PAUSE", 0.01)
        with plain_channel(url) as channel:
            arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
            channel.queue_declare(dlq_of(queue), durable=True, arguments=arguments)
        await publish_all(broker, messages(queue, 4))
        consumer = await broker.consume(queue, prefetch=4)
        await consumer.dead_letter_all([(delivery, "broken") for delivery in await take(consumer, 4)])
        first = await letters(broker, queue, 2)
        assert await broker.discard(queue, [letter.id for letter in first]) == 2
        second = await letters(broker, queue, 2)
        found = [(letter.body, letter.reason) for letter in (*first, *second)]
        assert found == [(b"0", "broken"), (b"1", "broken"), (b"2", "broken"), (b"3", "broken")]
        await eventually(lambda: state(broker, queue), lambda now: now.ready + now.unacked == 0)

    async def test_a_redrive_into_a_full_queue_moves_what_it_takes(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await publish_all(broker, [Outgoing(queue, b"%d" % number, reason="r") for number in range(5)])
        with plain_channel(url) as channel:
            channel.queue_delete(queue)
            arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
            channel.queue_declare(queue, durable=True, arguments=arguments)
        for _ in range(2):
            with pytest.raises(QueueFull, match=queue):
                await broker.redrive(queue)
        assert trouble(broker) == ""
        assert bodies(await letters(broker, queue, 3)) == [b"2", b"3", b"4"]
        consumer = await broker.consume(queue, prefetch=2)
        taken = await take(consumer, 2)
        assert bodies(taken) == [b"0", b"1"]  # once, though it was tried twice
        await consumer.ack(taken)

    @pytest.mark.parametrize("limit", [{"x-max-length-bytes": 10}, {"x-max-length": 0}], ids=["bytes", "messages"])
    async def test_a_queue_that_refuses_while_it_is_empty_holds_up_no_other(
        self, broker: RabbitMQBroker, url: str, queue: str, limit: dict[str, int]
    ) -> None:
        elsewhere = fresh_name()
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=True, arguments=limit | {"x-overflow": "reject-publish"})
        large = Outgoing(queue, bytes(100))
        for _ in range(2):
            receipts = await broker.publish([large, *messages(elsewhere, 3), large])
            assert takers(receipts) == [None, "rabbitmq", "rabbitmq", "rabbitmq", None]
            assert places_down(receipts) == {0, 4}  # as far as one can see
        assert trouble(broker) == ""
        assert [name for name, _ in broker.statuses()[0].stuck] == [queue]
        await broker.check()
        assert (await state(broker, elsewhere)).ready == 6
        forget(url, [elsewhere])

    async def test_a_queue_that_is_down_is_not_taken_for_a_full_one(self, fleet: Fleet) -> None:
        """A fresh channel gets a nack for it at once: then another broker may serve. When no other queue works the
        server is of no use, whatever it answers."""
        server = cast("RabbitMQ", fleet.server("rabbitmq"))
        queue, other = fresh_name(), fresh_name()
        async with running(server.url) as before:
            await before.publish(messages(queue, 3))
        await _turn(server, queue, "stop")
        async with running(server.url, proof_within=0) as broker:
            receipts = await broker.publish(messages(queue, 2))
            assert takers(receipts) == [None, None]
            assert places_down(receipts) == {0, 1}
            assert queue in trouble(broker)
            with pytest.raises(BrokerUnavailable, match=queue):
                await broker.check()
            await publish_all(broker, messages(other, 1))
            await broker.check()
            assert trouble(broker) == ""
        await _turn(server, queue, "restart")

    async def test_a_server_whose_queues_are_heard_is_of_use_though_one_is_down(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        heard = fresh_name()
        async with running(url, proof_within=0) as other:
            consumer = await other.consume(heard, prefetch=1)
            with plain_channel(url) as channel:
                channel.queue_declare(
                    queue, durable=True, arguments={"x-max-length": 0, "x-overflow": "reject-publish"}
                )
            with pytest.raises(QueueUnavailable):
                ensure_taken(await other.publish(messages(queue, 1)))
            with pytest.raises(BrokerUnavailable, match=queue):
                await other.check()
            await publish_all(broker, messages(heard, 1))
            await consumer.ack(await take(consumer, 1))
            await other.check()
        forget(url, [heard])

    async def test_a_queue_that_says_nothing_holds_up_no_other(self, fleet: Fleet) -> None:
        """A channel that published to it before gets no answer at all once it is down."""
        server = cast("RabbitMQ", fleet.server("rabbitmq"))
        queue, other = fresh_name(), fresh_name()
        async with running(server.url, publish_timeout=1.0) as broker:
            await publish_all(broker, [*messages(queue, 1), *messages(other, 1)])
            await _turn(server, queue, "stop")
            connection = broker._publishing.raw
            outcome, beside = await asyncio.gather(
                broker.publish([*messages(queue, 2), *messages(other, 2)]),
                broker.publish(messages(other, 500)),
            )
            assert takers(outcome) == [None, None, "rabbitmq", "rabbitmq"]
            assert places_down(outcome) == {0, 1}
            assert takers(beside) == ["rabbitmq"] * 500
            assert broker._publishing.raw is connection  # and nobody else's consumers or publishes were lost
            assert [name for name, _ in broker.statuses()[0].stuck] == [queue]
            assert trouble(broker) == ""
            assert (await state(broker, other)).ready == 1 + 2 + 500
        await _turn(server, queue, "restart")

    @pytest.mark.parametrize("is_known", [True, False], ids=["to a channel that knew it", "to any"])
    async def test_a_queue_that_says_nothing_is_sent_no_more_until_it_has(self, fleet: Fleet, is_known: bool) -> None:
        """It would have a copy of each try when it works again."""
        server = cast("RabbitMQ", fleet.breakable("rabbitmq"))
        queue, other = fresh_name(), fresh_name()
        async with running(server.url) as founder:
            await founder.declare([queue, other])
        async with running(server.url, publish_timeout=0.5) as broker:
            if is_known:
                await publish_all(broker, messages(queue, 1))
            async with suspended(server, queue):
                for _ in range(10):
                    receipts = await broker.publish([*messages(other, 1), *messages(queue, 1)])
                    assert takers(receipts) == ["rabbitmq", None]
                    assert places_down(receipts) == {1}
                await broker.check()
            await published(broker, messages(queue, 1))
            assert (await state(broker, queue)).ready <= is_known + 2 + 1  # two tries, and the last
            assert (await state(broker, other)).ready <= 10 + 1
            assert broker.statuses()[0].stuck == ()

    async def test_by_how_much_a_message_is_too_large_is_told(self, fleet: Fleet) -> None:
        server = cast("RabbitMQ", fleet.breakable("rabbitmq"))
        async with largest_message(server, 2000):
            async with running(server.url) as broker:
                with pytest.raises(MessageTooLarge, match="larger than") as caught:
                    ensure_taken(await broker.publish([Outgoing(fresh_name(), bytes(2007))]))
                assert caught.value.excess == 7
                queue = fresh_name()
                await broker.declare([queue])
                both = [publish_all(broker, [Outgoing(queue, bytes(size))]) for size in (2100, 3000)]
                _, told = await asyncio.gather(*both, return_exceptions=True)
                assert isinstance(told, MessageTooLarge)
                assert told.excess == 1000, "RabbitMQ names the first of the two"
            request = {"destinos": [{"fila": queue, "payload": {"texto": "x" * 3000}}], "timeout": 600}
            async with Harness(broker=RabbitMQBroker(server.url)) as oraculo:
                aggregate = await oraculo.run(request, wait=10)
            motive = "its command is too large for rabbitmq: RabbitMQ refused: .* is larger than .* 2000; raise that"
            assert re.match(motive, aggregate["falhas"][queue]["motivo"])

    async def test_those_too_large_for_the_quarantine_come_again_and_the_others_are_not_sent_there_time_and_again(
        self, fleet: Fleet
    ) -> None:
        """Nobody tells what of a batch was taken before the one that is refused: once it is sent again, and no more."""
        server, queue = cast("RabbitMQ", fleet.breakable("rabbitmq")), fresh_name()
        small, large = [b"%d" % number for number in range(8)], [bytes(3000), bytes(3001)]
        async with running(server.url) as before:
            await before.publish([Outgoing(queue, body) for body in (*small, *large)])
        async with largest_message(server, 2000), running(server.url) as broker:
            consumer = await broker.consume(queue, prefetch=40)
            taken = await take(consumer, 10)
            await consumer.dead_letter_all([(delivery, "broken") for delivery in taken])
            again = await take(consumer, 2)
            assert {(each.body, each.redeliveries) for each in again} == {(body, 1) for body in large}
            await consumer.ack(again)
            await eventually(lambda: state(broker, queue), lambda now: now.ready + now.unacked == 0)
            copies = Counter(bodies(await broker.dead_letters(queue, limit=100)))
            assert set(copies) == set(small)
            assert max(copies.values()) <= 2

    async def test_a_queue_that_is_down_is_told_of_until_it_works_though_the_server_answers(self, fleet: Fleet) -> None:
        server = cast("RabbitMQ", fleet.server("rabbitmq"))
        queue, other = fresh_name(), fresh_name()
        async with running(server.url) as before:
            await before.publish(messages(queue, 1))
        await _turn(server, queue, "stop")
        async with running(server.url) as broker:
            with pytest.raises(QueueUnavailable):
                ensure_taken(await broker.publish(messages(queue, 1)))
            await publish_all(broker, messages(other, 1))
            await broker.check()
            assert [name for name, _ in broker.statuses()[0].stuck] == [queue]
            assert trouble(broker) == ""  # the others work
            await _turn(server, queue, "restart")
            await published(broker, messages(queue, 1))
            assert broker.statuses()[0].stuck == ()
            forget(server.url, [queue, other])


def _count_publishes(consumer: RabbitMQConsumer, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Parcel]]:
    publish, calls = consumer._publish, list[Sequence[Parcel]]()

    async def counted(parcels: Sequence[Parcel]) -> Sequence[Receipt]:
        calls.append(parcels)
        return await publish(parcels)

    monkeypatch.setattr(consumer, "_publish", counted)
    return calls


async def _turn(server: RabbitMQ, queue: str, verb: str) -> None:
    """Stops or restarts the one member of a quorum queue."""
    name = f'rabbit_misc:r(<<"{server.vhost}">>, queue, <<"{queue}">>)'
    found = f"{{ok, Q}} = rabbit_amqqueue:lookup({name}), {{N, _}} = amqqueue:get_pid(Q)"
    await asyncio.to_thread(server.evaluate, f"{found}, ra:{verb}_server(quorum_queues, {{N, node()}}).")
