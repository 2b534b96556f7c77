"""The tests that every broker passes, unchanged for each adapter.

An adapter's test module makes a subclass and says how to build a broker:

  class TestMyBroker(BrokerSuite):
      async def make_broker(self) -> FullBroker:
          return MyBroker(url, delivery_limit=self.delivery_limit)

The tests are plain coroutines with plain asserts. pytest with `asyncio_mode = "auto"` runs them, and importing this
module needs no pytest. Every queue has a name of its own, so a server may be shared. Real brokers report their counts
late, so the tests poll them until a deadline.
"""

import asyncio
import time
import unittest
from collections.abc import Awaitable

from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Consumer, Outgoing, publish_all
from oraculo.testing.broker_dead_letters import BrokerDeadLetters
from oraculo.wire.naming import dlq_of

GARBAGE = (b"", b"\x00", b"\xff\xfe\x80\x81", b'{"half": ', bytes(range(256)), b"\r\n\r\n", b"\xc3\x28" * 50)
ORACLE = "ORÁCULO — coleção 東京 🛰️ e\u0301 \u202e"
LARGE = 5 * 1024 * 1024


class BrokerSuite(BrokerDeadLetters):
    """The whole suite. Subclass it, name the class `Test…`, and give it `make_broker`."""

    # Publishing and taking

    async def test_a_published_message_is_delivered(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=10)
            await publish_all(broker, [Outgoing(queue, b"hello")])
            delivery = await self.take_one(consumer)
            assert (delivery.queue, delivery.body, delivery.redeliveries) == (queue, b"hello", 0)

    async def test_publish_returns_once_the_broker_has_the_messages(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [])
            await publish_all(broker, [Outgoing(queue, b"%d" % n) for n in range(5)])
            state = await self.state_where(broker, queue, lambda state: state.ready == 5)
            assert state.unacked == 0

    async def test_messages_come_in_the_order_they_were_published(self) -> None:
        async with self.running() as (broker, queue):
            bodies = [b"%d" % n for n in range(100)]
            await publish_all(broker, [Outgoing(queue, body) for body in bodies[:60]])
            await publish_all(broker, [Outgoing(queue, body) for body in bodies[60:]])
            consumer = await broker.consume(queue, prefetch=100)
            assert [delivery.body for delivery in await self.take(consumer, 100)] == bodies

    async def test_a_batch_of_two_thousand(self) -> None:
        async with self.running() as (broker, queue):
            bodies = [b"%d" % n for n in range(2000)]
            consumer = await broker.consume(queue, prefetch=500)
            await publish_all(broker, [Outgoing(queue, body) for body in bodies])
            seen: list[bytes] = []
            while len(seen) < 2000:
                batch = await self.take(consumer, 500)
                seen += [delivery.body for delivery in batch]
                await consumer.ack(batch)
            assert seen == bodies
            await self.assert_empty(broker, queue)

    async def test_each_message_has_a_receipt_and_one_publish_reaches_several_queues(self) -> None:
        async with self.running() as (broker, queue):
            other = self.fresh_name()
            receipts = await broker.publish([Outgoing(queue, b"one"), Outgoing(other, b"two")])
            assert [receipt.error for receipt in receipts] == [None, None]
            assert len({receipt.broker for receipt in receipts}) == 1
            assert receipts[0].broker in [link.name for link in broker.statuses()]
            for name, body in ((queue, b"one"), (other, b"two")):
                assert (await self.take_one(await broker.consume(name, prefetch=1))).body == body

    async def test_messages_published_before_the_first_consumer_are_kept(self) -> None:
        async with self.running() as (broker, _):
            undeclared = self.fresh_name()
            await publish_all(broker, [Outgoing(undeclared, b"early")])
            assert (await self.take_one(await broker.consume(undeclared, prefetch=1))).body == b"early"

    async def test_consuming_a_queue_that_was_not_declared_makes_it(self) -> None:
        async with self.running() as (broker, _):
            undeclared = self.fresh_name()
            consumer = await broker.consume(undeclared, prefetch=1)
            await publish_all(broker, [Outgoing(undeclared, b"hello")])
            assert (await self.take_one(consumer)).body == b"hello"

    async def test_looking_at_a_queue_that_is_not_there_makes_none(self) -> None:
        async with self.running() as (broker, _):
            unknown = self.fresh_name()
            assert not await broker.dead_letters(unknown, limit=10)
            await broker.look_through(unknown, lambda letter: None)
            assert await broker.redrive(unknown) == 0
            assert await broker.discard(unknown, ["1"]) == 0
            assert not await broker.queues([unknown])

    async def test_declaring_twice_keeps_the_messages(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"kept")])
            await broker.declare([queue])
            assert (await self.take_one(await broker.consume(queue, prefetch=1))).body == b"kept"

    async def test_a_message_that_expires_later_is_delivered_as_usual(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"in time", expires_at=time.time() + 3600)])
            delivery = await self.take_one(await broker.consume(queue, prefetch=1))
            assert (delivery.body, delivery.redeliveries) == (b"in time", 0)

    async def test_take_waits_for_a_message(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=10)
            taking = asyncio.create_task(self.take_one(consumer))
            await asyncio.wait({taking}, timeout=self.quiet)
            assert not taking.done()
            await publish_all(broker, [Outgoing(queue, b"at last")])
            assert (await taking).body == b"at last"

    async def test_a_cancelled_take_loses_nothing(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=10)
            taking = asyncio.create_task(consumer.take(10))
            await asyncio.wait({taking}, timeout=self.quiet)
            await publish_all(broker, [Outgoing(queue, b"safe")])
            taking.cancel()
            (outcome,) = await asyncio.gather(taking, return_exceptions=True)
            taken = await self.take(consumer, 1) if isinstance(outcome, BaseException) else outcome
            assert [delivery.body for delivery in taken] == [b"safe"]

    # Bodies are bytes and nothing else

    async def test_bodies_that_are_no_text_come_unchanged(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, body) for body in GARBAGE])
            consumer = await broker.consume(queue, prefetch=len(GARBAGE))
            assert [delivery.body for delivery in await self.take(consumer, len(GARBAGE))] == list(GARBAGE)
            await publish_all(broker, [Outgoing(queue, body, reason="not JSON") for body in GARBAGE])
            assert [letter.body for letter in await self.dead_letters(broker, queue, len(GARBAGE))] == list(GARBAGE)

    async def test_unicode_comes_unchanged_in_bodies_and_reasons(self) -> None:
        async with self.running() as (broker, queue):
            consumer = await broker.consume(queue, prefetch=1)
            await publish_all(broker, [Outgoing(queue, ORACLE.encode())])
            delivery = await self.take_one(consumer)
            assert delivery.body.decode() == ORACLE
            await consumer.dead_letter(delivery, ORACLE)
            (letter,) = await self.dead_letters(broker, queue, 1)
            assert (letter.body.decode(), letter.reason) == (ORACLE, ORACLE)

    async def test_half_a_character_in_a_reason_keeps_no_dead_letter_out(self) -> None:
        """A reason quotes its cause, which may be no valid text."""
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"one"), Outgoing(queue, b"two", reason="half \ud800 left")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.dead_letter(await self.take_one(consumer), "half \udc80 left")
            letters = await self.dead_letters(broker, queue, 2)
            assert {letter.body for letter in letters} == {b"one", b"two"}
            assert {(letter.reason[:5], letter.reason[-5:]) for letter in letters} == {("half ", " left")}

    async def test_a_large_message_comes_whole(self) -> None:
        async with self.running() as (broker, queue):
            body = bytes(range(256)) * (LARGE // 256)
            await publish_all(broker, [Outgoing(queue, body), Outgoing(queue, b"small")])
            consumer = await broker.consume(queue, prefetch=2)
            large, small = await self.take(consumer, 2)
            assert large.body == body
            assert small.body == b"small"

    # Settling

    async def test_a_message_stays_until_it_is_acked(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"%d" % n) for n in range(3)])
            consumer = await broker.consume(queue, prefetch=3)
            first, *rest = await self.take(consumer, 3)
            await consumer.ack([first])
            await self.state_where(broker, queue, lambda state: (state.ready, state.unacked) == (0, 2))
            await consumer.ack(rest)
            await self.assert_empty(broker, queue)

    async def test_settling_twice_does_nothing(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"one"), Outgoing(queue, b"two")])
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
            await publish_all(broker, [Outgoing(queue, b"again")])
            consumer = await broker.consume(queue, prefetch=1)
            stale = await self.take_one(consumer)
            await consumer.retry(stale, 0.0, "once more")
            delivery = await self.take_one(consumer)
            await consumer.ack([stale])
            await self.state_where(broker, queue, lambda state: (state.ready, state.unacked) in ((1, 0), (0, 1)))
            await consumer.ack([delivery])
            await self.assert_empty(broker, queue)

    # Redelivery

    async def test_what_a_closed_consumer_had_not_settled_is_delivered_again(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"%d" % n) for n in range(4)])
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
            await publish_all(broker, [Outgoing(queue, b"passed on")])
            giver, heir = await broker.consume(queue, prefetch=1), await broker.consume(queue, prefetch=1)
            await self.take_one(giver)
            waiting = asyncio.create_task(self.take_one(heir))
            await asyncio.wait({waiting}, timeout=self.quiet)
            await giver.close()
            assert (await waiting).redeliveries == 1

    async def test_an_ack_after_the_consumer_closed_does_nothing(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"kept")])
            consumer = await broker.consume(queue, prefetch=1)
            delivery = await self.take_one(consumer)
            await consumer.close()
            await consumer.ack([delivery])
            assert (await self.take_one(await broker.consume(queue, prefetch=1))).body == b"kept"

    async def test_a_retry_comes_again_and_is_counted(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"again")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry(await self.take_one(consumer), 0.0, "not now")
            delivery = await self.take_one(consumer)
            assert (delivery.queue, delivery.body, delivery.redeliveries) == (queue, b"again", 1)

    async def test_a_retry_comes_not_before_its_delay(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"later")])
            consumer = await broker.consume(queue, prefetch=1)
            delivery = await self.take_one(consumer)
            clock = asyncio.get_running_loop().time
            asked_at = clock()
            await consumer.retry(delivery, 0.5, "not now")
            assert (await self.take_one(consumer)).redeliveries == 1
            assert clock() - asked_at >= 0.48  # a timer may fire a little early

    async def test_a_message_that_waits_for_its_delay_holds_up_no_other(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"slow"), Outgoing(queue, b"quick")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry(await self.take_one(consumer), 60.0, "not now")
            assert (await self.take_one(consumer)).body == b"quick"
            expected = (1, 1, 1)  # a delayed message must not look like one that a deaf consumer misses
            await self.state_where(broker, queue, lambda state: (state.ready, state.delayed, state.unacked) == expected)

    async def test_past_the_delivery_limit_a_message_is_a_dead_letter(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"poison")])
            consumer = await broker.consume(queue, prefetch=1)
            for redeliveries in range(self.delivery_limit):
                delivery = await self.take_one(consumer)
                assert delivery.redeliveries == redeliveries
                await consumer.retry(delivery, 0.0, f"failure {redeliveries}")
            (letter,) = await self.dead_letters(broker, queue, 1)
            assert (letter.queue, letter.body) == (queue, b"poison")
            assert f"failure {self.delivery_limit - 1}" in letter.reason
            assert letter.redeliveries == self.delivery_limit - 1
            await self.assert_empty(broker, queue)

    # Counts

    async def test_the_state_of_a_queue_is_counted(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"%d" % n) for n in range(5)])
            consumer = await broker.consume(queue, prefetch=2)
            await self.take(consumer, 2)
            await self.add_dead_letters(broker, queue, 1)
            expected = (3, 2, 1)
            await self.state_where(broker, queue, lambda s: (s.ready, s.unacked, s.dead_letters) == expected)

    async def test_all_queues_are_listed_or_those_asked_for_but_no_dlqs(self) -> None:
        async with self.running() as (broker, queue):
            await self.add_dead_letters(broker, queue, 1)
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
            await publish_all(broker, [Outgoing(queue, b"%d" % n) for n in range(5)])
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
            await publish_all(broker, [Outgoing(queue, body) for body in bodies])
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
            await publish_all(broker, [Outgoing(queue, b"held")])
            await self.take_one(holder)
            await publish_all(broker, [Outgoing(queue, b"%d" % n) for n in range(3)])
            other = await broker.consume(queue, prefetch=3)
            assert {delivery.body for delivery in await self.take(other, 3)} == {b"0", b"1", b"2"}

    async def test_a_higher_priority_overtakes(self) -> None:
        async with self.running() as (broker, queue):
            if not broker.capabilities.priorities:
                raise unittest.SkipTest(f"{broker.name} has no priorities")
            ranks = {b"low 1": 0, b"high 1": 9, b"low 2": 0, b"high 2": 9}
            await publish_all(broker, [Outgoing(queue, body, priority=rank) for body, rank in ranks.items()])
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
        """A run's id may be any text, and is part of the key."""
        keys = ("1", "2", "%31", " 1", "1 ", "1\r\n2", "ação", "東京 🛰️", "k" * 1000, "a:b", "a%3Ab", "", None)
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"same", key=key) for key in keys])
            deliveries = await self.take(await broker.consume(queue, prefetch=len(keys)), len(keys))
            assert [delivery.body for delivery in deliveries] == [b"same"] * len(keys)

    async def test_a_message_that_is_sent_again_comes_once(self) -> None:
        async with self.running() as (broker, queue):
            if not broker.capabilities.drops_repeats:
                raise unittest.SkipTest(f"{broker.name} does not drop a repeat")
            first = Outgoing(queue, b"first", key="ação 1")
            await publish_all(broker, [first, first, Outgoing(queue, b"second", key="ação 2")])
            consumer = await broker.consume(queue, prefetch=4)
            deliveries = await self.take(consumer, 2)
            await consumer.ack(deliveries)
            await publish_all(broker, [first, Outgoing(queue, b"third")])
            (last,) = await self.take(consumer, 1)
            assert [delivery.body for delivery in (*deliveries, last)] == [b"first", b"second", b"third"]

    async def test_a_message_with_a_key_can_die_and_live_again_and_again(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"again", key="one")])
            consumer = await broker.consume(queue, prefetch=1)
            for _ in range(2):
                await consumer.dead_letter(await self.take_one(consumer), "no use")
                await self.dead_letters(broker, queue, 1)
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

    # Removing

    async def test_a_removed_queue_takes_all_that_belongs_to_it_along(self) -> None:
        async with self.running() as (broker, queue):
            await self.add_dead_letters(broker, queue, 1)
            await publish_all(broker, [Outgoing(queue, b"delayed"), Outgoing(queue, b"waits")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry(await self.take_one(consumer), 0.1, "later")
            await consumer.close()
            await broker.remove([queue])
            assert list(await broker.queues([queue])) == []
            assert list(await broker.dead_letters(queue, limit=10)) == []
            await publish_all(broker, [Outgoing(queue, b"new")])
            consumer = await broker.consume(queue, prefetch=10)
            assert (await self.take_one(consumer)).body == b"new"
            taking = asyncio.create_task(consumer.take(1))
            await asyncio.wait({taking}, timeout=self.quiet)
            assert not taking.done(), "what was delayed came back"
            taking.cancel()

    async def test_a_queue_that_is_not_there_is_removed_and_other_queues_stay(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"kept")])
            await broker.remove([self.fresh_name()])
            consumer = await broker.consume(queue, prefetch=1)
            assert (await self.take_one(consumer)).body == b"kept"

    async def test_starting_and_closing_twice_is_fine(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"kept")])
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

    async def test_the_check_returns_a_text_for_people(self) -> None:
        async with self.running() as (broker, _):
            assert (await broker.check()).strip()
            assert broker.name
