"""Proof of life: finds consumers that are connected and receive nothing, and has them made again.

A consumer that received nothing for a while has to prove that it can:
- On queues that only the orchestrator reads, a canary is published. Every consumer here knows it and acks it.
- On other queues plain workers may listen, who do not know canaries. There the proof against a consumer is that
messages wait while it has room.

A deaf consumer is closed and its `take` raises, so that its owner subscribes again. `statuses()` names the queue until
the new consumer receives something, or there is nothing to receive.

When a canary did not come and is gone, nothing is proven: another consumer may have acked it. After a few such rounds
the consumer is made again to be sure, and `take` raises ConsumerDoubted, without alarm.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import msgspec

from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import (
    BrokerStatus,
    Capabilities,
    Consumer,
    ConsumerDoubted,
    Delivery,
    Outgoing,
    Receipt,
    publish_all,
)
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState
from oraculo.ports.clock import Clock
from oraculo.ports.telemetry import ConsumerRebuilt, Telemetry

CANARY = (
    b'{"correlation_id":"canario","tipo_evento":"canario","payload":{},"timestamp":"1970-01-01T00:00:00Z",'
    b'"nota":"proves that a consumer hears; ignore it"}'
)
PATIENCE = 5.0  # seconds in which a canary, or a waiting message, must arrive
UNPROVEN_ROUNDS = 4
_LOOKS = 10  # at most, during `silence`, at a consumer that has no room
_KEPT = 300.0  # seconds after which a canary that nobody took expires


class LivenessBroker:
    """A broker whose consumers are watched.

    Nobody but the orchestrator reads `own_queues`. A consumer has to prove itself after `silence` seconds without a
    message.
    """

    def __init__(
        self,
        broker: FullBroker,
        clock: Clock,
        telemetry: Telemetry,
        *,
        own_queues: Collection[str] = (),
        silence: float = 15.0,
        patience: float = PATIENCE,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._telemetry = telemetry
        self._own_queues = frozenset(own_queues)
        self._silence = silence
        self._patience = patience
        self._deaf: dict[str, str | None] = {}  # queue -> why it is paused, or None
        self._consumers: set[LivenessConsumer] = set()

    @property
    def name(self) -> str:
        return self._broker.name

    @property
    def capabilities(self) -> Capabilities:
        return self._broker.capabilities

    def statuses(self) -> Sequence[BrokerStatus]:
        paused = tuple((queue, why) for queue, why in self._deaf.items() if why is not None)
        return [
            msgspec.structs.replace(status, deaf=tuple(self._deaf), paused=paused) for status in self._broker.statuses()
        ]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def start(self) -> None:
        await self._broker.start()

    async def declare(self, queues: Sequence[str]) -> None:
        await self._broker.declare(queues)

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        return await self._broker.publish(messages)

    async def consume(self, queue: str, *, prefetch: int) -> "LivenessConsumer":
        inner = await self._broker.consume(queue, prefetch=prefetch)
        consumer = LivenessConsumer(self, inner, queue, prefetch)
        self._consumers.add(consumer)
        return consumer

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        return await self._broker.queues(names)

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        return await self._broker.dead_letters(queue, limit=limit, after=after)

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        await self._broker.look_through(queue, see, ids)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        return await self._broker.redrive(queue, ids)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        return await self._broker.discard(queue, ids)

    async def remove(self, queues: Sequence[str]) -> None:
        await self._broker.remove(queues)

    async def check(self) -> str:
        return await self._broker.check()

    async def close(self) -> None:
        for consumer in list(self._consumers):
            consumer.stop_watching()
        self._consumers.clear()
        self._deaf.clear()
        await self._broker.close()

    # -- for LivenessConsumer -------------------------------------------------------------------------------------

    async def watch(self, consumer: "LivenessConsumer") -> BrokerUnavailable:
        """Return the error for the consumer's owner, once the consumer has to be made again."""
        unproven = 0  # rounds
        while True:
            if await consumer.silent_for(self._silence):
                unproven = 0
            try:
                unheard = await self._prove(consumer)
            except Exception:  # noqa: BLE001 - the broker is away: `statuses` shows that, and it is not deafness
                continue
            if unheard is None:
                unproven = 0
            elif waiting := _waiting(unheard):
                return self._deafness(consumer.queue, waiting, unheard[0].paused)
            elif (unproven := unproven + 1) >= UNPROVEN_ROUNDS:
                why = "others took what it should have heard"
                return ConsumerDoubted(f"the consumer of {consumer.queue} is made again to be sure: {why}")

    def _deafness(self, queue: str, waiting: int, paused: str | None) -> BrokerUnavailable:
        self._deaf[queue] = paused
        why = f"heard nothing in {self._patience:g} s while {waiting} messages wait"
        why += "" if paused is None else f": {paused}"
        self._telemetry.emit(ConsumerRebuilt(self.name, queue, why))
        return BrokerUnavailable(f"the consumer of {queue} heard nothing and is made again")

    async def _prove(self, consumer: "LivenessConsumer") -> Sequence[QueueState] | None:
        """Return the state of the queue when the consumer proved nothing, or None when it is well or needs no proof."""
        consumer.listen()
        if consumer.queue in self._own_queues:
            expires_at = self._clock.now() + _KEPT
            await publish_all(self._broker, [Outgoing(consumer.queue, CANARY, expires_at=expires_at)])
        elif not _waiting(await self._broker.queues([consumer.queue])):
            self._deaf.pop(consumer.queue, None)  # another consumer got the missed messages
            return None
        if await consumer.hears_within(self._patience):
            return None
        states = await self._broker.queues([consumer.queue])
        if consumer.has_heard or not consumer.has_listened:
            return None
        return states

    def heard(self, consumer: "LivenessConsumer") -> None:
        self._deaf.pop(consumer.queue, None)

    def forget(self, consumer: "LivenessConsumer") -> None:
        self._consumers.discard(consumer)


