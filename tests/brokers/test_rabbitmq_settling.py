"""RabbitMQ: what is published, settled and counted, one by one and by the thousand."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq.connection import Channel
from oraculo.brokers.rabbitmq.frames import Parcel
from oraculo.brokers.rabbitmq.publisher import _Batch
from oraculo.brokers.rabbitmq.queues import ASKED_TOGETHER, YOUNG
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Broker, Outgoing, Receipt, publish_all
from oraculo.ports.broker_admin import DeadLetter
from oraculo.wire.naming import dlq_of
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.rabbitmq_stage import (
    PATIENCE,
    bodies,
    eventually,
    forget,
    fresh_name,
    letters,
    messages,
    plain_channel,
    running,
    state,
    take,
)
from tests.servers.proxy import Proxy
from tests.waiting import until

url, queue, broker, nothing_goes_unheard = stage.url, stage.queue, stage.broker, stage.nothing_goes_unheard  # fixtures


# -- settling and counting ------------------------------------------------------------------------------------------


class TestSettling:
    async def test_acks_in_any_order_settle_nothing_else(self, broker: RabbitMQBroker, queue: str) -> None:
        await publish_all(broker, messages(queue, 20))
        consumer = await broker.consume(queue, prefetch=20)
        taken = await take(consumer, 20)
        await consumer.ack(taken[10:12])
        await consumer.ack([taken[3], taken[1], taken[0]])
        await consumer.ack(taken[2:5])
        await consumer.ack([taken[19]])
        await consumer.close()
        left = await take(await broker.consume(queue, prefetch=20), 12)
        assert bodies(left) == [b"%d" % n for n in (*range(5, 10), *range(12, 19))]
        assert (await state(broker, queue)).ready == 0

    async def test_an_ack_of_what_came_later_does_not_settle_what_is_being_moved(self, url: str, queue: str) -> None:
        """The move ends in nothing, because the connection that publishes is cut; so it must be tried again."""
        with Proxy(url) as proxy:
            async with running(proxy.url, publish_timeout=0.5) as broker:
                await publish_all(broker, messages(queue, 3))
                consumer = await broker.consume(queue, prefetch=3)
                moved, *acked = await take(consumer, 3)
                proxy.swallows = True
                moving = asyncio.create_task(consumer.dead_letter(moved, "bad"))
                await asyncio.wait({moving}, timeout=0.05)
                await consumer.ack(acked)
                await consumer.ack([moved])
                await moving
                assert consumer.unsettled == 1
                proxy.swallows = False
                assert [letter.reason for letter in await letters(broker, queue, 1)] == ["bad"]
                await eventually(lambda: state(broker, queue), lambda now: now.ready + now.unacked == 0)

    async def test_deliveries_are_counted_across_consumers_and_connections(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as first, running(url, delivery_limit=3) as second:
            await publish_all(first, messages(queue, 1))
            for redeliveries, broker in enumerate((first, second, first)):
                consumer = await broker.consume(queue, prefetch=1)
                (delivery,) = await take(consumer, 1)
                assert delivery.redeliveries == redeliveries
                await consumer.close()
            (letter,) = await letters(second, queue, 1)
            assert letter.reason == "moved by RabbitMQ: delivered too often and never settled"
            assert letter.redeliveries == 2
            assert (await state(first, queue)).ready == 0

    async def test_a_delayed_message_takes_its_count_with_it(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as broker:
            await publish_all(broker, messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            for redeliveries in range(2):
                (delivery,) = await take(consumer, 1)
                assert delivery.redeliveries == redeliveries
                await consumer.retry(delivery, 0.1, "later")
            await take(consumer, 1)
            await consumer.close()
            heir = await broker.consume(queue, prefetch=1)
            (letter,) = await letters(broker, queue, 1)
            assert (letter.reason, letter.redeliveries) == ("delivered 3 times and never settled", 2)
            await publish_all(broker, [Outgoing(queue, b"next")])
            assert bodies(await take(heir, 1)) == [b"next"]

    @pytest.mark.parametrize("what", ["a look", "a redrive"])
    async def test_what_is_cancelled_after_it_published_dead_letters_leaves_none_twice(
        self, broker: RabbitMQBroker, queue: str, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await publish_all(broker, [Outgoing(queue, b"dead", reason="why")])
        await letters(broker, queue, 1)  # which gives it back: the next look publishes it anew
        publish, confirmed, go_on = broker._dead_letters._publish, asyncio.Event(), asyncio.Event()

        async def publish_slowly(parcels: Sequence[Parcel]) -> Sequence[Receipt]:
            receipts = await publish(parcels)
            confirmed.set()
            await go_on.wait()
            return receipts

        with monkeypatch.context() as slow:
            slow.setattr(broker._dead_letters, "_publish", publish_slowly)
            call = broker.dead_letters(queue, limit=1) if what == "a look" else broker.redrive(queue)
            calling = asyncio.create_task(call)
            await asyncio.wait_for(confirmed.wait(), PATIENCE)
            calling.cancel()
            asyncio.get_running_loop().call_soon(go_on.set)
            with pytest.raises(asyncio.CancelledError):
                await calling
        left = await broker.dead_letters(queue, limit=10)
        assert len(left) + (await state(broker, queue)).ready == 1

    async def test_a_new_queue_to_wait_in_grows_old_before_it_is_trusted(
        self, broker: RabbitMQBroker, queue: str
    ) -> None:
        """Also for a caller who finds it being made, and after one who gave up."""
        await broker.declare([queue])
        waiting, loop = broker._queues.delay(queue, 0.1), asyncio.get_running_loop()
        began = loop.time()
        first = asyncio.create_task(broker._queues.ensure(waiting))
        await eventually(lambda: broker._queues.depth(waiting), lambda depth: depth is not None)
        first.cancel()
        await broker._queues.ensure(waiting)
        assert loop.time() - began >= YOUNG

    async def test_a_letter_that_is_to_be_delivered_again_later_is_the_same_letter(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await publish_all(broker, [Outgoing(queue, b"bad", reason="why it died")])
        (before,) = await letters(broker, queue, 1)
        consumer = await broker.consume(dlq_of(queue), prefetch=1)
        await consumer.retry((await take(consumer, 1))[0], 0.1, "later")
        await take(consumer, 1)
        await consumer.close()
        (after,) = await letters(broker, queue, 1)
        assert (after.id, after.reason, after.at) == (before.id, "why it died", before.at)
        forget(url, [dlq_of(queue)])

    async def test_a_delay_is_not_lost_with_the_process_that_asked_for_it(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await publish_all(broker, messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.5, "later")
        async with running(url) as heir:
            (again,) = await take(await heir.consume(queue, prefetch=1), 1)
            assert (again.body, again.redeliveries) == (b"0", 1)

    @pytest.mark.parametrize(("priority", "prefetch", "limit"), [(10, 1, 1), (-1, 1, 1), (0, 0, 1), (0, 1, 0)])
    async def test_senseless_numbers_are_refused(
        self, broker: RabbitMQBroker, queue: str, priority: int, prefetch: int, limit: int
    ) -> None:
        async def use() -> None:
            await publish_all(broker, [Outgoing(queue, b"", priority=priority)])
            await (await broker.consume(queue, prefetch=prefetch)).take(limit)

        with pytest.raises(BrokerError, match=r"(priority|prefetch|limit): must be"):
            await use()


# -- publishing -----------------------------------------------------------------------------------------------------


class TestPublisher:
    async def test_thousands_that_come_back_are_published_again(self, url: str, queue: str) -> None:
        """A second's work, if each that comes back is found at once; the limit is for a machine that does much else."""
        async with running(url, publish_timeout=60.0) as broker:
            await broker.declare([queue])
            with plain_channel(url) as channel:
                channel.queue_delete(queue)
            await publish_all(broker, messages(queue, 10_000))
            assert (await state(broker, queue)).ready == 10_000

    async def test_a_batch_that_nobody_waits_for_claims_nothing(self) -> None:
        batch = _Batch([Parcel("q", b"", b"x")], 1)
        batch.fail(BrokerUnavailable("blocked"))
        assert not batch.claim("q", b"x")

    async def test_each_message_that_comes_back_is_claimed_once(self) -> None:
        batch = _Batch([Parcel("q", b"1", b"x"), Parcel("q", b"2", b"y"), Parcel("q", b"3", b"x")], 1)
        assert [batch.claim("q", b"x") for _ in range(3)] == [True, True, False]
        assert not batch.claim("q", b"z")
        assert batch.returned() == [0, 2]

    async def test_a_channel_whose_opening_is_given_up_is_closed(self, url: str) -> None:
        with Proxy(url) as proxy:
            async with running(proxy.url) as broker:
                raw = await broker._publishing.opened()
                for _ in range(5):
                    proxy.delay = 0.05
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.15):  # opened, and not yet confirming
                            await broker.check()
                    proxy.delay = 0.0
                    await until(lambda: not raw._channels, saying="the channel to be closed")


