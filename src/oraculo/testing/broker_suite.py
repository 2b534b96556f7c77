"""What every broker must do, as tests that run unchanged on each adapter.

An adapter's test module makes a subclass and says how to build one:

    class TestMyBroker(BrokerSuite):
        async def make_broker(self) -> Broker:
            return MyBroker(url, delivery_limit=self.delivery_limit)

The tests are plain coroutines with plain asserts: pytest with `asyncio_mode = "auto"` runs them, and importing this
module needs no pytest. Every queue has a name of its own, so a server may be shared. Real brokers tell their counts
late, so these are polled until a deadline; nothing sleeps to wait.
"""

import asyncio
import time
import unittest
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from oraculo.core.naming import dlq_of
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Consumer, DeadLetter, Delivery, Outgoing, QueueState

Seen = TypeVar("Seen")

GARBAGE = (b"", b"\x00", b"\xff\xfe\x80\x81", b'{"half": ', bytes(range(256)), b"\r\n\r\n", b"\xc3\x28" * 50)
ORACLE = "ORÁCULO — coleção 東京 🛰️ e\u0301 \u202e"
LARGE = 5 * 1024 * 1024


class BrokerSuite:
    """Subclass it, name the class `Test…`, and give it `make_broker`."""

    delivery_limit = 3  # make_broker builds a broker that delivers a message this often at most
    patience = 15.0  # seconds until something that must happen counts as missing
    quiet = 0.15  # seconds in which something that must not happen would have happened

    async def make_broker(self) -> Broker:
        """A broker with `delivery_limit`, not started yet."""
        raise NotImplementedError("the adapter's test class says how to make its broker")

    async def forget(self, queues: Sequence[str]) -> None:
        """Called after each test with the queues it made: deletes them where they would outlive the broker."""

    # What the tests are written with.

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[Broker, str]]:
        """A started broker and the name of a queue that is declared and empty."""
        self._made: list[str] = []
        broker, queue = await self.make_broker(), self.fresh_name()
        try:
            await broker.start()
            await broker.declare([queue])
            yield broker, queue
        finally:
            await broker.close()
            await self.forget(self._made)

    def fresh_name(self) -> str:
        self._made.append(f"suite-{uuid.uuid4().hex}")
        return self._made[-1]

    async def take(self, consumer: Consumer, count: int) -> list[Delivery]:
        """Exactly `count` deliveries, however many takes it needs."""
        taken: list[Delivery] = []
        async with asyncio.timeout(self.patience):
            while len(taken) < count:
                batch = await consumer.take(count - len(taken))
                assert batch, "take returned nothing on an open consumer"
                taken += batch
        assert len(taken) == count, f"take({count}) gave more than it was asked for"
        return taken

    async def take_one(self, consumer: Consumer) -> Delivery:
        return (await self.take(consumer, 1))[0]

    async def eventually(self, look: Callable[[], Awaitable[Seen]], accept: Callable[[Seen], bool]) -> Seen:
        """Looks until it accepts what it sees."""
        deadline = asyncio.get_running_loop().time() + self.patience
        while not accept(seen := await look()):
            assert asyncio.get_running_loop().time() < deadline, f"still {seen} after {self.patience} s"
            await asyncio.sleep(0.01)
        return seen

    async def state(self, broker: Broker, queue: str) -> QueueState:
        (state,) = await broker.queues([queue])
        return state

    async def state_where(self, broker: Broker, queue: str, accept: Callable[[QueueState], bool]) -> QueueState:
        return await self.eventually(lambda: self.state(broker, queue), accept)

    async def letters(self, broker: Broker, queue: str, count: int) -> Sequence[DeadLetter]:
        """The dead letters, once there are `count`."""
        return await self.eventually(
            lambda: broker.dead_letters(queue, limit=count + 1), lambda letters: len(letters) == count
        )

    async def bury(self, broker: Broker, queue: str, count: int) -> Sequence[DeadLetter]:
        """Publishes `count` dead letters, `letter 0` the oldest."""
        await broker.publish([Outgoing(queue, f"letter {n}".encode(), reason=f"reason {n}") for n in range(count)])
        return await self.letters(broker, queue, count)

    async def assert_empty(self, broker: Broker, queue: str) -> None:
        await self.state_where(broker, queue, lambda state: state.ready == 0 and state.unacked == 0)

    # Publishing and taking

    async def test_a_published_message_is_delivered(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=10)
            await broker.publish([Outgoing(queue, b"hello")])
            delivery = await self.take_one(consumer)
            assert (delivery.queue, delivery.body, delivery.redeliveries) == (queue, b"hello", 0)

    async def test_publish_returns_once_the_broker_has_the_messages(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([])
            await broker.publish([Outgoing(queue, b"%d" % n) for n in range(5)])
            state = await self.state_where(broker, queue, lambda state: state.ready == 5)
            assert state.unacked == 0

    async def test_messages_come_in_the_order_they_were_published(self) -> None:
        async with self.running() as (broker, queue):
            bodies = [b"%d" % n for n in range(100)]
            await broker.publish([Outgoing(queue, body) for body in bodies[:60]])
            await broker.publish([Outgoing(queue, body) for body in bodies[60:]])
            consumer = await broker.consume(queue, prefetch=100)
            assert [delivery.body for delivery in await self.take(consumer, 100)] == bodies

    async def test_a_batch_of_two_thousand(self) -> None:
        async with self.running() as (broker, queue):
            bodies = [b"%d" % n for n in range(2000)]
            consumer = await broker.consume(queue, prefetch=500)
            await broker.publish([Outgoing(queue, body) for body in bodies])
            seen: list[bytes] = []
            while len(seen) < 2000:
                batch = await self.take(consumer, 500)
                seen += [delivery.body for delivery in batch]
                await consumer.ack(batch)
            assert seen == bodies
            await self.assert_empty(broker, queue)

    async def test_one_publish_reaches_several_queues(self) -> None:
        async with self.running() as (broker, queue):
            other = self.fresh_name()
            await broker.publish([Outgoing(queue, b"one"), Outgoing(other, b"two")])
            for name, body in ((queue, b"one"), (other, b"two")):
                assert (await self.take_one(await broker.consume(name, prefetch=1))).body == body

    async def test_messages_published_before_the_first_consumer_are_kept(self) -> None:
        async with self.running() as (broker, _):
            undeclared = self.fresh_name()
            await broker.publish([Outgoing(undeclared, b"early")])
            assert (await self.take_one(await broker.consume(undeclared, prefetch=1))).body == b"early"

    async def test_consuming_a_queue_that_was_not_declared_makes_it(self) -> None:
        async with self.running() as (broker, _):
            undeclared = self.fresh_name()
            consumer = await broker.consume(undeclared, prefetch=1)
            await broker.publish([Outgoing(undeclared, b"hello")])
            assert (await self.take_one(consumer)).body == b"hello"

    async def test_declaring_twice_keeps_the_messages(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"kept")])
            await broker.declare([queue])
            assert (await self.take_one(await broker.consume(queue, prefetch=1))).body == b"kept"

    async def test_a_message_that_expires_later_is_delivered_as_usual(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"in time", expires_at=time.time() + 3600)])
            delivery = await self.take_one(await broker.consume(queue, prefetch=1))
            assert (delivery.body, delivery.redeliveries) == (b"in time", 0)

    async def test_take_waits_for_a_message(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=10)
            taking = asyncio.create_task(self.take_one(consumer))
            await asyncio.wait({taking}, timeout=self.quiet)
            assert not taking.done()
            await broker.publish([Outgoing(queue, b"at last")])
            assert (await taking).body == b"at last"

    async def test_a_cancelled_take_loses_nothing(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=10)
            taking = asyncio.create_task(consumer.take(10))
            await asyncio.wait({taking}, timeout=self.quiet)
            await broker.publish([Outgoing(queue, b"safe")])
            taking.cancel()
            (outcome,) = await asyncio.gather(taking, return_exceptions=True)
            taken = await self.take(consumer, 1) if isinstance(outcome, BaseException) else outcome
            assert [delivery.body for delivery in taken] == [b"safe"]

    # Bodies are bytes and nothing else

    async def test_bodies_that_are_no_text_come_unchanged(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, body) for body in GARBAGE])
            consumer = await broker.consume(queue, prefetch=len(GARBAGE))
            assert [delivery.body for delivery in await self.take(consumer, len(GARBAGE))] == list(GARBAGE)
            await broker.publish([Outgoing(queue, body, reason="not JSON") for body in GARBAGE])
            assert [letter.body for letter in await self.letters(broker, queue, len(GARBAGE))] == list(GARBAGE)

    async def test_unicode_comes_unchanged_in_bodies_and_reasons(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=1)
            await broker.publish([Outgoing(queue, ORACLE.encode())])
            delivery = await self.take_one(consumer)
            assert delivery.body.decode() == ORACLE
            await consumer.dead_letter(delivery, ORACLE)
            (letter,) = await self.letters(broker, queue, 1)
            assert (letter.body.decode(), letter.reason) == (ORACLE, ORACLE)

    async def test_half_a_character_in_a_reason_keeps_no_letter_out(self) -> None:
        """A reason quotes what was wrong, which may be no text that could be written."""
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"one"), Outgoing(queue, b"two", reason="half \ud800 left")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.dead_letter(await self.take_one(consumer), "half \udc80 left")
            letters = await self.letters(broker, queue, 2)
            assert {letter.body for letter in letters} == {b"one", b"two"}
            assert {(letter.reason[:5], letter.reason[-5:]) for letter in letters} == {("half ", " left")}

    async def test_a_large_message_comes_whole(self) -> None:
        async with self.running() as (broker, queue):
            body = bytes(range(256)) * (LARGE // 256)
            await broker.publish([Outgoing(queue, body), Outgoing(queue, b"small")])
            consumer = await broker.consume(queue, prefetch=2)
            large, small = await self.take(consumer, 2)
            assert large.body == body
            assert small.body == b"small"

    # Settling

    async def test_a_message_stays_until_it_is_acked(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"%d" % n) for n in range(3)])
            consumer = await broker.consume(queue, prefetch=3)
            first, *rest = await self.take(consumer, 3)
            await consumer.ack([first])
            await self.state_where(broker, queue, lambda state: (state.ready, state.unacked) == (0, 2))
            await consumer.ack(rest)
            await self.assert_empty(broker, queue)

    async def test_settling_twice_does_nothing(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"one"), Outgoing(queue, b"two")])
            consumer = await broker.consume(queue, prefetch=2)
            one, two = await self.take(consumer, 2)
            await consumer.ack([one, one])
            await consumer.ack([one])
            await consumer.retry(one, 0.0, "too late")
            await consumer.dead_letter(one, "too late")
            await consumer.extend([one])
            state = await self.state_where(broker, queue, lambda state: (state.ready, state.unacked) == (0, 1))
            assert state.dead_letters == 0
            await consumer.ack([two])
            await self.assert_empty(broker, queue)

    async def test_an_ack_after_the_redelivery_does_nothing(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"again")])
            consumer = await broker.consume(queue, prefetch=1)
            stale = await self.take_one(consumer)
            await consumer.retry(stale, 0.0, "once more")
            delivery = await self.take_one(consumer)
            await consumer.ack([stale])
            await self.state_where(broker, queue, lambda state: state.ready + state.unacked == 1)
            await consumer.ack([delivery])
            await self.assert_empty(broker, queue)

    # Redelivery

    async def test_what_a_closed_consumer_had_not_settled_is_delivered_again(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"%d" % n) for n in range(4)])
            consumer = await broker.consume(queue, prefetch=3)
            taken = await self.take(consumer, 3)
            await consumer.ack(taken[:1])
            await consumer.close()
            heir = await broker.consume(queue, prefetch=3)
            again = await self.take(heir, 3)
            assert {delivery.body for delivery in again} == {b"1", b"2", b"3"}
            assert {d.body: d.redeliveries for d in again if d.body != b"3"} == {b"1": 1, b"2": 1}

    async def test_what_one_consumer_gives_back_reaches_another_that_waits(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"passed on")])
            giver, heir = await broker.consume(queue, prefetch=1), await broker.consume(queue, prefetch=1)
            await self.take_one(giver)
            waiting = asyncio.create_task(self.take_one(heir))
            await asyncio.wait({waiting}, timeout=self.quiet)
            await giver.close()
            assert (await waiting).redeliveries == 1

    async def test_an_ack_after_the_consumer_closed_does_nothing(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"kept")])
            consumer = await broker.consume(queue, prefetch=1)
            delivery = await self.take_one(consumer)
            await consumer.close()
            await consumer.ack([delivery])
            assert (await self.take_one(await broker.consume(queue, prefetch=1))).body == b"kept"

    async def test_a_retry_comes_again_and_is_counted(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"again")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry(await self.take_one(consumer), 0.0, "not now")
            delivery = await self.take_one(consumer)
            assert (delivery.queue, delivery.body, delivery.redeliveries) == (queue, b"again", 1)

    async def test_a_retry_comes_not_before_its_delay(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"later")])
            consumer = await broker.consume(queue, prefetch=1)
            delivery = await self.take_one(consumer)
            clock = asyncio.get_running_loop().time
            asked_at = clock()
            await consumer.retry(delivery, 0.5, "not now")
            assert (await self.take_one(consumer)).redeliveries == 1
            assert clock() - asked_at >= 0.48  # a timer may fire a little early

    async def test_a_message_that_waits_for_its_delay_holds_up_no_other(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"slow"), Outgoing(queue, b"quick")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry(await self.take_one(consumer), 60.0, "not now")
            assert (await self.take_one(consumer)).body == b"quick"
            await self.state_where(broker, queue, lambda state: (state.ready, state.unacked) == (1, 1))

    async def test_past_the_delivery_limit_a_message_is_a_dead_letter(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"poison")])
            consumer = await broker.consume(queue, prefetch=1)
            for redeliveries in range(self.delivery_limit):
                delivery = await self.take_one(consumer)
                assert delivery.redeliveries == redeliveries
                await consumer.retry(delivery, 0.0, f"failure {redeliveries}")
            (letter,) = await self.letters(broker, queue, 1)
            assert (letter.queue, letter.body) == (queue, b"poison")
            assert f"failure {self.delivery_limit - 1}" in letter.reason
            assert letter.redeliveries == self.delivery_limit - 1
            await self.assert_empty(broker, queue)

    # Dead letters

    async def test_a_dead_letter_has_its_reason_and_its_time(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"earlier", reason="the first")])
            await broker.publish([Outgoing(queue, b"bad")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.dead_letter(await self.take_one(consumer), "field x is missing")
            earlier, letter = await self.letters(broker, queue, 2)
            assert (letter.queue, letter.body, letter.reason) == (queue, b"bad", "field x is missing")
            assert letter.id != earlier.id
            assert letter.at >= earlier.at > 0
            await self.assert_empty(broker, queue)

    async def test_a_message_published_with_a_reason_goes_to_the_quarantine(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"bad", reason="no such task"), Outgoing(queue, b"good")])
            consumer = await broker.consume(queue, prefetch=2)
            assert (await self.take_one(consumer)).body == b"good"
            (letter,) = await self.letters(broker, queue, 1)
            assert (letter.queue, letter.body, letter.reason) == (queue, b"bad", "no such task")

    async def test_a_message_published_to_the_dlq_by_name_is_a_dead_letter(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(dlq_of(queue), b"by another client")])
            (letter,) = await self.letters(broker, queue, 1)
            assert (letter.queue, letter.body) == (queue, b"by another client")

    async def test_the_dlq_can_be_consumed(self) -> None:
        async with self.running() as (broker, queue):
            await self.bury(broker, queue, 2)
            consumer = await broker.consume(dlq_of(queue), prefetch=2)
            taken = await self.take(consumer, 2)
            assert [delivery.body for delivery in taken] == [b"letter 0", b"letter 1"]
            await consumer.ack(taken)
            await self.letters(broker, queue, 0)

    async def test_looking_takes_nothing_out(self) -> None:
        async with self.running() as (broker, queue):
            first = await self.bury(broker, queue, 3)
            assert [letter.body for letter in first] == [b"letter 0", b"letter 1", b"letter 2"]
            assert await broker.dead_letters(queue, limit=10) == first
            await self.state_where(broker, queue, lambda state: state.dead_letters == 3)

    async def test_looking_page_by_page_sees_each_once(self) -> None:
        async with self.running() as (broker, queue):
            everything = list(await self.bury(broker, queue, 7))
            pages: list[DeadLetter] = []
            while page := await broker.dead_letters(queue, limit=3, after=pages[-1].id if pages else None):
                assert len(page) <= 3
                pages += page
            assert pages == everything

    async def test_dead_letters_belong_to_one_queue(self) -> None:
        async with self.running() as (broker, queue):
            other = self.fresh_name()
            await broker.declare([other])
            letters = await self.bury(broker, queue, 2)
            assert list(await broker.dead_letters(other, limit=10)) == []
            assert await broker.redrive(other) == 0
            assert await broker.discard(other, [letter.id for letter in letters]) == 0
            await self.letters(broker, queue, 2)

    async def test_redriving_all_moves_them_back_in_order(self) -> None:
        async with self.running() as (broker, queue):
            await self.bury(broker, queue, 3)
            assert await broker.redrive(queue) == 3
            consumer = await broker.consume(queue, prefetch=10)
            assert [d.body for d in await self.take(consumer, 3)] == [b"letter 0", b"letter 1", b"letter 2"]
            await self.letters(broker, queue, 0)

    async def test_redriving_by_id_moves_only_those(self) -> None:
        async with self.running() as (broker, queue):
            first, second, third = await self.bury(broker, queue, 3)
            assert await broker.redrive(queue, [second.id]) == 1
            consumer = await broker.consume(queue, prefetch=10)
            assert (await self.take_one(consumer)).body == b"letter 1"
            assert list(await self.letters(broker, queue, 2)) == [first, third]

    async def test_unknown_ids_are_passed_over(self) -> None:
        async with self.running() as (broker, queue):
            kept, gone = await self.bury(broker, queue, 2)
            assert await broker.discard(queue, [gone.id]) == 1
            unknown = [gone.id, "", "no such id", "-1", "9" * 40]
            assert await broker.redrive(queue, unknown) == 0
            assert await broker.discard(queue, unknown) == 0
            assert await broker.redrive(queue, []) == 0
            assert await broker.redrive(queue, [*unknown, kept.id]) == 1

    async def test_redriving_counts_deliveries_from_zero(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"mended")])
            consumer = await broker.consume(queue, prefetch=1)
            for _ in range(self.delivery_limit):
                await consumer.retry(await self.take_one(consumer), 0.0, "broken")
            await self.letters(broker, queue, 1)
            assert await broker.redrive(queue) == 1
            for redeliveries in range(self.delivery_limit):
                delivery = await self.take_one(consumer)
                assert (delivery.body, delivery.redeliveries) == (b"mended", redeliveries)
                await consumer.retry(delivery, 0.0, "still broken")
            (letter,) = await self.letters(broker, queue, 1)
            assert "still broken" in letter.reason

    async def test_discarding_deletes(self) -> None:
        async with self.running() as (broker, queue):
            first, second, third = await self.bury(broker, queue, 3)
            assert await broker.discard(queue, [first.id, third.id]) == 2
            assert list(await self.letters(broker, queue, 1)) == [second]
            await self.assert_empty(broker, queue)

    async def test_a_queue_that_does_not_exist_has_no_dead_letters(self) -> None:
        async with self.running() as (broker, _):
            nowhere = self.fresh_name()
            assert list(await broker.dead_letters(nowhere, limit=10)) == []
            assert await broker.redrive(nowhere) == 0

    # Counts

    async def test_the_state_of_a_queue_is_counted(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"%d" % n) for n in range(5)])
            consumer = await broker.consume(queue, prefetch=2)
            await self.take(consumer, 2)
            await self.bury(broker, queue, 1)
            expected = (3, 2, 1)
            await self.state_where(broker, queue, lambda s: (s.ready, s.unacked, s.dead_letters) == expected)

    async def test_all_queues_are_told_or_those_asked_for_but_no_dlqs(self) -> None:
        async with self.running() as (broker, queue):
            await self.bury(broker, queue, 1)
            assert [state.queue for state in await broker.queues([queue, self.fresh_name()])] == [queue]
            names = [state.queue for state in await broker.queues()]
            assert names.count(queue) == 1
            assert dlq_of(queue) not in names

    async def test_consumers_are_counted(self) -> None:
        async with self.running() as (broker, queue):
            if not broker.capabilities.counts_consumers:
                raise unittest.SkipTest(f"{broker.name} does not count consumers")
            await self.state_where(broker, queue, lambda state: state.consumers == 0)
            first = await broker.consume(queue, prefetch=1)
            second = await broker.consume(queue, prefetch=1)
            await self.state_where(broker, queue, lambda state: state.consumers == 2)
            await first.close()
            await self.state_where(broker, queue, lambda state: state.consumers == 1)
            await second.close()
            await self.state_where(broker, queue, lambda state: state.consumers == 0)

    # Sharing

    async def test_no_more_are_out_than_the_prefetch(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"%d" % n) for n in range(5)])
            consumer = await broker.consume(queue, prefetch=3)
            first, *_ = await self.take(consumer, 3)
            taking = asyncio.create_task(self.take_one(consumer))
            await asyncio.wait({taking}, timeout=self.quiet)
            assert not taking.done(), "a fourth delivery came with three unsettled"
            await consumer.ack([first])
            assert (await taking).body == b"3"

    async def test_two_consumers_share_a_queue_and_handle_each_message_once(self) -> None:
        async with self.running() as (broker, queue):
            handled: list[bytes] = []
            done = asyncio.Event()

            async def work(consumer: Consumer) -> None:
                while batch := await consumer.take(5):
                    handled.extend(delivery.body for delivery in batch)
                    await consumer.ack(batch)
                    if len(handled) >= 200:
                        done.set()

            consumers = [await broker.consume(queue, prefetch=5) for _ in range(2)]
            workers = [asyncio.create_task(work(consumer)) for consumer in consumers]
            bodies = {b"%d" % n for n in range(200)}
            await broker.publish([Outgoing(queue, body) for body in bodies])
            async with asyncio.timeout(self.patience):
                await done.wait()
                await self.assert_empty(broker, queue)
                for consumer in consumers:
                    await consumer.close()
                await asyncio.gather(*workers)
            assert len(handled) == 200
            assert set(handled) == bodies

    async def test_a_consumer_that_holds_its_prefetch_leaves_the_rest_to_others(self) -> None:
        async with self.running() as (broker, queue):
            holder = await broker.consume(queue, prefetch=1)
            await broker.publish([Outgoing(queue, b"held")])
            await self.take_one(holder)
            await broker.publish([Outgoing(queue, b"%d" % n) for n in range(3)])
            other = await broker.consume(queue, prefetch=3)
            assert {delivery.body for delivery in await self.take(other, 3)} == {b"0", b"1", b"2"}

    async def test_a_higher_priority_overtakes(self) -> None:
        async with self.running() as (broker, queue):
            if not broker.capabilities.priorities:
                raise unittest.SkipTest(f"{broker.name} has no priorities")
            ranks = {b"low 1": 0, b"high 1": 9, b"low 2": 0, b"high 2": 9}
            await broker.publish([Outgoing(queue, body, priority=rank) for body, rank in ranks.items()])
            await self.state_where(broker, queue, lambda state: state.ready == 4)
            consumer = await broker.consume(queue, prefetch=1)
            seen: list[bytes] = []
            for _ in ranks:
                delivery = await self.take_one(consumer)
                seen.append(delivery.body)
                await consumer.ack([delivery])
            assert seen == [b"high 1", b"high 2", b"low 1", b"low 2"]

    # Keys

    async def test_messages_with_keys_of_their_own_all_come(self) -> None:
        """Whatever a run is called: its id is in the key."""
        keys = ("1", "2", "%31", " 1", "1 ", "1\r\n2", "ação", "東京 🛰️", "k" * 1000, "a:b", "a%3Ab", "", None)
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"same", key=key) for key in keys])
            deliveries = await self.take(await broker.consume(queue, prefetch=len(keys)), len(keys))
            assert [delivery.body for delivery in deliveries] == [b"same"] * len(keys)

    async def test_a_message_that_is_sent_again_comes_once(self) -> None:
        async with self.running() as (broker, queue):
            if not broker.capabilities.drops_repeats:
                raise unittest.SkipTest(f"{broker.name} does not tell a repeat")
            first = Outgoing(queue, b"first", key="ação 1")
            await broker.publish([first, first, Outgoing(queue, b"second", key="ação 2")])
            consumer = await broker.consume(queue, prefetch=4)
            deliveries = await self.take(consumer, 2)
            await consumer.ack(deliveries)
            await broker.publish([first, Outgoing(queue, b"third")])
            (last,) = await self.take(consumer, 1)
            assert [delivery.body for delivery in (*deliveries, last)] == [b"first", b"second", b"third"]

    async def test_a_message_with_a_key_can_die_and_live_again_and_again(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"again", key="one")])
            consumer = await broker.consume(queue, prefetch=1)
            for _ in range(2):
                await consumer.dead_letter(await self.take_one(consumer), "no use")
                await self.letters(broker, queue, 1)
                assert await broker.redrive(queue) == 1
            assert (await self.take_one(consumer)).body == b"again"

    # Starting and stopping

    async def test_a_waiting_take_ends_empty_when_its_consumer_closes(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=1)
            taking = asyncio.create_task(consumer.take(1))
            await asyncio.wait({taking}, timeout=self.quiet)
            await consumer.close()
            async with asyncio.timeout(self.patience):
                assert list(await taking) == []
                assert list(await consumer.take(1)) == []

    async def test_a_waiting_take_ends_empty_when_the_broker_closes(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=1)
            taking = asyncio.create_task(consumer.take(1))
            await asyncio.wait({taking}, timeout=self.quiet)
            await broker.close()
            async with asyncio.timeout(self.patience):
                assert list(await taking) == []

    async def test_starting_and_closing_twice_is_fine(self) -> None:
        async with self.running() as (broker, queue):
            await broker.publish([Outgoing(queue, b"kept")])
            await broker.start()
            consumer = await broker.consume(queue, prefetch=1)
            assert (await self.take_one(consumer)).body == b"kept"
            await consumer.close()
            await consumer.close()
            await broker.close()
            await broker.close()
            await consumer.close()

    async def test_a_closed_broker_is_unavailable(self) -> None:
        async with self.running() as (broker, queue):
            await broker.close()
            calls: list[Awaitable[object]] = [
                broker.publish([Outgoing(queue, b"too late")]),
                broker.consume(queue, prefetch=1),
                broker.check(),
            ]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, BrokerUnavailable), f"{outcome!r} is not BrokerUnavailable"
                assert str(outcome)

    async def test_the_check_tells_something_to_people(self) -> None:
        async with self.running() as (broker, _):
            assert (await broker.check()).strip()
            assert broker.name
