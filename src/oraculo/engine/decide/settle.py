"""Settles messages at their broker, after their effect is committed: acks them, or makes them dead letters."""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from oraculo.core.chunks import slices
from oraculo.engine.decide.batches import Batch
from oraculo.engine.inbox import Arrived
from oraculo.errors import WrittenByNewer
from oraculo.ports.broker import Consumer, Delivery, NotMoved
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.wire.message import correlation_id_of
from oraculo.wire.naming import QueueNames

MOST_SETTLING = 16  # batches that are being settled at the same time
_FIRST_DELAY = 1.0  # seconds before a message is delivered again
_MOST_DOUBLINGS = 6  # of that delay
_DEAD_LETTER_BYTES = 1024 * 1024  # in one call to the broker, because a connection may be slow
_LEAST_BYTES = 8 * 1024  # a smaller dead letter counts as this many, which limits their number in one call


class Settling:
    """The batches that are being settled while the next ones are decided."""

    def __init__(self, names: QueueNames, telemetry: Telemetry) -> None:
        self._names = names
        self._telemetry = telemetry
        self._tasks: dict[asyncio.Task[Any], Batch] = {}

    @property
    def arrived(self) -> Sequence[Arrived]:
        """The messages that are not settled yet."""
        return [one for batch in self._tasks.values() for one in batch.arrived]

    async def settle_soon(self, batch: Batch) -> None:
        """Begin to settle a committed batch; wait only while too many others are being settled."""
        if batch.handled or batch.refused:
            await self._begin(self.settle(batch), batch)

    async def give_back(self, arrived: Arrived, error: Exception) -> None:
        """Have a message delivered again later, up to the delivery limit."""
        why = f"{type(error).__name__}: {error}"
        await self._begin(self.retry(arrived, _delay_before(arrived.delivery, error), why), Batch(handled=[arrived]))

    async def _begin(self, settling: Coroutine[Any, Any, object], batch: Batch) -> None:
        # The next batch does not wait for this: an answer takes a round trip, and a frozen broker takes seconds.
        task = asyncio.create_task(settling, name="settle")
        self._tasks[task] = batch
        task.add_done_callback(self._tasks.pop)
        if len(self._tasks) > MOST_SETTLING:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def finished(self) -> None:
        """Return when nothing is being settled."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def settle(self, batch: Batch) -> None:
        """Ack what was handled, and make dead letters of what was refused.

        A message that the broker cannot settle is delivered again, and then changes nothing.
        """
        by_consumer: dict[Consumer, list[Delivery]] = {}
        for arrived in batch.handled:
            by_consumer.setdefault(arrived.consumer, []).append(arrived.delivery)
        for consumer, deliveries in by_consumer.items():
            await self._try_settling(consumer, consumer.ack(deliveries))
        # Grouped by broker as well, because the others may move messages when one broker cannot.
        refused: dict[tuple[Consumer, str | None], list[tuple[Delivery, str]]] = {}
        for arrived, why in batch.refused:
            refused.setdefault((arrived.consumer, arrived.delivery.via), []).append((arrived.delivery, why))
        for (consumer, _), dead_letters in refused.items():
            for some in slices(dead_letters, _weight, _DEAD_LETTER_BYTES):
                if not await self._try_settling(consumer, consumer.dead_letter_all(some)):
                    break  # the rest was given back
                for delivery, why in some:
                    queue, run_id = self._names.logical(delivery.queue), correlation_id_of(delivery.body)
                    self._telemetry.emit(DeadLettered(queue, why, run_id))

    async def retry(self, arrived: Arrived, delay: float, why: str) -> None:
        """Have a message delivered again after `delay` seconds."""
        await self._try_settling(arrived.consumer, arrived.consumer.retry(arrived.delivery, delay, why))

    async def _try_settling(self, consumer: Consumer, settling: Awaitable[None]) -> bool:
        """Return whether the broker settled the messages. If not, close the consumer; its owner subscribes again.

        Messages that are never settled would fill the consumer's prefetch for ever. After NotMoved the consumer stays
        open, because the broker has given the message back already.
        """
        try:
            await settling
        except Exception as error:  # noqa: BLE001 - nobody awaits this task, so its error is reported here
            self._telemetry.emit(LoopFailed("settle", f"{type(error).__name__}: {error}"))
            if not isinstance(error, NotMoved):
                with suppress(Exception):
                    await consumer.close()
            return False
        return True


def _delay_before(delivery: Delivery, error: Exception) -> float:
    """Return the seconds before the next delivery.

    The delay doubles for an answer to a run that a newer version wrote. The answer is good, so it is delivered again
    for about a quarter of an hour, until an engine of that version takes it.
    """
    doublings = min(delivery.redeliveries, _MOST_DOUBLINGS) if isinstance(error, WrittenByNewer) else 0
    return _FIRST_DELAY * 2.0**doublings


def _weight(dead_letter: tuple[Delivery, str]) -> int:
    return max(len(dead_letter[0].body), _LEAST_BYTES)
