"""What the memory broker gets rid of by itself: expired messages and queues that nobody needs."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.memory_queues import Queue, StoredMessage
from oraculo.brokers.memory_server import MESSAGE_OVERHEAD
from oraculo.errors import BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import Outgoing, ensure_taken, publish_all
from oraculo.ports.broker_admin import QueueState
from tests.brokers.test_memory import FixedClock, in_virtual_time
from tests.receipts import takers

NOW, SOON = 1_000.0, 1_010.0
UNIT = MESSAGE_OVERHEAD + 1  # what a message of one byte costs
LIMIT = 20 * UNIT  # half of it for a queue


@pytest.fixture
def clock() -> FixedClock:
    return FixedClock(NOW)


@pytest.fixture
async def broker(clock: FixedClock) -> AsyncIterator[MemoryBroker]:
    broker = MemoryBroker(clock, max_bytes=LIMIT, delivery_limit=3)
    await broker.start()
    yield broker
    await broker.close()


def expiring(body: bytes = b"x", queue: str = "q", at: float = SOON, priority: int = 0) -> Outgoing:
    return Outgoing(queue, body, priority, expires_at=at)


async def state(broker: MemoryBroker) -> QueueState:
    await broker.declare(["q"])
    (found,) = await broker.queues(["q"])
    return found


class TestExpiry:
    async def test_an_expired_message_is_not_delivered_and_others_are(
        self, broker: MemoryBroker, clock: FixedClock
    ) -> None:
        await publish_all(
            broker, [expiring(priority=9), expiring(), Outgoing("q", b"1"), expiring(at=SOON + 1), expiring()]
        )
        consumer = await broker.consume("q", prefetch=10)
        clock.at = SOON
        assert [delivery.body for delivery in await consumer.take(1)] == [b"1"]
        assert [delivery.body for delivery in await consumer.take(10)] == [b"x"]
        assert (await state(broker)).ready == 0
        assert "3 expired" in await broker.check()

    async def test_a_take_goes_on_waiting_when_all_there_was_has_expired(
        self, broker: MemoryBroker, clock: FixedClock
    ) -> None:
        await publish_all(broker, [expiring(), expiring()])
        consumer = await broker.consume("q", prefetch=10)
        clock.at = SOON
        taking = asyncio.create_task(consumer.take(10))
        await asyncio.sleep(0.01)
        assert not taking.done()
        await publish_all(broker, [Outgoing("q", b"1")])
        async with asyncio.timeout(5):
            assert [delivery.body for delivery in await taking] == [b"1"]

    async def test_expired_ones_are_not_counted(self, broker: MemoryBroker, clock: FixedClock) -> None:
        await publish_all(broker, [expiring(), expiring(at=SOON + 1), Outgoing("q", b"1")])
        assert (await state(broker)).ready == 3
        clock.at = SOON
        assert (await state(broker)).ready == 2

    async def test_a_queue_that_nobody_serves_is_full_only_until_its_messages_expire(
        self, broker: MemoryBroker, clock: FixedClock
    ) -> None:
        await publish_all(broker, [expiring(queue="unserved")] * 9 + [Outgoing("q", b"1")])
        with pytest.raises(QueueUnavailable, match=r"1809 in unserved"):
            ensure_taken(await broker.publish([Outgoing("other", b"1")]))
        clock.at = SOON
        await publish_all(broker, [Outgoing("other", b"1")] * 9)
        assert {found.queue: found.ready for found in await broker.queues()} == {"q": 1, "other": 9}

    async def test_the_check_counts_no_expired_ones(self, clock: FixedClock) -> None:
        broker = MemoryBroker(clock, max_bytes=32 * UNIT)
        await broker.start()
        for queue, count in {"a": 16, "b": 8, "c": 4, "d": 2, "e": 1}.items():  # each half of what is left
            consumer = await broker.consume(queue, prefetch=1)
            await publish_all(broker, [expiring(queue=queue)] * count)
            await consumer.close()
        with pytest.raises(BrokerUnavailable, match="nearly full"):
            await broker.check()
        clock.at = SOON
        assert "0 queues" in await broker.check()

    async def test_all_queues_are_not_looked_through_again_for_each_message_without_room(
        self, clock: FixedClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks, plain = list[str](), Queue.pull_expired

        def takes_a_while(queue: Queue, now: float) -> list[StoredMessage]:
            looks.append(queue.name)
            clock.at += 5e-6
            return plain(queue, now)

        monkeypatch.setattr(Queue, "pull_expired", takes_a_while)
        broker = MemoryBroker(clock, max_bytes=2_000 * UNIT)
        await broker.start()
        await publish_all(broker, [Outgoing(f"q{number}", b"x") for number in range(1_000)])
        for _ in range(20):
            with pytest.raises(QueueUnavailable):
                ensure_taken(await broker.publish([Outgoing("one more", b"x")]))
        assert 1_000 <= len(looks) <= 1_001
        clock.at += 1
        with pytest.raises(QueueUnavailable):
            ensure_taken(await broker.publish([Outgoing("one more", b"x")]))
        assert len(looks) >= 2_000, "after a while they are"

    async def test_one_given_back_keeps_its_expiry(self, broker: MemoryBroker, clock: FixedClock) -> None:
        await publish_all(broker, [expiring(), expiring()])
        consumer = await broker.consume("q", prefetch=10)
        first, _second = await consumer.take(10)
        await broker.queues()  # a sweep while they are out
        await consumer.retry(first, 0.0, "again")
        await consumer.close()
        assert (await state(broker)).ready == 2
        clock.at = SOON
        assert (await state(broker)).ready == 0
        await publish_all(broker, [Outgoing("q", b"1")] * 10)

    async def test_one_in_hand_is_settled_as_ever(self, broker: MemoryBroker, clock: FixedClock) -> None:
        await publish_all(broker, [expiring()] * 10)
        consumer = await broker.consume("q", prefetch=10)
        taken = await consumer.take(10)
        clock.at = SOON
        assert (await state(broker)).unacked == 10
        await consumer.ack(taken)
        await publish_all(broker, [Outgoing("q", b"1")] * 10)

    async def test_a_dead_letter_has_none_and_neither_has_what_is_redriven(
        self, broker: MemoryBroker, clock: FixedClock
    ) -> None:
        await publish_all(broker, [expiring(b"0"), Outgoing("q", b"1", reason="bad", expires_at=SOON)])
        consumer = await broker.consume("q", prefetch=10)
        await consumer.dead_letter((await consumer.take(1))[0], "bad")
        clock.at = SOON
        assert (await state(broker)).dead_letters == 2
        assert await broker.redrive("q") == 2
        assert [delivery.body for delivery in await consumer.take(10)] == [b"1", b"0"]

    def test_one_that_waits_for_its_delay_expires_too(self, clock: FixedClock) -> None:
        async def scenario() -> None:
            broker = MemoryBroker(clock, max_bytes=LIMIT)
            await broker.start()
            await publish_all(broker, [expiring(), expiring(at=SOON + 100), expiring()])
            consumer = await broker.consume("q", prefetch=10)
            for delay, delivery in zip((50.0, 60.0, 70.0), await consumer.take(3), strict=True):
                await consumer.retry(delivery, delay, "later")
            clock.at = SOON
            assert (await state(broker)).ready == 1
            assert len(await consumer.take(10)) == 1
            assert asyncio.get_running_loop().time() == 60.0

        in_virtual_time(scenario)

    def test_all_that_wait_for_their_delay_may_expire(self, clock: FixedClock) -> None:
        async def scenario() -> None:
            broker = MemoryBroker(clock, max_bytes=LIMIT)
            await broker.start()
            await publish_all(broker, [expiring()])
            consumer = await broker.consume("q", prefetch=10)
            await consumer.retry((await consumer.take(1))[0], 50.0, "later")
            clock.at = SOON
            assert (await state(broker)).ready == 0
            await asyncio.sleep(100)
            await publish_all(broker, [Outgoing("q", b"1")])
            assert len(await consumer.take(10)) == 1

        in_virtual_time(scenario)


class TestForgottenQueues:
    async def names(self, broker: MemoryBroker) -> list[str]:
        return [found.queue for found in await broker.queues()]

    async def test_one_that_was_emptied_and_left(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("q", b"1")])
        consumer = await broker.consume("q", prefetch=1)
        await consumer.ack(await consumer.take(1))
        assert await self.names(broker) == ["q"]
        await consumer.close()
        assert await self.names(broker) == []

    async def test_not_one_that_was_declared(self, broker: MemoryBroker) -> None:
        await broker.declare(["q", "r.dlq"])
        for name in ("q", "r", "r.dlq"):
            await (await broker.consume(name, prefetch=1)).close()
        assert await self.names(broker) == ["q", "r"]

    async def test_not_one_with_another_consumer_a_message_or_a_dead_letter(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("message", b"1"), Outgoing("letter", b"1", reason="bad")])
        await broker.consume("other", prefetch=1)
        for name in ("message", "letter", "other"):
            await (await broker.consume(name, prefetch=1)).close()
        assert await self.names(broker) == ["message", "letter", "other"]

    async def test_one_whose_last_dead_letter_is_discarded_or_acked(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("q", b"1", reason="bad"), Outgoing("r", b"1", reason="bad")])
        (letter,) = await broker.dead_letters("q", limit=1)
        await broker.discard("q", [letter.id])
        consumer = await broker.consume("r.dlq", prefetch=1)
        await consumer.ack(await consumer.take(1))
        await consumer.close()
        assert await self.names(broker) == []

    def test_not_one_whose_message_waits_for_its_delay(self) -> None:
        async def scenario() -> None:
            broker = MemoryBroker(FixedClock(NOW))
            await broker.start()
            await publish_all(broker, [Outgoing("q", b"1")])
            consumer = await broker.consume("q", prefetch=1)
            await consumer.retry((await consumer.take(1))[0], 50.0, "later")
            await consumer.close()
            assert len(await (await broker.consume("q", prefetch=1)).take(1)) == 1

        in_virtual_time(scenario)

    async def test_a_closed_consumer_does_no_harm_to_the_queue_made_anew(self, broker: MemoryBroker) -> None:
        old = await broker.consume("q", prefetch=1)
        waiting = asyncio.create_task(old.take(1))
        await asyncio.sleep(0)
        await old.close()
        new = await broker.consume("q", prefetch=1)
        await publish_all(broker, [Outgoing("q", b"1")])
        assert await waiting == []
        assert await old.take(1) == []
        (delivery,) = await new.take(1)
        await old.ack([delivery])
        assert (await state(broker)).unacked == 1

    async def test_looking_makes_none(self, broker: MemoryBroker) -> None:
        await broker.dead_letters("q", limit=1)
        await broker.redrive("q")
        await broker.discard("q", ["1"])
        assert takers(await broker.publish([Outgoing("q", bytes(LIMIT))])) == [None]
        assert await self.names(broker) == []

    async def test_its_memory_is_free(self, broker: MemoryBroker) -> None:
        consumer = await broker.consume("q", prefetch=1)
        gone = weakref.ref(consumer._queue)
        await consumer.close()
        del consumer
        gc.collect()
        assert gone() is None


class TestManyDeadLetters:
    COUNT = 50_000

    async def filled(self) -> MemoryBroker:
        broker = MemoryBroker(FixedClock(NOW))
        await broker.start()
        await publish_all(broker, [Outgoing("q", b"%d" % n, reason="bad") for n in range(self.COUNT)])
        return broker

    async def test_paging_while_discarding_sees_each_once(self) -> None:
        """A scan from the start for each page would look at more than a hundred million letters."""
        broker, seen, after = await self.filled(), list[bytes](), None
        while page := await broker.dead_letters("q", limit=10, after=after):
            seen += [letter.body for letter in page]
            after = page[-1].id
            assert await broker.discard("q", [letter.id for letter in page[::2]]) == (len(page) + 1) // 2
        assert seen == [b"%d" % n for n in range(self.COUNT)]
        assert len(await broker.dead_letters("q", limit=self.COUNT)) == self.COUNT // 2

    async def test_letters_taken_removed_and_given_back_keep_their_order(self) -> None:
        broker = await self.filled()
        letters = await broker.dead_letters("q", limit=300)
        consumer = await broker.consume("q.dlq", prefetch=200)
        taken = await consumer.take(200)
        await consumer.ack(taken[:50])
        assert await broker.redrive("q", [letter.id for letter in letters[190:250]]) == 50
        await consumer.retry(taken[120], 0.0, "again")
        await consumer.retry(taken[60], 0.0, "again")
        await consumer.retry(taken[90], 0.0, "again")
        assert [int(letter.body) for letter in await broker.dead_letters("q", limit=4)] == [60, 90, 120, 250]
        await consumer.close()
        expected = [*range(50, 200), *range(250, 260)]
        assert [int(letter.body) for letter in await broker.dead_letters("q", limit=160)] == expected
        after = await broker.dead_letters("q", limit=2, after=letters[199].id)
        assert [int(letter.body) for letter in after] == [250, 251]