# -- much at once ---------------------------------------------------------------------------------------------------


class TestMuch:
    async def test_ten_thousand_messages_shared_by_two_connections(self, url: str, queue: str) -> None:
        count = 10_000
        async with running(url) as first, running(url) as second:
            await first.declare([queue])
            handled: list[bytes] = []

            async def work(broker: Broker) -> int:
                consumer, mine = await broker.consume(queue, prefetch=500), 0
                while len(handled) < count:
                    async with asyncio.timeout(PATIENCE):
                        taking = asyncio.create_task(consumer.take(200))
                        finished = asyncio.create_task(done.wait())
                        await asyncio.wait({taking, finished}, return_when=asyncio.FIRST_COMPLETED)
                        finished.cancel()
                    if not taking.done():
                        taking.cancel()
                        break
                    batch = taking.result()
                    handled.extend(bodies(batch))
                    mine += len(batch)
                    await consumer.ack(batch)
                done.set()
                await consumer.close()  # what it had not settled would be ready again
                return mine

            done = asyncio.Event()
            batches = [[Outgoing(queue, b"%d" % n) for n in range(at, at + 500)] for at in range(0, count, 500)]
            shares = asyncio.gather(work(first), work(second))
            await asyncio.gather(*[broker.publish(b) for b, broker in zip(batches, [first, second] * 10, strict=True)])
            assert min(await shares) > 0
            assert len(handled) == count
            assert set(handled) == {b"%d" % n for n in range(count)}
            await eventually(lambda: state(first, queue), lambda now: (now.ready, now.unacked) == (0, 0))

    async def test_one_publish_to_many_queues_that_are_not_there_yet(self, broker: RabbitMQBroker, url: str) -> None:
        queues = [fresh_name() for _ in range(20)]
        await publish_all(broker, [Outgoing(queue, b"%d" % n) for n in range(10) for queue in queues])
        states = await broker.queues()
        assert {(found.queue, found.ready) for found in states} == {(queue, 10) for queue in queues}
        forget(url, queues)

    async def test_hundreds_of_letters_are_looked_at_moved_and_discarded(
        self, broker: RabbitMQBroker, queue: str
    ) -> None:
        await publish_all(broker, [Outgoing(queue, b"%d" % n, reason=f"reason {n}") for n in range(1200)])
        looks = await asyncio.gather(*[broker.dead_letters(queue, limit=1500) for _ in range(5)])
        everything = looks[0]
        assert bodies(everything) == [b"%d" % n for n in range(1200)]
        assert all(look == everything for look in looks)
        pages: list[DeadLetter] = []
        while page := await broker.dead_letters(queue, limit=500, after=pages[-1].id if pages else None):
            pages += page
        assert pages == everything
        assert await broker.redrive(queue, [letter.id for letter in everything[100:700]]) == 600
        assert await broker.discard(queue, [letter.id for letter in everything[90:110]]) == 10
        assert await broker.dead_letters(queue, limit=5, after=everything[95].id) == everything[700:705]
        assert await broker.redrive(queue) == 590
        now = await eventually(lambda: state(broker, queue), lambda found: found.ready == 1190)
        assert now.dead_letters == 0

    async def test_what_no_letter_can_be_named_is_refused(self, broker: RabbitMQBroker, queue: str) -> None:
        await publish_all(broker, [Outgoing(queue, b"", reason="r" * 100_000)])
        with pytest.raises(BrokerError, match="after"):
            await broker.dead_letters(queue, limit=1, after="nonsense")
        (letter,) = await letters(broker, queue, 1)
        assert letter.reason.startswith("rrr")
        assert await broker.dead_letters(queue, limit=0) == []


