"""What the tests of the fail-over share.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses: `url = stage.url`.
"""

from collections.abc import AsyncIterator, Sequence

import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.errors import BrokerError, BrokerUnavailable, QueueFull
from oraculo.ports.broker import Broker, BrokerStatus, Delivery, Outgoing, Receipt
from oraculo.ports.clock import SystemClock


class Named(MemoryBroker):
    """A broker that can be pulled out and put back. It forgets nothing meanwhile, as a durable one would."""

    def __init__(self, name: str, delivery_limit: int = 20, lease: float | None = None) -> None:
        super().__init__(SystemClock(), delivery_limit=delivery_limit, lease=lease)
        self._name = name
        self.starts = 0
        self.away: str | None = None

    @property
    def name(self) -> str:
        return self._name

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus(self._name, self.away)]

    async def start(self) -> None:
        self.starts += 1
        self._expect_here()
        await super().start()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self._expect_here()
        return await super().publish(messages)

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        self._expect_here()
        return await super().consume(queue, prefetch=prefetch)

    async def check(self) -> str:
        self._expect_here()
        return await super().check()

    def _expect_here(self) -> None:
        if self.away is not None:
            raise BrokerUnavailable(self.away)

    async def leave(self) -> None:
        """Its consumers are lost, and nobody can reach it."""
        self.away = "pulled out"
        await self.lose_consumers()

    async def lose_consumers(self) -> None:
        assert self._server is not None
        for queue in list(self._server.queues.values()):
            for consumer in list(queue.consumers):
                await consumer.close()

    def come_back(self) -> None:
        self.away = None


class Refusing(Named):
    """Says no to whatever is about these queues, while it can be reached."""

    refused: frozenset[str] = frozenset()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self._refuse(*(message.queue for message in messages))
        return await super().publish(messages)

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        self._refuse(queue)
        return await super().consume(queue, prefetch=prefetch)

    async def declare(self, queues: Sequence[str]) -> None:
        self._refuse(*queues)
        await super().declare(queues)

    def _refuse(self, *queues: str) -> None:
        if self.refused & set(queues):
            raise BrokerError("not allowed")


class Crammed(Named):
    """It has no room for dead letters."""

    is_crammed = True

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        consumer = await super().consume(queue, prefetch=prefetch)
        bury = consumer.dead_letter

        async def dead_letter_all(letters: Sequence[tuple[Delivery, str]]) -> None:
            if self.is_crammed:
                raise QueueFull("no room for dead letters")
            for delivery, reason in letters:
                await bury(delivery, reason)

        consumer.dead_letter = lambda delivery, reason: dead_letter_all([(delivery, reason)])
        consumer.dead_letter_all = dead_letter_all
        return consumer


class Unreadable(Named):
    """Whoever subscribes may do so, and not read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.forbidden: str | None = "not permitted"
        self.refusals = 0

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        consumer = await super().consume(queue, prefetch=prefetch)
        take = consumer.take

        async def take_if_permitted(limit: int) -> Sequence[Delivery]:
            if self.forbidden is not None:
                self.refusals += 1
                raise BrokerError(self.forbidden)
            return await take(limit)

        consumer.take = take_if_permitted
        return consumer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("broker.PROBE_PAUSE", "broker.LONGEST_PROBE_PAUSE", "broker.PULSE", "consumer.FAILED_PAUSE"):
        monkeypatch.setattr(f"oraculo.brokers.failover.{name}", 0.02)
    monkeypatch.setattr("oraculo.core.queue_health._SHOWN_FOR", 0.5)


@pytest.fixture
async def two() -> AsyncIterator[tuple[FailoverBroker, Named, Named]]:
    first, second = Named("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    yield both, first, second
    await both.close()


Two = tuple[FailoverBroker, Named, Named]


def troubles(broker: Broker) -> dict[str, str | None]:
    return {link.name: link.trouble for link in broker.statuses()}
