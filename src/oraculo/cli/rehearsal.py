"""A rehearsal of every call that engines and workers make to a broker, to find missing rights.

No broker lists the rights that an adapter lacks, and some refuse in silence. The rehearsal declares and counts the
engine's own queues. It does everything else on a queue of its own, and removes that queue.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Consumer, Delivery, Outgoing, publish_all
from oraculo.ports.broker_admin import FullBroker
from oraculo.wire.naming import QueueNames

REMOVE = "remove a queue"
_QUEUE = "verificacao-doctor"
_STEP_SECONDS = 6.0  # an adapter gives up on a call by itself after 5
_LOOK_PAUSE = 0.02
_SHORT_DELAY = 0.1
_REASON = "oraculo doctor tries whether it can"


class Failed(Exception):
    """A failed step of the rehearsal, with the broker's reason in `error`."""

    def __init__(self, step: str, queue: str, error: BrokerError) -> None:
        self.step = step
        self.queue = queue
        self.error = error
        super().__init__(f"to {step} on {queue}: {error}")

    @property
    def is_grave(self) -> bool:
        """Return whether engines need the step. They never remove a queue."""
        return self.step != REMOVE


async def rehearse(broker: FullBroker, names: QueueNames, delivery_limit: int) -> None:
    """Rehearse on a broker that was started. Raises Failed."""
    own = [names.requests, names.answers]
    async with _step("declare", " and ".join(own)):
        await broker.declare(own)
    async with _step("count messages", " and ".join(own)):
        await broker.queues(own)
    queue = names.physical(f"{_QUEUE}-{secrets.token_hex(4)}")
    try:
        await _use(broker, queue, delivery_limit)
    except BaseException:
        with suppress(Failed):  # the first failure is raised
            await _remove(broker, queue)
        raise
    await _remove(broker, queue)


async def _use(broker: FullBroker, queue: str, delivery_limit: int) -> None:
    async with _step("declare", queue):
        await broker.declare([queue])
    async with _step("publish", queue):
        await publish_all(broker, [Outgoing(queue, b"to be acked")])
    async with _step("consume", queue):
        consumer = await broker.consume(queue, prefetch=1)
    try:
        await _take_and_ack(broker, consumer, queue)
        await _retry_and_dead_letter(broker, consumer, queue, delivery_limit)
    finally:
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(_STEP_SECONDS):
                await consumer.close()
    await _discard(broker, queue)


async def _take_and_ack(broker: FullBroker, consumer: Consumer, queue: str) -> None:
    delivery = await _taken(consumer, queue)
    async with _step("extend a lease", queue):
        await consumer.extend([delivery])
    async with _step("ack", queue, unseen="what was acked is not gone"):
        await consumer.ack([delivery])
        await _until(lambda: _is_empty(broker, queue))


async def _retry_and_dead_letter(broker: FullBroker, consumer: Consumer, queue: str, delivery_limit: int) -> None:
    async with _step("publish", queue):
        await publish_all(broker, [Outgoing(queue, b"to be dead-lettered")])
    delivery = await _taken(consumer, queue)
    for delay in (0.0, _SHORT_DELAY)[: delivery_limit - 1]:  # one more, and it would be among the dead letters
        async with _step("retry", queue):
            await consumer.retry(delivery, delay, _REASON)
        delivery = await _taken(consumer, queue)
    async with _step("dead-letter", queue, unseen="what was dead-lettered is not in its dlq"):
        await consumer.dead_letter(delivery, _REASON)
        await _until(lambda: broker.dead_letters(queue, limit=1))


async def _discard(broker: FullBroker, queue: str) -> None:
    async with _step("discard a dead letter", queue, unseen="what was discarded is not gone"):
        [letter] = await broker.dead_letters(queue, limit=1)
        await broker.discard(queue, [letter.id])
        await _until(lambda: _has_no_letters(broker, queue))


async def _remove(broker: FullBroker, queue: str) -> None:
    async with _step(REMOVE, queue):
        await broker.remove([queue])


async def _taken(consumer: Consumer, queue: str) -> Delivery:
    async with _step("take", queue, unseen="what was published is not delivered"):
        [delivery] = await consumer.take(1)
    return delivery


@asynccontextmanager
async def _step(what: str, queue: str, unseen: str = "") -> AsyncIterator[None]:
    """Turn errors into Failed. `unseen` says what is missing when a broker refuses in silence."""
    try:
        async with asyncio.timeout(_STEP_SECONDS):
            yield
    except BrokerError as error:
        raise Failed(what, queue, error) from error
    except TimeoutError as error:
        reason = f"{unseen or 'no answer'} after {_STEP_SECONDS:g} s"
        raise Failed(what, queue, BrokerError(reason) if unseen else BrokerUnavailable(reason)) from error


async def _until(look: Callable[[], Awaitable[object]]) -> None:
    while not await look():  # noqa: ASYNC110 - the broker has no event to wait for; the caller has a timeout
        await asyncio.sleep(_LOOK_PAUSE)


async def _is_empty(broker: FullBroker, queue: str) -> bool:
    return all(state.ready + (state.unacked or 0) == 0 for state in await broker.queues([queue]))


async def _has_no_letters(broker: FullBroker, queue: str) -> bool:
    return not await broker.dead_letters(queue, limit=1)
