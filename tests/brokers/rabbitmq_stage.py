"""What the tests of RabbitMQ are written with.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses: `url = stage.url`.
"""

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any, TypeVar
from uuid import uuid4

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Consumer, Delivery, Outgoing, publish_all
from oraculo.ports.broker_admin import DeadLetter, QueueState
from oraculo.wire.naming import dlq_of
from tests.servers.fleet import Fleet

Seen = TypeVar("Seen")

PATIENCE = 20.0
DELAYS = (100, 500, 1000, 60000)  # that the tests ask for, in milliseconds


@pytest.fixture(autouse=True)
def nothing_goes_unheard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio tells in the log of exceptions that nobody took, also of those inside pika."""
    yield
    gc.collect(1)
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    told = [record for record in records if record.name == "asyncio" and record.threadName != "proxy"]
    assert [record.getMessage() for record in told] == []


@pytest.fixture
def url(fleet: Fleet) -> str:
    return fleet.url("rabbitmq")


@pytest.fixture
def queue(url: str) -> Iterator[str]:
    name = fresh_name()
    yield name
    forget(url, [name])


@pytest.fixture
async def broker(url: str) -> AsyncIterator[RabbitMQBroker]:
    async with running(url) as broker:
        yield broker


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[RabbitMQBroker]:
    broker = RabbitMQBroker(url, **options)
    try:
        await broker.start()
        yield broker
    finally:
        await broker.close()


@contextmanager
def plain_channel(url: str) -> Iterator[BlockingChannel]:
    """What a worker with no SDK has: pika's blocking channel."""
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def forget(url: str, queues: Sequence[str]) -> None:
    with plain_channel(url) as channel:
        for queue in queues:
            for name in (queue, dlq_of(queue), *[f"{queue}.retry.{delay}" for delay in DELAYS]):
                channel.queue_delete(name)


def fresh_name() -> str:
    return f"rabbit-{uuid4().hex}"


def messages(queue: str, count: int) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % n) for n in range(count)]


def bodies(deliveries: Sequence[Delivery] | Sequence[DeadLetter]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


async def take(consumer: Consumer, count: int) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            taken += await consumer.take(count - len(taken))
    return taken


async def published(broker: Broker, batch: Sequence[Outgoing]) -> None:
    """Publishes as one does who expects trouble: again until it works, which may make duplicates."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            await publish_all(broker, batch)
            return
        except BrokerUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def subscribed(broker: Broker, queue: str, prefetch: int = 100) -> Consumer:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await broker.consume(queue, prefetch=prefetch)
        except BrokerUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def eventually(look: Callable[[], Awaitable[Seen]], accept: Callable[[Seen], bool]) -> Seen:
    deadline = time.monotonic() + PATIENCE
    while not accept(seen := await look()):
        assert time.monotonic() < deadline, f"still {seen} after {PATIENCE} s"
        await asyncio.sleep(0.01)
    return seen


async def already(value: Seen) -> Seen:
    """For `eventually`, which awaits what it looks at."""
    return value


async def state(broker: Broker, queue: str) -> QueueState:
    (found,) = await broker.queues([queue])
    return found


async def letters(broker: Broker, queue: str, count: int) -> Sequence[DeadLetter]:
    return await eventually(lambda: broker.dead_letters(queue, limit=count + 1), lambda found: len(found) == count)


def trouble(broker: Broker) -> str:
    (link,) = broker.statuses()
    return link.trouble or ""


def silent_server() -> socket.socket:
    """It listens, and nobody is there: a client is connected, and hears nothing."""
    return socket.create_server(("127.0.0.1", 0))


async def assert_nothing_is_left() -> None:
    """No task of a broker that closed or gave up; what is cancelled needs a turn of the loop to end."""
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
