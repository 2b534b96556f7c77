"""What the tests of NATS are written with.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses: `url = stage.url`.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import nats
import pytest

from oraculo.brokers.nats import NatsBroker
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Consumer, Delivery, Outgoing
from oraculo.ports.broker_admin import DeadLetter
from tests.servers.fleet import Fleet
from tests.servers.nats import Nats

Seen = TypeVar("Seen")

PATIENCE = 15.0
PROMPT = 4.0  # seconds; a default lease has 60


class BareNats(Nats):
    """With lines of its own in the configuration."""

    def __init__(self, *lines: str, jetstream: bool = True, limits: str = "", storage: str = "1TB") -> None:
        super().__init__()
        self._lines = lines
        self._jetstream = jetstream
        self._limits = limits  # of JetStream
        self._storage = storage
        self.tag = ""  # by which streams are placed on it

    def _configuration(self) -> list[str]:
        usual = [line for line in super()._configuration() if self._jetstream or "jetstream" not in line]
        bounds = f"limits {{ {self._limits} }}, max_file_store: {self._storage}"
        usual = [line.replace("jetstream {", f"jetstream {{ {bounds},") for line in usual]
        return [*usual, *self._lines]

    def restart_with(self, *lines: str, jetstream: bool = True) -> None:
        self.kill()
        self._lines, self._jetstream = lines, jetstream
        self.start()


@pytest.fixture
def url(fleet: Fleet) -> str:
    return fleet.url("nats")


@pytest.fixture
def queue() -> str:
    return f"own-{uuid.uuid4().hex}"


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[NatsBroker]:
    broker = NatsBroker(url, **options)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def plain_client(url: str) -> AsyncIterator[Any]:
    """Somebody who knows nothing of us."""
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def api(client: Any, verb: str, what: Any = None) -> dict[str, Any]:
    reply = await client.request(f"$JS.API.{verb}", json.dumps(what).encode() if what else b"", timeout=5)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


def numbered(queue: str, count: int) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % number) for number in range(count)]


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


async def take(consumer: Consumer, count: int, within: float = PATIENCE) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(within):
        while len(taken) < count:
            taken += await consumer.take(count - len(taken))
    return taken


async def drain(consumer: Consumer) -> None:
    """Takes and never settles."""
    while await consumer.take(10):
        pass


async def eventually(look: Callable[[], Awaitable[Seen]]) -> Seen:
    """What it sees, once it sees something."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while not (seen := await look()):
        assert loop.time() < deadline, f"still {seen!r} after {PATIENCE} s"
        await asyncio.sleep(0.005)
    return seen


async def is_empty(broker: Broker, queue: str) -> bool:
    (state,) = await broker.queues([queue])
    return (state.ready, state.unacked) == (0, 0)


async def ready(broker: Broker, queue: str, count: int) -> bool:
    (state,) = await broker.queues([queue])
    return state.ready + state.unacked == count


async def have_letters(broker: Broker, queue: str, count: int) -> Sequence[DeadLetter]:
    letters = await broker.dead_letters(queue, limit=count + 1)
    return letters if len(letters) == count else ()


async def stays_quiet(consumer: Consumer, seconds: float = 0.3) -> None:
    taking = asyncio.create_task(consumer.take(1))
    await asyncio.wait({taking}, timeout=seconds)
    assert not taking.done(), f"{taking.result()} came"
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)


async def assert_fails_soon(call: Awaitable[object], within: float) -> str:
    """It raises BrokerUnavailable, with words, in that time."""
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        async with asyncio.timeout(within + 5):
            await call
    assert time.monotonic() - started < within, f"it took {time.monotonic() - started:.1f} s"
    return str(caught.value)
