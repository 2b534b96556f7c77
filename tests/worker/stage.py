"""A broker to watch and to break, and the few verbs the tests speak with it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Delivery, Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.settings import WorkerSettings
from oraculo.wire.message import Message, decode_message, encode_message
from oraculo.wire.timestamps import to_iso
from oraculo.worker import App, Worker
from tests.receipts import publish_but

NOW = 1_760_000_000.0


class FixedClock:
    def __init__(self, now: float = NOW) -> None:
        self.time = now

    def now(self) -> float:
        return self.time


class WatchedConsumer:
    """A memory consumer that tells what is done with it and fails when it is asked to."""

    def __init__(self, inner: MemoryConsumer, broker: "WatchedBroker") -> None:
        self._inner = inner
        self._broker = broker

    async def take(self, limit: int) -> Sequence[Delivery]:
        self._broker.fail_if_due("take")
        deliveries = await self._inner.take(limit)
        self._broker.delivered.put_nowait(list(deliveries))
        return deliveries

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._broker.fail_if_due("ack")
        await self._inner.ack(deliveries)
        self._broker.acked.put_nowait(list(deliveries))

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        await self._inner.retry(delivery, delay, reason)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        self._broker.fail_if_due("dead_letter")
        await self._inner.dead_letter(delivery, reason)
        self._broker.buried.put_nowait(reason)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self._broker.extended.put_nowait([each.token for each in deliveries])
        self._broker.fail_if_due("extend")
        await self._inner.extend(deliveries)

    async def close(self) -> None:
        await self._inner.close()


class WatchedBroker(MemoryBroker):
    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.failures: dict[str, list[Exception]] = {}
        self.batches: list[list[Outgoing]] = []
        self.delivered: asyncio.Queue[list[Delivery]] = asyncio.Queue()
        self.acked: asyncio.Queue[list[Delivery]] = asyncio.Queue()
        self.extended: asyncio.Queue[list[int | str]] = asyncio.Queue()
        self.buried: asyncio.Queue[str] = asyncio.Queue()
        self.consumed: list[tuple[str, int]] = []
        self.refuses: Callable[[Outgoing], Exception | None] = lambda message: None

    def fail(self, call: str, *errors: Exception) -> None:
        """The next calls of that name raise these, one after the other."""
        self.failures.setdefault(call, []).extend(errors)

    def fail_if_due(self, call: str) -> None:
        if self.failures.get(call):
            raise self.failures[call].pop(0)

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self.fail_if_due("publish")
        receipts = await publish_but(super().publish, messages, self._refusal)
        self.batches.append([one for one, receipt in zip(messages, receipts, strict=True) if receipt.error is None])
        return receipts

    def _refusal(self, message: Outgoing) -> BrokerError | None:
        """Return why a message is not taken. Raises what concerns the whole broker."""
        error = self.refuses(message)
        if error is not None and (not isinstance(error, BrokerError) or isinstance(error, BrokerUnavailable)):
            raise error
        return error

    async def consume(self, queue: str, *, prefetch: int) -> WatchedConsumer:  # type: ignore[override]
        self.fail_if_due("consume")
        self.consumed.append((queue, prefetch))
        await asyncio.sleep(0)  # a real broker takes a while
        return WatchedConsumer(await super().consume(queue, prefetch=prefetch), self)


class Stage:
    """Sends commands and reads answers, as the orchestrator would."""

    def __init__(self, broker: WatchedBroker) -> None:
        self.broker = broker
        self._readers: dict[str, tuple[MemoryConsumer, list[Message]]] = {}

    def worker(self, app: App, **options: Any) -> Worker:
        settings = {name: options.pop(name) for name in WorkerSettings.__struct_fields__ if name in options}
        return Worker(app, self.broker, WorkerSettings(**settings), **options)

    async def send(self, queue: str, payload: object = None, *, prefix: str = "", **fields: Any) -> None:
        await MemoryBroker.publish(self.broker, [Outgoing(prefix + queue, command(payload, **fields))])

    async def send_raw(self, queue: str, body: bytes) -> None:
        await MemoryBroker.publish(self.broker, [Outgoing(queue, body)])

    async def answer(self, queue: str = "resultados") -> Message:
        """The next message on that queue, waited for."""
        if queue not in self._readers:
            self._readers[queue] = (await MemoryBroker.consume(self.broker, queue, prefetch=10_000), [])
        consumer, arrived = self._readers[queue]
        if not arrived:
            async with asyncio.timeout(5):
                deliveries = await consumer.take(1000)
            arrived.extend(decode_message(each.body) for each in deliveries)
            await consumer.ack(deliveries)
        return arrived.pop(0)

    async def payload(self, queue: str = "resultados") -> Any:
        return msgspec.json.decode((await self.answer(queue)).payload)

    async def payload_for(self, app: App, queue: str, payload: object = None, **fields: Any) -> Any:
        """What the app answers to one command."""
        async with self.worker(app):
            await self.send(queue, payload, **fields)
            return await self.payload()

    async def left(self, queue: str) -> tuple[int, int, int]:
        """Messages ready, unacked and dead. The broker forgets a queue with none, which nobody consumes."""
        for _ in range(5):  # an ack follows its answer by a turn of the loop or two
            await asyncio.sleep(0)
        for state in await self.broker.queues([queue]):
            return state.ready, state.unacked, state.dead_letters
        return 0, 0, 0

    async def reasons(self, queue: str) -> list[str]:
        return [letter.reason for letter in await self.broker.dead_letters(queue, limit=100)]


def command(payload: object = None, **fields: Any) -> bytes:
    given = {"correlation_id": "run-1", "tipo_evento": "iniciar_execucao", "timestamp": to_iso(NOW)} | fields
    return encode_message(
        Message(payload=msgspec.Raw(msgspec.json.encode({} if payload is None else payload)), **given)
    )


async def quiesce() -> None:
    """Lets everything that can run on the loop run, and so shows that nothing more will."""
    for _ in range(50):
        await asyncio.sleep(0)
