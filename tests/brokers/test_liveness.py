"""Proof of life: a deaf consumer is found out, made again, and told of; a hearing one is left in peace."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from oraculo.brokers.liveness import CANARY, UNPROVEN_ROUNDS, LivenessBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, ConsumerDoubted, Delivery, Outgoing, Receipt, publish_all
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import ConsumerRebuilt, Record
from oraculo.testing.broker_suite import BrokerSuite
from oraculo.testing.simulation.virtual_time import VirtualClock, VirtualLoop
from oraculo.wire.message import decode_message
from tests.waiting import until


class Deafening(MemoryBroker):
    """Its consumers can be made deaf: connected, and nothing comes."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.is_deaf = False
        self.made = 0

    async def consume(self, queue: str, *, prefetch: int) -> MemoryConsumer:
        self.made += 1
        consumer = await super().consume(queue, prefetch=prefetch)
        if self.is_deaf:
            hearing = consumer._pull
            consumer._pull = lambda limit: [] if self.is_deaf else hearing(limit)  # type: ignore[method-assign]
        return consumer


class Told:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)


class TestVigilantBroker(BrokerSuite):
    async def make_broker(self) -> Broker:
        memory = MemoryBroker(SystemClock(), delivery_limit=self.delivery_limit)
        return LivenessBroker(memory, SystemClock(), Told(), silence=0.05, patience=0.05)


Watched = tuple[LivenessBroker, Deafening, Told]


@asynccontextmanager
async def watched(*own: str) -> AsyncIterator[Watched]:
    memory, told = Deafening(), Told()
    broker = LivenessBroker(memory, SystemClock(), told, own_queues=own, silence=0.02, patience=0.05)
    await broker.start()
    yield broker, memory, told
    await broker.close()


async def keep_taking(broker: Broker, queue: str, taken: list[Delivery]) -> None:
    """As the engine and the workers do: subscribes again whenever the consumer is lost."""
    while True:
        consumer = await broker.consume(queue, prefetch=10)
        try:
            while deliveries := await consumer.take(10):
                taken += deliveries
                await consumer.ack(deliveries)
            return
        except BrokerUnavailable:
            await consumer.close()


def deaf(broker: Broker) -> Sequence[str]:
    return [queue for link in broker.statuses() for queue in link.deaf]


def test_a_canary_is_a_message_that_anybody_can_read() -> None:
    assert decode_message(CANARY).tipo_evento == "canario"


@pytest.mark.parametrize("own", [("q",), ()])
async def test_a_deaf_consumer_is_made_again_and_the_queue_is_told_until_it_hears(own: Sequence[str]) -> None:
    async with watched(*own) as (broker, memory, told):
        memory.is_deaf = True
        taken: list[Delivery] = []
        taking = asyncio.create_task(keep_taking(broker, "q", taken))
        await publish_all(broker, [Outgoing("q", b"unheard")])
        await until(lambda: memory.made >= 3, saying="it is made again")
        assert deaf(broker) == ["q"]
        assert taken == []
        memory.is_deaf = False
        await until(lambda: [delivery.body for delivery in taken] == [b"unheard"])
        assert deaf(broker) == []
        rebuilt = [record for record in told.records if isinstance(record, ConsumerRebuilt)]
        assert len(rebuilt) >= 2
        assert rebuilt[0].queue == "q"
        assert "messages wait" in rebuilt[0].reason
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


@pytest.mark.parametrize("how", ["ack", "retry", "dead_letter", "dead_letter_all"])
async def test_however_its_last_message_was_settled_a_deaf_consumer_is_found_out(how: str) -> None:
    async with watched() as (broker, memory, _):
        memory.is_deaf = True
        consumer = await broker.consume("q", prefetch=1)
        memory.is_deaf = False
        await publish_all(broker, [Outgoing("q", b"heard")])
        [heard] = await consumer.take(1)
        memory.is_deaf = True
        await {
            "ack": lambda: consumer.ack([heard]),
            "retry": lambda: consumer.retry(heard, 0.0, "again"),
            "dead_letter": lambda: consumer.dead_letter(heard, "bad"),
            "dead_letter_all": lambda: consumer.dead_letter_all([(heard, "bad")]),
        }[how]()
        await publish_all(broker, [Outgoing("q", b"unheard")])
        with pytest.raises(BrokerUnavailable):
            await asyncio.wait_for(consumer.take(1), 5)


