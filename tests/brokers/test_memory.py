"""The memory broker: the suite every broker passes, and what is its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.errors import BrokerError
from oraculo.ports.broker import Broker, Delivery, Outgoing, ensure_taken, publish_all
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock
from oraculo.testing.broker_suite import BrokerSuite

LEASE = 30.0


class FixedClock:
    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        return self.at


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._now = max(self._now, min(timers))
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10_000):
            await scenario()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(bounded())


class TestConformance(BrokerSuite):
    async def make_broker(self) -> Broker:
        return MemoryBroker(SystemClock(), delivery_limit=self.delivery_limit)


class TestConformanceWithLease(BrokerSuite):
    async def make_broker(self) -> Broker:
        return MemoryBroker(SystemClock(), delivery_limit=self.delivery_limit, lease=LEASE)


async def started(**options: Any) -> MemoryBroker:
    broker = MemoryBroker(FixedClock(1_000.0), **options)
    await broker.start()
    return broker


@pytest.fixture
async def broker() -> AsyncIterator[MemoryBroker]:
    broker = await started()
    yield broker
    await broker.close()


def messages(count: int, queue: str = "q", priority: int = 0) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % n, priority) for n in range(count)]


def bodies(deliveries: object) -> list[int]:
    assert isinstance(deliveries, list)
    return [int(delivery.body) for delivery in deliveries]


async def state(broker: MemoryBroker, queue: str = "q") -> QueueState:
    (found,) = await broker.queues([queue])
    return found


class TestTaking:
    async def test_everything_there_comes_in_one_take(self, broker: MemoryBroker) -> None:
        await publish_all(broker, messages(2000))
        consumer = await broker.consume("q", prefetch=1500)
        assert bodies(await consumer.take(1000)) == list(range(1000))
        assert bodies(await consumer.take(1000)) == list(range(1000, 1500))

    async def test_priorities_overtake_within_one_take(self, broker: MemoryBroker) -> None:
        ranks = (0, 5, 9, 5, 0)
        await publish_all(broker, [Outgoing("q", b"%d" % n, rank) for n, rank in enumerate(ranks)])
        consumer = await broker.consume("q", prefetch=10)
        assert bodies(await consumer.take(10)) == [2, 1, 3, 0, 4]

    @pytest.mark.parametrize("priority", [-1, 10])
    async def test_a_priority_out_of_range_is_refused_with_the_whole_call(
        self, broker: MemoryBroker, priority: int
    ) -> None:
        await broker.declare(["q"])
        with pytest.raises(BrokerError, match="priority"):
            ensure_taken(await broker.publish([*messages(3), *messages(1, priority=priority)]))
        assert (await state(broker)).ready == 0

    async def test_senseless_bounds_are_refused(self, broker: MemoryBroker) -> None:
        with pytest.raises(BrokerError, match="prefetch"):
            await broker.consume("q", prefetch=0)
        with pytest.raises(BrokerError, match="limit"):
            await (await broker.consume("q", prefetch=1)).take(0)

    async def test_a_consumer_never_out_of_messages_lets_others_run(self, broker: MemoryBroker) -> None:
        await publish_all(broker, messages(5000))
        consumer = await broker.consume("q", prefetch=1)
        ran = asyncio.Event()
        asyncio.get_running_loop().call_soon(ran.set)
        while not ran.is_set():
            await consumer.ack(await consumer.take(1))
        assert (await state(broker)).ready > 4000


class TestOrderOfRedelivery:
    async def test_given_back_by_several_consumers_they_stand_in_front_in_their_old_order(
        self, broker: MemoryBroker
    ) -> None:
        await publish_all(broker, messages(6))
        first, second = [await broker.consume("q", prefetch=10) for _ in range(2)]
        for consumer in (first, second, first, second):
            await consumer.take(1)
        await first.close()
        await second.close()
        heir = await broker.consume("q", prefetch=10)
        assert bodies(await heir.take(10)) == [0, 1, 2, 3, 4, 5]

    async def test_a_retry_stands_in_front_of_its_own_priority_only(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("q", b"1"), Outgoing("q", b"2")])
        consumer = await broker.consume("q", prefetch=10)
        (taken,) = await consumer.take(1)
        await consumer.retry(taken, 0.0, "again")
        await publish_all(broker, [Outgoing("q", b"0", priority=9)])
        assert bodies(await consumer.take(10)) == [0, 1, 2]

    def test_those_due_together_return_together_and_in_order(self) -> None:
        async def scenario() -> None:
            broker = await started()
            await publish_all(broker, messages(3))
            consumer = await broker.consume("q", prefetch=3)
            for delivery in reversed(await consumer.take(3)):
                await consumer.retry(delivery, 100.0, "later")
            assert bodies(await consumer.take(3)) == [0, 1, 2]

        in_virtual_time(scenario)

    def test_delayed_ones_return_when_each_is_due(self) -> None:
        async def scenario() -> None:
            broker, loop = await started(), asyncio.get_running_loop()
            await publish_all(broker, messages(3))
            consumer = await broker.consume("q", prefetch=3)
            for delivery, delay in zip(await consumer.take(3), (300.0, 100.0, 200.0), strict=True):
                await consumer.retry(delivery, delay, "later")
            assert (await state(broker)).ready == 3
            seen = [(bodies(await consumer.take(3)), round(loop.time())) for _ in range(3)]
            assert seen == [([1], 100), ([2], 200), ([0], 300)]

        in_virtual_time(scenario)


class TestFairness:
    async def shared_out(self, broker: MemoryBroker, consumers: int, count: int) -> list[int]:
        subscriptions = [await broker.consume("q", prefetch=1000) for _ in range(consumers)]
        takes = [asyncio.create_task(self.take_and_hold(one)) for one in subscriptions]
        await asyncio.sleep(0)  # all of them wait now
        await publish_all(broker, messages(count))
        return [len(await taken) for taken in takes]

    @staticmethod
    async def take_and_hold(consumer: MemoryConsumer) -> list[Delivery]:
        return list(await consumer.take(1000))

    async def test_those_who_wait_get_equal_shares(self, broker: MemoryBroker) -> None:
        assert await self.shared_out(broker, consumers=4, count=1000) == [250, 250, 250, 250]

    async def test_an_uneven_rest_is_shared_as_well_as_it_goes(self, broker: MemoryBroker) -> None:
        assert sorted(await self.shared_out(broker, consumers=3, count=10)) == [3, 3, 4]

    async def test_the_one_that_waited_longest_is_served_first(self, broker: MemoryBroker) -> None:
        served: list[str] = []
        all_served = asyncio.Event()

        async def work(name: str, consumer: MemoryConsumer) -> None:
            while batch := await consumer.take(1):
                served.append(name)
                await consumer.ack(batch)
                if len(served) == 30:
                    all_served.set()

        consumers = {name: await broker.consume("q", prefetch=1) for name in "abc"}
        workers = [asyncio.create_task(work(name, consumer)) for name, consumer in consumers.items()]
        await asyncio.sleep(0)
        await publish_all(broker, messages(30))
        await all_served.wait()
        assert {name: served.count(name) for name in "abc"} == {"a": 10, "b": 10, "c": 10}
        await broker.close()
        await asyncio.gather(*workers)

    async def test_a_greedy_consumer_does_not_overtake_one_that_has_its_turn(self, broker: MemoryBroker) -> None:
        patient, greedy = [await broker.consume("q", prefetch=1000) for _ in range(2)]
        waiting = asyncio.create_task(self.take_and_hold(patient))
        await asyncio.sleep(0)
        await publish_all(broker, messages(100))
        assert len(await greedy.take(1000)) == 50
        assert len(await waiting) == 50

    async def test_the_turn_of_a_cancelled_take_goes_to_the_next(self, broker: MemoryBroker) -> None:
        first, second = [await broker.consume("q", prefetch=10) for _ in range(2)]
        cancelled, waiting = [asyncio.create_task(self.take_and_hold(one)) for one in (first, second)]
        await asyncio.sleep(0)
        await publish_all(broker, messages(1))
        cancelled.cancel()
        async with asyncio.timeout(5):
            assert bodies(await waiting) == [0]

    async def test_the_turn_of_a_closed_consumer_goes_to_the_next(self, broker: MemoryBroker) -> None:
        first, second = [await broker.consume("q", prefetch=10) for _ in range(2)]
        closed, waiting = [asyncio.create_task(self.take_and_hold(one)) for one in (first, second)]
        await asyncio.sleep(0)
        await publish_all(broker, messages(1))
        await first.close()
        async with asyncio.timeout(5):
            assert await closed == []
            assert bodies(await waiting) == [0]


class TestWaking:
    """A take that waits is served by whatever brings a message, or makes room for one."""

    async def test_by_a_retry_of_another(self, broker: MemoryBroker) -> None:
        await publish_all(broker, messages(1))
        giver, waiter = [await broker.consume("q", prefetch=1) for _ in range(2)]
        (delivery,) = await giver.take(1)
        waiting = await self.waiting(waiter)
        await giver.retry(delivery, 0.0, "not mine")
        assert await self.served(waiting) == [0]

    async def test_by_a_redrive(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("q", b"0", reason="bad")])
        waiting = await self.waiting(await broker.consume("q", prefetch=1))
        await broker.redrive("q")
        assert await self.served(waiting) == [0]

    async def test_by_a_dead_letter_on_the_dlq(self, broker: MemoryBroker) -> None:
        await publish_all(broker, messages(1))
        consumer = await broker.consume("q", prefetch=1)
        (delivery,) = await consumer.take(1)
        waiting = await self.waiting(await broker.consume("q.dlq", prefetch=1))
        await consumer.dead_letter(delivery, "bad")
        assert await self.served(waiting) == [0]

    async def test_by_the_room_that_a_dead_letter_or_a_delay_leaves(self, broker: MemoryBroker) -> None:
        await publish_all(broker, messages(3))
        consumer = await broker.consume("q", prefetch=1)
        (first,) = await consumer.take(1)
        waiting = await self.waiting(consumer)
        await consumer.dead_letter(first, "bad")
        async with asyncio.timeout(5):
            (second,) = await waiting
        waiting = await self.waiting(consumer)
        await consumer.retry(second, 60.0, "later")
        assert await self.served(waiting) == [2]

    @staticmethod
    async def waiting(consumer: MemoryConsumer) -> "asyncio.Task[Sequence[Delivery]]":
        taking = asyncio.create_task(consumer.take(10))
        await asyncio.sleep(0)
        assert not taking.done()
        return taking

    @staticmethod
    async def served(waiting: "asyncio.Task[Sequence[Delivery]]") -> list[int]:
        async with asyncio.timeout(5):
            return bodies(await waiting)


class TestLease:
    def test_what_is_not_settled_in_time_is_delivered_again(self) -> None:
        async def scenario() -> None:
            broker, loop = await started(lease=LEASE), asyncio.get_running_loop()
            await publish_all(broker, messages(3))
            stuck = await broker.consume("q", prefetch=10)
            taken = await stuck.take(3)
            await stuck.ack(taken[:1])
            other = await broker.consume("q", prefetch=10)
            again = await other.take(10)
            assert (bodies(again), loop.time()) == ([1, 2], LEASE)
            assert [delivery.redeliveries for delivery in again] == [1, 1]
            await stuck.ack(taken)
            assert (await state(broker)).unacked == 2

        in_virtual_time(scenario)

    def test_extending_renews_it(self) -> None:
        async def scenario() -> None:
            broker, loop = await started(lease=LEASE), asyncio.get_running_loop()
            await publish_all(broker, messages(2))
            busy = await broker.consume("q", prefetch=10)
            kept, left = await busy.take(2)
            other = await broker.consume("q", prefetch=10)
            await asyncio.sleep(20)
            await busy.extend([kept])
            assert (bodies(await other.take(10)), loop.time()) == ([1], LEASE)
            assert (bodies(await other.take(10)), loop.time()) == ([0], 20 + LEASE)
            await busy.extend([kept, left])
            assert (await state(broker)).unacked == 2

        in_virtual_time(scenario)

    def test_a_later_delivery_has_its_own_lease(self) -> None:
        async def scenario() -> None:
            broker, loop = await started(lease=LEASE), asyncio.get_running_loop()
            await publish_all(broker, messages(2))
            stuck = await broker.consume("q", prefetch=10)
            await stuck.take(1)
            await asyncio.sleep(10)
            await stuck.take(1)
            other = await broker.consume("q", prefetch=10)
            assert (bodies(await other.take(10)), loop.time()) == ([0], LEASE)
            assert (bodies(await other.take(10)), loop.time()) == ([1], 10 + LEASE)

        in_virtual_time(scenario)

    def test_running_out_too_often_ends_in_quarantine(self) -> None:
        async def scenario() -> None:
            broker = await started(lease=LEASE, delivery_limit=3)
            await publish_all(broker, messages(1))
            stuck = await broker.consume("q", prefetch=10)
            for redeliveries in range(3):
                (delivery,) = await stuck.take(1)
                assert delivery.redeliveries == redeliveries
            await asyncio.sleep(LEASE)
            (letter,) = await broker.dead_letters("q", limit=10)
            assert "3 times" in letter.reason
            assert "lease" in letter.reason
            assert (letter.redeliveries, letter.at) == (2, 1_000.0)

        in_virtual_time(scenario)

    def test_without_one_a_delivery_is_kept_for_ever(self) -> None:
        async def scenario() -> None:
            broker = await started()
            await publish_all(broker, messages(1))
            consumer = await broker.consume("q", prefetch=1)
            await consumer.extend(await consumer.take(1))
            await asyncio.sleep(9_000)
            assert (await state(broker)).unacked == 1

        in_virtual_time(scenario)


class TestQuarantine:
    async def test_closing_too_often_ends_there_in_order(self) -> None:
        broker = await started(delivery_limit=2)
        await publish_all(broker, messages(3))
        for _ in range(2):
            consumer = await broker.consume("q", prefetch=3)
            await consumer.take(3)
            await consumer.close()
        letters = await broker.dead_letters("q", limit=10)
        assert [letter.body for letter in letters] == [b"0", b"1", b"2"]
        assert "the consumer closed" in letters[0].reason

    async def test_a_letter_given_back_by_a_consumer_of_the_dlq_keeps_reason_count_and_place(self) -> None:
        broker = await started(delivery_limit=1)
        await publish_all(broker, [Outgoing("q", b"%d" % n, reason=f"reason {n}") for n in range(4)])
        before = await broker.dead_letters("q", limit=10)
        first, second = [await broker.consume("q.dlq", prefetch=10) for _ in range(2)]
        for consumer in (first, second, first):
            await consumer.take(1)
        assert (await state(broker)).dead_letters == 4
        await first.close()
        await second.close()
        assert await broker.dead_letters("q", limit=10) == before

    async def test_a_letter_buried_again_has_the_new_reason(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("q", b"0", reason="old")])
        consumer = await broker.consume("q.dlq", prefetch=1)
        await consumer.dead_letter((await consumer.take(1))[0], "new")
        (letter,) = await broker.dead_letters("q", limit=10)
        assert letter.reason == "new"
        assert [found.queue for found in await broker.queues()] == ["q"]

    async def test_a_letter_without_a_reason_says_so(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("q.dlq", b"0")])
        (letter,) = await broker.dead_letters("q", limit=10)
        assert (letter.reason, letter.at) == ("published to the dead-letter queue without a reason", 1_000.0)

    async def test_paging_goes_on_behind_a_letter_that_is_gone(self, broker: MemoryBroker) -> None:
        await publish_all(broker, [Outgoing("q", b"%d" % n, reason="bad") for n in range(3)])
        first, *rest = await broker.dead_letters("q", limit=10)
        await broker.discard("q", [first.id])
        assert await broker.dead_letters("q", limit=10, after=first.id) == rest


class TestLife:
    async def test_what_was_in_it_is_lost_with_its_close(self) -> None:
        broker = await started()
        consumer = await broker.consume("q", prefetch=1)
        await publish_all(broker, messages(3))
        (delivery,) = await consumer.take(1)
        await broker.close()
        await broker.start()
        await consumer.retry(delivery, 0.0, "too late")
        assert list(await broker.queues()) == []
        assert list(await consumer.take(1)) == []


async def test_two_hundred_thousand_messages_pass_through_every_way(broker: MemoryBroker) -> None:
    """Would pass the time limit of a test if a message cost more on any of these ways the more there are."""
    count = 200_000
    for start in range(0, count, 1000):
        await publish_all(broker, [Outgoing("q", b"%d" % n, priority=n % 3) for n in range(start, start + 1000)])
    consumer = await broker.consume("q", prefetch=count)
    for delivery in await consumer.take(count):
        await consumer.retry(delivery, 0.0, "once more")
    await consumer.take(count)
    await consumer.close()
    consumer, handled = await broker.consume("q", prefetch=100), 0
    for _ in range(count // 2 // 100):
        batch = await consumer.take(100)
        await consumer.ack(batch)
        handled += len(batch)
    for _ in range(count // 2):
        await consumer.dead_letter((await consumer.take(1))[0], "bad")
    assert await broker.redrive("q") == count // 2
    while (await state(broker)).ready:
        batch = await consumer.take(100)
        await consumer.ack(batch)
        handled += len(batch)
    assert handled == count