def _waiting(states: Sequence[QueueState]) -> int:
    return sum(state.ready - state.delayed for state in states)


class LivenessConsumer:
    """A consumer that can be asked to prove that it receives."""

    def __init__(self, broker: LivenessBroker, inner: Consumer, queue: str, prefetch: int) -> None:
        self.queue = queue
        self._broker = broker
        self._inner = inner
        self._prefetch = prefetch
        self._out = 0  # messages handed out and not settled
        self._heard = asyncio.Event()
        self._takers = 0
        self._waits_since = 0.0  # loop time since when somebody has been waiting in `take`
        self._was_away = False  # for a moment nobody waited in `take`, so silence proves nothing
        self._end: BrokerUnavailable | None = None  # why it has to be made again
        self._watching = asyncio.create_task(self._watch(), name=f"liveness of {queue}")

    async def take(self, limit: int) -> Sequence[Delivery]:
        while True:
            deliveries = await self._wait_for(limit)
            if self._end is not None:
                raise self._end
            if deliveries:
                self._heard.set()
                self._waits_since = asyncio.get_running_loop().time()
                self._broker.heard(self)
            canaries = [delivery for delivery in deliveries if delivery.body == CANARY]
            if not canaries:
                self._out += len(deliveries)
                return deliveries
            await self._inner.ack(canaries)
            if rest := [delivery for delivery in deliveries if delivery.body != CANARY]:
                self._out += len(rest)
                return rest

    async def _wait_for(self, limit: int) -> Sequence[Delivery]:
        if not self._takers:
            self._waits_since = asyncio.get_running_loop().time()
        self._takers += 1
        try:
            return await self._inner.take(limit)
        finally:
            self._takers -= 1
            self._was_away = self._was_away or not self._takers

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._out = max(0, self._out - len(deliveries))
        await self._inner.ack(deliveries)

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        self._out = max(0, self._out - 1)
        await self._inner.retry(delivery, delay, reason)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        self._out = max(0, self._out - 1)
        await self._inner.dead_letter(delivery, reason)

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        self._out = max(0, self._out - len(letters))
        await self._inner.dead_letter_all(letters)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        await self._inner.extend(deliveries)

    async def close(self) -> None:
        self._broker.forget(self)
        if self._end is not None:  # `_watch` is closing it, and must finish
            await asyncio.wait([self._watching])
        self.stop_watching()
        await self._inner.close()

    # -- watching ---------------------------------------------------------------------------------------------------

    def stop_watching(self) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        self._end = await self._broker.watch(self)
        await self._inner.close()  # ends the `take` that waits

    async def silent_for(self, seconds: float) -> bool:
        """Wait until somebody took, with room to spare, and got nothing for so long.

        Return whether a message came before.
        """
        had_heard, loop = False, asyncio.get_running_loop()
        began = loop.time()
        self.listen()
        while True:
            waited = loop.time() - max(self._waits_since, began) if self._takers else 0.0
            if waited >= seconds and self._out < self._prefetch:
                return had_heard
            await asyncio.sleep(max(seconds - waited, seconds / _LOOKS))
            had_heard = had_heard or self.has_heard

    def listen(self) -> None:
        """Begin to listen now."""
        self._heard.clear()
        self._was_away = not self._takers

    @property
    def has_listened(self) -> bool:
        """Return True when somebody was waiting for messages the whole time."""
        return not self._was_away

    @property
    def has_heard(self) -> bool:
        return self._heard.is_set()

    async def hears_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        return self.has_heard
