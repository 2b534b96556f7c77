"""What the tests of Redis Streams are written with.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses: `url = stage.url`.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.brokers.redis_streams.consumer import RedisConsumer
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Delivery, Outgoing
from oraculo.ports.broker_admin import QueueState
from tests.servers.fleet import Fleet
from tests.servers.process import Server

LEASE = 0.4  # where a test waits for one to run out
PATIENCE = 15.0
PROMPTLY = 6.0  # on a busy machine; without what is tested it would be the lease of a minute, or never
ENDS = ("", ".dlq", ":delayed")


@pytest.fixture
def url(fleet: Fleet) -> str:
    return fleet.url("redis")


@pytest.fixture
def plain(url: str) -> Iterator[Any]:
    """A client that knows nothing of ORÁCULO."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
def queue(plain: Any) -> Iterator[str]:
    name = fresh_name()
    yield name
    plain.delete(*(name + end for end in ENDS))


@pytest.fixture
def server(fleet: Fleet) -> Iterator[Server]:
    """One that may be killed, frozen or flushed."""
    server = fleet.breakable("redis")
    yield server
    if server.is_running:
        server.thaw()


@asynccontextmanager
async def started(url: str, **options: Any) -> AsyncIterator[RedisStreamsBroker]:
    broker = RedisStreamsBroker(url, **options)
    try:
        await broker.start()
        yield broker
    finally:
        await broker.close()


def fresh_name() -> str:
    return f"test-{uuid.uuid4().hex}"


def messages(queue: str, count: int) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % number) for number in range(count)]


def bodies(deliveries: Sequence[Delivery]) -> list[int]:
    return [int(delivery.body) for delivery in deliveries]


async def take(consumer: RedisConsumer, count: int, *, within: float = PATIENCE) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(within):
        while len(taken) < count:
            taken += await consumer.take(count - len(taken))
    return taken


async def waiting(consumer: RedisConsumer) -> "asyncio.Task[Sequence[Delivery]]":
    """A take that waits on the server by now."""
    taking = asyncio.create_task(consumer.take(10))
    await asyncio.wait({taking}, timeout=0.1)
    assert not taking.done()
    return taking


async def seconds_of(call: Awaitable[object]) -> tuple[float, BaseException | None]:
    """How long it took, and what it raised."""
    began = asyncio.get_running_loop().time()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    return asyncio.get_running_loop().time() - began, outcome if isinstance(outcome, BaseException) else None


def succeeds(call: Callable[[], Awaitable[object]]) -> Callable[[], Any]:
    async def attempt() -> bool:
        try:
            await call()
        except BrokerUnavailable:
            return False
        return True

    return attempt


async def state(broker: RedisStreamsBroker, queue: str) -> QueueState:
    (found,) = await broker.queues([queue])
    return found


def shows(broker: RedisStreamsBroker, queue: str, **expected: int) -> Callable[[], Any]:
    async def look() -> bool:
        found = await state(broker, queue)
        return all(getattr(found, name) == value for name, value in expected.items())

    return look


def read_plain(plain: Any, queue: str, *, count: int = 10) -> Any:
    """As a worker without the SDK does."""
    found = plain.xreadgroup(queue, "plain", {queue: ">"}, count=count)
    return [(name, entries) for name, entries in (found.items() if isinstance(found, dict) else found)]


def idle_times(plain: Any, queue: str) -> list[int]:
    """Of its consumers, in ms; of one that is not there, none."""
    try:
        return [each["idle"] for each in plain.xinfo_consumers(queue, queue)] or [0]
    except redis.ResponseError:
        return [0]


def own_consumers(plain: Any, queue: str) -> list[str]:
    return [each["name"].decode() for each in plain.xinfo_consumers(queue, queue)]