class TestTables:
    async def test_many_queues_are_looked_at_several_at_a_time(
        self, broker: RabbitMQBroker, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [fresh_name() for _ in range(ASKED_TOGETHER)]
        await broker.declare(names)
        call, asked, most = Channel.call, 0, 0

        async def counted(channel: Channel, method: str, **arguments: Any) -> Any:
            nonlocal asked, most
            asked += 1
            most = max(most, asked)
            try:
                return await call(channel, method, **arguments)
            finally:
                asked -= 1

        monkeypatch.setattr(Channel, "call", counted)
        assert [found.queue for found in await broker.queues([*names, fresh_name()])] == names
        assert most == ASKED_TOGETHER
        forget(url, names)

    async def test_names_of_queues_do_not_fill_the_memory(
        self, broker: RabbitMQBroker, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("oraculo.brokers.rabbitmq.queues._MAX_NAMES", 4)
        monkeypatch.setattr("oraculo.brokers.rabbitmq.publisher.MAX_CHANNELS", 2)
        queues = [fresh_name() for _ in range(6)]
        for queue in queues * 2:
            await publish_all(broker, messages(queue, 1))
            broker._queues.delay(queue, 60.0)
        assert [len(table) for table in (broker._queues._made, broker._queues._delays)] == [4, 4]
        assert len(broker._publisher._lanes) <= 2
        consumer = await broker.consume(queues[0], prefetch=2)
        delivery, _ = await take(consumer, 2)
        await broker.declare(queues[1:])
        await consumer.retry(delivery, 0.0, "again")  # as a queue of ours counts it, though it was forgotten
        assert [(each.body, each.redeliveries) for each in await take(consumer, 1)] == [(b"0", 1)]
        with plain_channel(url) as channel:
            channel.queue_delete(queues[1])
        await publish_all(broker, messages(queues[1], 1))
        assert (await state(broker, queues[1])).ready == 1
        forget(url, queues)
