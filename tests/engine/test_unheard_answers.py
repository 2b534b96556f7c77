"""An API beside engines looks whether anybody hears the answers: an engine may live, and use other queues."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from oraculo.bootstrap import make_broker
from oraculo.engine.queues import unheard_answers
from oraculo.engine.queues.unheard_answers import UnheardAnswers
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Outgoing, publish_all
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock
from oraculo.settings import BrokerSettings, Settings
from tests.servers.fleet import Fleet
from tests.servers.rabbitmq import RabbitMQ, suspended
from tests.waiting import until

SEE = "see whether the engines have the same ORACULO_BROKER_URL and ORACULO_PREFIX, or why by their own /health/ready"
QUEUE = "x.resultados"
Look = QueueState | Exception | None


class Seen:
    """A broker that is seen in one state after the other."""

    def __init__(self, *looks: Look) -> None:
        self._looks = list(looks)

    async def queues(self, names: Sequence[str]) -> Sequence[QueueState]:
        assert list(names) == [QUEUE]
        look = self._looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return [] if look is None else [look]


def state(ready: int, unacked: int | None, consumers: int | None, **at: QueueState) -> QueueState:
    return QueueState(QUEUE, ready, unacked, 0, consumers, at=at)


async def told(*looks: Look) -> list[str | None]:
    broker: Any = Seen(*looks)
    unheard, troubles = UnheardAnswers(broker, QUEUE), list[str | None]()
    for _ in looks:
        await unheard.look()
        troubles.append(unheard.trouble)
    return troubles


UNHEARD = state(1, 0, 0)
HEARD = state(5, 0, 1)
UNSURE = state(2, 0, None)


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (UNHEARD, f"1 message waits in queue {QUEUE}, where answers come, and nobody listens: {SEE}"),
        (state(2, None, 0), f"2 messages wait in queue {QUEUE}, where answers come, and nobody listens: {SEE}"),
        (state(2, 7, 0), f"2 messages wait in queue {QUEUE}, where answers come, and nobody listens: {SEE}"),
        (UNSURE, f"2 messages wait in queue {QUEUE}, where answers come, and nobody seems to take them: {SEE}"),
        (
            state(1, 0, None),
            f"1 message waits in queue {QUEUE}, where answers come, and nobody seems to take it: {SEE}",
        ),
        (
            QueueState(QUEUE, 3, 0, 0, 0, delayed=2),
            f"1 message waits in queue {QUEUE}, where answers come, and nobody listens: {SEE}",
        ),
        (QueueState(QUEUE, 3, 0, 0, 0, delayed=3), None),
        (HEARD, None),
        (state(0, 0, 0), None),  # as RabbitMQ tells of a queue without a leader
        (state(2, 1, None), None),  # somebody took one
        (state(2, None, None), None),  # perhaps
        (state(0, 0, None), None),
        (None, None),
        (BrokerUnavailable("away"), None),
        (TimeoutError(), None),
    ],
)
async def test_what_was_so_three_times_in_a_row_is_told(look: Look, why: str | None) -> None:
    assert await told(*[look] * 4) == [None, None, why, why]


@pytest.mark.parametrize("between", [HEARD, None, BrokerUnavailable("away"), state(0, 0, 0)])
async def test_what_is_so_for_a_moment_is_not(between: Look) -> None:
    assert await told(UNHEARD, UNHEARD, between, UNHEARD, UNHEARD, between) == [None] * 6
    assert (await told(UNHEARD, UNHEARD, UNHEARD, between))[-1] is None


async def test_of_several_brokers_those_are_named_where_it_is_so() -> None:
    each = state(7, 0, 1, rabbitmq=HEARD, redis=UNHEARD, nats=UNSURE)
    fewer = state(6, 0, 1, rabbitmq=HEARD, redis=UNHEARD)
    redis = f"1 message waits in queue {QUEUE} at broker redis, where answers come, and nobody listens"
    nats = f"2 messages wait in queue {QUEUE} at broker nats, where answers come, and nobody seems to take them"
    assert await told(fewer, each, each, each) == [None, None, f"{redis}: {SEE}", f"{redis}; {nats}: {SEE}"]


async def test_a_broker_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unheard_answers, "_PATIENCE", 0.01)

    class Silent:
        queues = staticmethod(lambda _: asyncio.Event().wait())

    broker: Any = Silent()
    unheard = UnheardAnswers(broker, QUEUE)
    async with asyncio.timeout(5):
        await unheard.look()
    assert unheard.trouble is None


async def test_what_is_no_longer_looked_at_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unheard_answers, "_EVERY", 0.0)
    broker: Any = Seen(UNHEARD, UNHEARD, UNHEARD, KeyError("a fault of the adapter"))
    unheard = UnheardAnswers(broker, QUEUE)
    with pytest.raises(KeyError):
        await unheard.run()
    assert unheard.trouble is None


# -- as the brokers themselves tell ----------------------------------------------------------------------------------


async def looked(unheard: UnheardAnswers) -> str | None:
    for _ in range(3):
        await unheard.look()
    return unheard.trouble


@asynccontextmanager
async def started(*urls: str) -> AsyncIterator[Broker]:
    broker = make_broker(Settings(broker=BrokerSettings(url=",".join(urls))), SystemClock())
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()


@pytest.fixture
def queue() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.mark.parametrize("kind", ["rabbitmq", "redis", "nats"])
async def test_it_is_told_of_each_broker_until_somebody_takes_them(fleet: Fleet, kind: str, queue: str) -> None:
    async with started(fleet.url(kind)) as broker:
        unheard = UnheardAnswers(broker, queue)
        assert await looked(unheard) is None, "there is no such queue"
        await broker.declare([queue])
        assert await looked(unheard) is None, "nothing is there"
        await publish_all(broker, [Outgoing(queue, b"an answer")])
        nobody = "nobody seems to take it" if kind == "nats" else "nobody listens"
        expected = f"1 message waits in queue {queue}, where answers come, and {nobody}: {SEE}"
        assert await until(lambda: looked(unheard)) == expected
        consumer = await broker.consume(queue, prefetch=1)
        held = await consumer.take(1)
        await publish_all(broker, [Outgoing(queue, b"one that waits until there is room for it")])
        assert await looked(unheard) is None
        await consumer.ack(held)
        await consumer.ack(await consumer.take(1))
        assert await looked(unheard) is None
        await consumer.close()
        await broker.remove([queue])


async def test_a_queue_without_a_leader_is_not_told_as_unheard(fleet: Fleet, queue: str) -> None:
    """RabbitMQ says that nobody listens there, and somebody does."""
    server = cast("RabbitMQ", fleet.server("rabbitmq"))
    async with started(server.url) as broker:
        await broker.declare([queue])
        await publish_all(broker, [Outgoing(queue, b"held"), Outgoing(queue, b"waiting")])
        consumer = await broker.consume(queue, prefetch=1)
        await consumer.take(1)
        async with suspended(server, queue):
            (seen,) = await broker.queues([queue])
            assert seen.consumers == 0
            assert await looked(UnheardAnswers(broker, queue)) is None


async def test_of_two_brokers_the_one_is_named(fleet: Fleet, queue: str) -> None:
    async with started(fleet.url("redis"), fleet.url("nats")) as both, started(fleet.url("nats")) as nats:
        await both.declare([queue])
        consumer = await nats.consume(queue, prefetch=1)
        await publish_all(both, [Outgoing(queue, b"an answer", prefer="redis")])
        assert await until(lambda: looked(UnheardAnswers(both, queue))) == (
            f"1 message waits in queue {queue} at broker redis, where answers come, and nobody listens: {SEE}"
        )
        await consumer.close()
        await both.remove([queue])