async def test_a_queue_is_told_no_more_when_another_took_what_was_not_heard() -> None:
    """It may be idle from then on, and the process would never be ready again."""
    async with watched() as (broker, memory, _):
        memory.is_deaf = True
        taking = asyncio.create_task(keep_taking(broker, "q", []))
        await publish_all(broker, [Outgoing("q", b"unheard")])
        await until(lambda: deaf(broker) == ["q"])
        other = await MemoryBroker.consume(memory, "q", prefetch=1)
        await other.ack(await other.take(1))
        await other.close()
        await until(lambda: deaf(broker) == [])
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def test_a_deaf_consumer_is_closed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner hears of it at the first moment of the closing, and closes it too: the server would go on giving
    messages to one that is half closed."""
    closed = asyncio.Event()

    async def close(self: MemoryConsumer) -> None:
        if self._closed:
            return
        await plain_close(self)  # the take ends
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closed.set()

    plain_close = MemoryConsumer.close
    monkeypatch.setattr(MemoryConsumer, "close", close)
    async with watched("q") as (broker, memory, _):
        memory.is_deaf = True
        consumer = await broker.consume("q", prefetch=10)
        with pytest.raises(BrokerUnavailable) as proven:
            await consumer.take(10)
        assert not isinstance(proven.value, ConsumerDoubted)
        await consumer.close()
        assert closed.is_set()


async def test_a_deaf_consumer_of_an_own_queue_is_found_out_though_nothing_waits() -> None:
    async with watched("q") as (broker, memory, _):
        memory.is_deaf = True
        taking = asyncio.create_task(keep_taking(broker, "q", []))
        await until(lambda: deaf(broker) == ["q"], saying="the canary shows it")
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def test_canaries_are_never_handed_out_and_leave_nothing_behind() -> None:
    async with watched("q") as (broker, memory, told):
        taken: list[Delivery] = []
        taking = asyncio.create_task(keep_taking(broker, "q", taken))
        published = 0
        original = memory.publish

        async def count(messages: Sequence[Outgoing]) -> str:
            nonlocal published
            published += sum(message.body == CANARY for message in messages)
            return await original(messages)

        memory.publish = count  # type: ignore[method-assign]
        await until(lambda: published >= 5, saying="canaries are sent")
        await publish_all(broker, [Outgoing("q", b"one"), Outgoing("q", CANARY), Outgoing("q", b"two")])
        await until(lambda: len(taken) == 2)
        assert [delivery.body for delivery in taken] == [b"one", b"two"]
        assert memory.made == 1, "a consumer that hears is left in peace"
        assert not told.records
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def test_no_canary_is_sent_where_plain_workers_may_listen() -> None:
    async with watched() as (broker, memory, _):
        await broker.declare(["q"])
        consumer = await broker.consume("q", prefetch=10)
        taking = asyncio.create_task(consumer.take(10))
        await asyncio.wait({taking}, timeout=0.5)
        assert all(state.ready + state.unacked == 0 for state in await memory.queues(["q"]))
        assert not taking.done()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def test_a_consumer_whose_canaries_others_take_is_made_again_without_alarm() -> None:
    async with watched("q") as (broker, memory, told):
        other = await memory.consume("q", prefetch=100)

        async def snatch() -> None:
            while deliveries := await other.take(100):
                await other.ack(deliveries)

        snatching = asyncio.create_task(snatch())
        memory.is_deaf = True
        consumer = await broker.consume("q", prefetch=10)
        with pytest.raises(ConsumerDoubted, match="is made again"):
            async with asyncio.timeout(10 * UNPROVEN_ROUNDS):
                await consumer.take(10)
        assert deaf(broker) == []
        assert not told.records
        await other.close()
        await snatching


async def test_a_consumer_that_is_full_needs_no_proof() -> None:
    async with watched("q") as (broker, memory, told):
        consumer = await broker.consume("q", prefetch=1)
        await publish_all(broker, [Outgoing("q", b"held"), Outgoing("q", b"waits")])
        [held] = await consumer.take(1)
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({taking}, timeout=0.5)
        assert not taking.done()
        assert not told.records
        await consumer.ack([held])
        [waited] = await taking
        assert waited.body == b"waits"
        assert memory.made == 1


async def test_a_broker_that_is_away_is_not_deafness() -> None:
    async with watched("q") as (broker, memory, told):
        consumer = await broker.consume("q", prefetch=1)

        async def refuse(_messages: Sequence[Outgoing]) -> str:
            raise BrokerUnavailable("away")

        memory.publish = refuse  # type: ignore[method-assign]
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({taking}, timeout=0.5)
        assert not taking.done()
        assert deaf(broker) == []
        assert not told.records
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def test_a_consumer_that_nobody_listens_to_is_not_called_deaf() -> None:
    """As when a worker is busy with what another broker brought: silence proves nothing then."""
    async with watched() as (broker, memory, told):
        consumer = await broker.consume("q", prefetch=10)
        await publish_all(broker, [Outgoing("q", b"waits")])
        await asyncio.sleep(0.5)  # many times the silence and the patience
        assert not told.records
        assert memory.made == 1
        assert [delivery.body for delivery in await consumer.take(10)] == [b"waits"]


def test_a_canary_comes_when_the_silence_has_lasted_whenever_it_began() -> None:
    """Not at the end of a whole such time behind the one in which something was heard: others count on it."""
    loop = VirtualLoop()
    canaries: list[float] = []

    class Noting(MemoryBroker):
        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            canaries.extend(loop.time() for message in messages if message.body == CANARY)
            return await super().publish(messages)

    async def watch() -> None:
        memory = Noting(VirtualClock(loop))
        broker = LivenessBroker(memory, VirtualClock(loop), Told(), own_queues=["q"], silence=15.0)
        await broker.start()
        consumer = await broker.consume("q", prefetch=5)

        async def keep_taking() -> None:
            while deliveries := await consumer.take(5):
                await consumer.ack(deliveries)

        taking = asyncio.create_task(keep_taking())
        for moment in (1.0, 14.0, 16.0):
            await asyncio.sleep(moment - loop.time())
            await publish_all(memory, [Outgoing("q", b"something")])
        await asyncio.sleep(50.0 - loop.time())
        await broker.close()
        await taking

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(watch())
    assert len(canaries) == 2
    assert 31.0 <= canaries[0] <= 33.0
    assert 46.0 <= canaries[1] <= 50.0
