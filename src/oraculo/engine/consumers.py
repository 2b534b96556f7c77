"""The consumers of the queues that an engine reads itself, answers and requests. Lost ones are made again."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf

from oraculo.core.queue_health import QueueHealth
from oraculo.engine.inbox import Arrived, Inbox
from oraculo.errors import BrokerError, BrokerUnavailable, OraculoError
from oraculo.ports.broker import Consumer, ConsumerDoubted
from oraculo.ports.broker_admin import FullBroker
from oraculo.settings.sections import EngineSettings

HEARD_WITHIN = 5.0  # seconds in which what waits must get less
HEARD_AT_LAST = 60.0
_GLANCE = 0.1


class EngineConsumers:
    """A consumer for each of an engine's own queues."""

    def __init__(self, broker: FullBroker, inbox: Inbox, queues: Sequence[str], settings: EngineSettings) -> None:
        self.names = queues
        self._broker = broker
        self._inbox = inbox
        self._settings = settings
        self._consumers: dict[str, Consumer] = {}
        self._unread = QueueHealth()

    async def subscribe(self) -> None:
        """Begin to consume every queue; `pump` tries again where the broker is away."""
        for queue in self.names:
            with suppress(BrokerUnavailable):  # `pump` tries again
                await self._subscribe(queue)

    async def pump(self, queue: str) -> None:
        """Put what a queue brings into the inbox, until its consumer is lost.

        When cancelled it leaves the consumer open, so that what was taken can be settled.
        """
        consumer = self._consumers.get(queue) or await self._subscribe(queue)
        try:
            while await self._is_only_doubted(queue, consumer):
                consumer = await self._replaced(queue, consumer)
        except Exception as error:
            self._cannot_read(queue, error, was_read=True)
            await self._drop(queue)
            raise
        await self._drop(queue)

    async def _is_only_doubted(self, queue: str, consumer: Consumer) -> bool:
        """Take until the consumer ends, and return whether only a doubt ended it."""
        try:
            while deliveries := await consumer.take(self._settings.batch):
                self._unread.works([queue])
                self._inbox.put([Arrived(delivery, consumer) for delivery in deliveries])
        except ConsumerDoubted:
            return True
        return False

    async def _replaced(self, queue: str, doubted: Consumer) -> Consumer:
        """Return a new consumer, made before the doubted one closes: nothing is wrong with the queue."""
        consumer = await self._broker.consume(queue, prefetch=self._settings.prefetch)
        self._consumers[queue] = consumer
        await self._let_go(doubted)
        return consumer

    async def heard_out(self, queue: str) -> None:
        """Return when nothing waits in the queue any more, or what waits does not get less.

        Nothing must wait twice in a row, because no count includes messages on their way.
        """
        loop, fewest, looks = asyncio.get_running_loop(), inf, 2
        last = loop.time() + HEARD_AT_LAST
        with suppress(TimeoutError, BrokerError):
            async with asyncio.timeout(HEARD_WITHIN) as limit:
                while looks:
                    waiting = sum(state.ready - state.delayed for state in await self._broker.queues([queue]))
                    if waiting < fewest:
                        fewest = waiting
                        limit.reschedule(min(loop.time() + HEARD_WITHIN, last))
                    looks = 2 if waiting > 0 else looks - 1
                    await asyncio.sleep(_GLANCE)

    async def _subscribe(self, queue: str) -> Consumer:
        try:
            consumer = await self._broker.consume(queue, prefetch=self._settings.prefetch)
        except Exception as error:
            self._cannot_read(queue, error, was_read=False)
            raise
        self._consumers[queue] = consumer
        return consumer

    def _cannot_read(self, queue: str, error: Exception, *, was_read: bool) -> None:
        why, now = str(error) or type(error).__name__, asyncio.get_running_loop().time()
        self._unread.note_unread(queue, why, now, was_read=was_read)

    async def _drop(self, queue: str) -> None:
        if (lost := self._consumers.pop(queue, None)) is not None:
            await self._let_go(lost)

    async def _let_go(self, lost: Consumer) -> None:
        # Its messages may still be decided. But while the store is away, each new consumer would bring them once more.
        if len(self._inbox) > self._settings.prefetch:
            self._inbox.forget_arrived(lost)
        with suppress(OraculoError):
            await lost.close()

    async def close(self) -> None:
        for queue in list(self._consumers):
            await self._drop(queue)

    @property
    def unread(self) -> Mapping[str, str]:
        """The queues whose consumer fails, and why. With several brokers it fails on each of them."""
        return self._unread.reasons(asyncio.get_running_loop().time())

    @property
    def without_consumer(self) -> Sequence[str]:
        """The queues that nobody reads here now."""
        failing = self.unread
        return [queue for queue in self.names if queue in failing or queue not in self._consumers]
