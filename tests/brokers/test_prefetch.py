"""A consumer asks for so many messages that what it holds stays bounded in bytes."""

import asyncio

import pytest

from oraculo.brokers import prefetch
from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.prefetch import FIRST, Prefetch
from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.ports.broker import Broker, Consumer, Delivery, Outgoing, publish_all
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.rabbitmq_stage import fresh_name, take
from tests.servers.fleet import Fleet

url, queue, broker, nothing_goes_unheard = stage.url, stage.queue, stage.broker, stage.nothing_goes_unheard  # fixtures

MOST = 1_000_000
LARGE, MEDIUM, SMALL = b"x" * 250_000, b"x" * (MOST // FIRST), b"x" * 100


@pytest.fixture(autouse=True)
def _small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MOST_BYTES", MOST)


def add(asks: Prefetch, count: int, size: int) -> None:
    for _ in range(count):
        asks.add(len(asks), size)
        asks.adapt()


def test_it_begins_with_few_and_asks_for_more_while_messages_are_small() -> None:
    asks = Prefetch(2000)
    assert asks.asked == FIRST
    add(asks, 2000, 100)
    assert asks.asked == 2000


def test_it_never_asks_for_more_than_it_may() -> None:
    asks = Prefetch(5)
    assert asks.asked == 5
    add(asks, 5, 100)
    assert asks.asked == 5


def test_large_messages_make_it_ask_for_as_many_as_fit() -> None:
    asks = Prefetch(2000)
    add(asks, 3, 250_000)
    assert asks.asked == 4
    add(asks, 1, 5 * MOST)
    assert asks.asked == 1


def test_it_asks_for_more_again_after_large_messages() -> None:
    asks = Prefetch(2000)
    add(asks, 1, MOST)
    assert asks.asked == 1
    add(asks, 1000, 100)
    assert asks.asked == 2000


def test_it_does_not_ask_for_more_while_it_has_all_that_there_is() -> None:
    asks = Prefetch(2000)
    for number in range(1000):
        asks.add(number, 100)
        asks.remove(number)
        asks.adapt()
    assert asks.asked == FIRST


async def held_when_quiet(consumer: Consumer) -> list[Delivery]:
    """Take without settling anything, until nothing comes any more."""
    held: list[Delivery] = []
    try:
        while True:
            held += await asyncio.wait_for(consumer.take(1000), 1.0)
    except TimeoutError:
        return held


async def test_rabbitmq_is_asked_for_few_large_messages_at_a_time(broker: RabbitMQBroker, queue: str) -> None:
    await publish_all(broker, [Outgoing(queue, LARGE)] * 60)
    consumer = await broker.consume(queue, prefetch=2000)
    seen = 0
    while seen < 60:
        held = await take(consumer, 1)
        held += await held_when_quiet(consumer) if seen < 20 else ()
        assert sum(len(each.body) for each in held) <= FIRST * len(LARGE)
        seen += len(held)
        await consumer.ack(held)


@pytest.mark.parametrize("name", ["redis", "nats"])
async def test_redis_and_nats_are_asked_for_few_large_messages_at_a_time(fleet: Fleet, name: str) -> None:
    made: Broker = NatsBroker(fleet.url(name)) if name == "nats" else RedisStreamsBroker(fleet.url(name))
    queue = fresh_name()
    await made.start()
    try:
        await made.publish([Outgoing(queue, LARGE)] * 60)
        consumer = await made.consume(queue, prefetch=2000)
        held = await held_when_quiet(consumer)
        assert sum(len(each.body) for each in held) <= FIRST * len(LARGE)
        await consumer.ack(held)
        held = await held_when_quiet(consumer)
        assert 0 < sum(len(each.body) for each in held) <= MOST
        await made.remove([queue])
    finally:
        await made.close()


async def test_large_messages_behind_many_small_ones_are_given_back_to_rabbitmq(
    broker: RabbitMQBroker, queue: str
) -> None:
    """The server had sent them already, as many as there were small ones."""
    await publish_all(broker, [Outgoing(queue, SMALL)] * 1000)
    await publish_all(broker, [Outgoing(queue, LARGE)] * 60)
    consumer = await broker.consume(queue, prefetch=2000)
    await consumer.ack(await take(consumer, 1000))
    held = await held_when_quiet(consumer)
    assert sum(len(each.body) for each in held) <= 3 * MOST + len(LARGE)  # by the old subscription, and by the new
    count = 0
    while held:
        count += len(held)
        await consumer.ack(held)
        held = list(await consumer.take(100)) if count < 60 else []
    assert count == 60


async def test_rabbitmq_is_asked_for_few_again_once_nothing_comes(broker: RabbitMQBroker, queue: str) -> None:
    await publish_all(broker, [Outgoing(queue, SMALL)] * 1000)
    consumer = await broker.consume(queue, prefetch=2000)
    await consumer.ack(await take(consumer, 1000))
    await asyncio.sleep(1.5)
    await publish_all(broker, [Outgoing(queue, MEDIUM)] * 60)
    held = await held_when_quiet(consumer)
    assert {each.redeliveries for each in held} == {0}
    assert len(held) == FIRST
