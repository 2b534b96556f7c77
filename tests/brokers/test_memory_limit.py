"""The limit of the memory broker: who finds room when it is nearly full, and who is told that there is none."""

import asyncio
import re

import pytest

from oraculo.brokers.memory import MIB, MemoryBroker
from oraculo.brokers.memory_server import MESSAGE_OVERHEAD
from oraculo.errors import BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import Outgoing, ensure_taken, publish_all
from tests.brokers import test_memory as stage
from tests.brokers.test_memory import bodies, in_virtual_time, messages, started, state
from tests.receipts import places_down, reasons, takers

LONG_REASON = "r" * MESSAGE_OVERHEAD

broker = stage.broker  # a fixture


class TestLimitOfMemory:
    UNIT = MESSAGE_OVERHEAD + 1  # what one of `messages` costs
    LIMIT = 10 * UNIT

    async def test_what_has_no_room_is_told_and_all_else_is_taken(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        await broker.consume("read", prefetch=1)
        receipts = await broker.publish([*messages(7), *messages(2, "read")])
        assert re.search(r"no room for q: messages .*nobody reads it.* start a worker", reasons(receipts))
        assert takers(receipts) == ["memory"] * 5 + [None] * 2 + ["memory"] * 2
        assert not places_down(receipts)
        assert [link.trouble for link in broker.statuses()] == [None]  # it works
        assert ((await state(broker)).ready, (await state(broker, "read")).ready) == (5, 2)

    async def test_a_small_one_is_taken_where_a_large_one_has_no_room(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        large = Outgoing("q", bytes(3 * MESSAGE_OVERHEAD))
        receipts = await broker.publish([large, large, *messages(1)])
        assert takers(receipts) == ["memory", None, "memory"]

    async def test_queues_that_nobody_reads_leave_half_to_the_others(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        for queue in ("a", "b", "c"):
            await broker.publish(messages(3, queue))
        with pytest.raises(QueueUnavailable, match="take 1005 of 2010 bytes, most of them 603 in a; nobody reads it"):
            ensure_taken(await broker.publish(messages(1, "q")))
        consumer = await broker.consume("q", prefetch=100)
        await publish_all(broker, messages(2, "q"))
        await consumer.close()
        with pytest.raises(QueueUnavailable, match="nobody reads"):
            ensure_taken(await broker.publish(messages(1, "q")))

    async def test_a_queue_that_is_read_too_slowly_leaves_others_as_much_as_it_holds(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        for queue in ("a", "b"):
            await broker.consume(queue, prefetch=1)
        receipts = await broker.publish(messages(6, "a"))
        assert re.search(r"no room for a: .* 1005 in a; .*start more workers", reasons(receipts))
        assert takers(receipts).count(None) == 1
        receipts = await broker.publish(messages(5, "b"))
        assert takers(receipts).count(None) == 3

    async def test_a_queue_that_took_nothing_is_forgotten(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        await publish_all(broker, messages(5, "a"))
        with pytest.raises(QueueUnavailable):
            ensure_taken(await broker.publish(messages(1, "b")))
        assert [found.queue for found in await broker.queues()] == ["a"]

    async def test_only_settled_messages_make_room(self) -> None:
        broker = await started(max_bytes=2 * self.LIMIT)
        consumer = await broker.consume("q", prefetch=100)
        await publish_all(broker, messages(10))
        taken = await consumer.take(10)
        with pytest.raises(QueueUnavailable):
            ensure_taken(await broker.publish(messages(1)))
        await consumer.ack(taken[:3])
        await consumer.ack(taken[:3])
        await publish_all(broker, messages(3))
        with pytest.raises(QueueUnavailable):
            ensure_taken(await broker.publish(messages(1)))

    async def test_dead_letters_and_their_reasons_count_until_they_are_discarded(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        consumer = await broker.consume("q", prefetch=100)
        await publish_all(broker, messages(5))
        for delivery in await consumer.take(5):
            await consumer.dead_letter(delivery, LONG_REASON)
        await publish_all(broker, messages(1))
        (last,) = await consumer.take(1)
        with pytest.raises(BrokerUnavailable, match=r"dead letters.*q\.dlq.*discard"):
            await consumer.dead_letter(last, LONG_REASON)
        assert ((await state(broker)).ready, (await state(broker)).unacked) == (1, 0)
        letters = await broker.dead_letters("q", limit=9)
        assert await broker.discard("q", [letter.id for letter in letters]) == 5
        await publish_all(broker, [Outgoing("q", b"9", reason="r")] * 9)

    def test_what_the_quarantine_had_no_room_for_comes_again_later(self) -> None:
        async def scenario() -> None:
            broker, loop = await started(max_bytes=self.LIMIT), asyncio.get_running_loop()
            await publish_all(broker, [*messages(1), *[Outgoing("q", b"0", reason=LONG_REASON)] * 5])
            consumer = await broker.consume("q", prefetch=1)
            with pytest.raises(BrokerUnavailable):
                await consumer.dead_letter((await consumer.take(1))[0], "bad")
            (again,) = await consumer.take(1)
            assert (again.redeliveries, loop.time()) == (1, 5.0)

        in_virtual_time(scenario)

    async def test_a_full_quarantine_stops_no_work_and_the_reverse(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        await publish_all(broker, [Outgoing("q", b"0", reason=LONG_REASON)] * 5)
        receipts = await broker.publish([*messages(1), Outgoing("q", b"0", reason="r"), *messages(4)])
        assert re.search(r"no room for q\.dlq: dead letters .* redrive or discard", reasons(receipts))
        assert takers(receipts) == ["memory", None, *["memory"] * 4]
        with pytest.raises(QueueUnavailable, match=r"no room for q: .*nobody reads it"):
            await broker.redrive("q")
        assert (await state(broker)).dead_letters == 5
        await broker.discard("q", [letter.id for letter in await broker.dead_letters("q", limit=10)])
        await publish_all(broker, [Outgoing("q", b"0", reason=LONG_REASON)] * 5)

    async def test_a_redrive_moves_what_has_room_and_keeps_the_others(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        await publish_all(broker, [Outgoing("q", b"%d" % n, reason="bad") for n in range(7)])
        with pytest.raises(QueueUnavailable, match="no room for q"):
            await broker.redrive("q")
        assert ((await state(broker)).ready, (await state(broker)).dead_letters) == (5, 2)
        consumer = await broker.consume("q", prefetch=100)
        taken = await consumer.take(10)
        assert bodies(taken) == [0, 1, 2, 3, 4]
        await consumer.ack(taken)
        assert await broker.redrive("q") == 2
        assert bodies(await consumer.take(10)) == [5, 6]

    async def test_past_its_limit_a_message_goes_round_while_the_quarantine_is_full(self) -> None:
        broker = await started(max_bytes=self.LIMIT, delivery_limit=1)
        await publish_all(broker, [*messages(1), *[Outgoing("other", b"0", reason=LONG_REASON)] * 5])
        consumer = await broker.consume("q", prefetch=1)
        for redeliveries in range(3):
            (delivery,) = await consumer.take(1)
            assert delivery.redeliveries == redeliveries
            await consumer.retry(delivery, 0.0, "bad")
        (first, *_) = await broker.dead_letters("other", limit=10)
        await broker.redrive("other", [first.id])
        await consumer.retry((await consumer.take(1))[0], 0.0, "bad")
        (letter,) = await broker.dead_letters("q", limit=10)
        assert (letter.reason, letter.redeliveries) == ("bad", 3)

    async def test_the_check_is_red_before_nobody_has_room(self) -> None:
        broker = await started(max_bytes=32 * self.UNIT)
        for queue, count in (("a", 16), ("b", 8), ("c", 4), ("d", 2)):
            assert await broker.check()
            await broker.consume(queue, prefetch=1)
            await publish_all(broker, [Outgoing(queue, b"1")] * count)
        assert await broker.check()
        await broker.consume("e", prefetch=1)
        await publish_all(broker, messages(1, "e"))
        with pytest.raises(
            BrokerUnavailable, match=r"nearly full: messages take 6231 of 6432 bytes.* 3216 in a; start"
        ):
            await broker.check()

    async def test_the_check_is_red_for_dead_letters_too(self) -> None:
        broker = await started(max_bytes=self.LIMIT)
        await publish_all(broker, [Outgoing("q", b"0", reason=LONG_REASON)] * 5)
        with pytest.raises(BrokerUnavailable, match=r"nearly full: dead letters .* in q\.dlq; redrive or discard"):
            await broker.check()

    async def test_no_way_through_the_broker_leaves_bytes_behind(self) -> None:
        broker = await started(max_bytes=self.LIMIT, delivery_limit=2)
        consumer = await broker.consume("q", prefetch=100)
        for _ in range(20):
            await publish_all(broker, [*messages(2), Outgoing("q", b"3", reason="bad"), Outgoing("q.dlq", b"4")])
            for reason in ("again", "too often"):
                for delivery in await consumer.take(9):
                    await consumer.retry(delivery, 0.0, reason)
            assert await broker.redrive("q") == 4
            await consumer.ack(await consumer.take(9))
        await publish_all(broker, messages(5))

    async def test_the_default_is_256_mib_and_half_of_it_for_one_queue(self, broker: MemoryBroker) -> None:
        block = bytes(64 * MIB - MESSAGE_OVERHEAD)
        await publish_all(broker, [Outgoing("q", block)] * 2)
        with pytest.raises(QueueUnavailable, match="of 268435456 bytes"):
            ensure_taken(await broker.publish([Outgoing("q", b"")]))
