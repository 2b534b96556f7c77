"""`amqp://` and `amqps://`: RabbitMQ, by pika on this event loop.

Two connections: one publishes, the other does everything else. When RabbitMQ is low on memory or disk it stops reading
from connections that publish. Acks on the same one would be stuck, and nothing could be drained.

A message is delivered `delivery_limit` times at most. Quorum queues count that themselves, over every consumer and
connection, and move what passes the limit to `<queue>.dlq`. A message that is retried with a delay takes its count with
it. A user's classic queue does not count: there a message is counted when it is retried, not when its consumer dies.

Whatever moves between queues is confirmed in the new one before it leaves the old. A crash makes a duplicate, never a
loss. Messages past their `expires_at` are delivered all the same: the server would make them dead letters.

The server closes the channel of a consumer that holds a delivery for too long (`consumer_timeout`, 30 minutes unless
set). The consumer is lost, and what it held comes again. There is no lease to extend.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

from pika import BasicProperties
from pika.exceptions import AMQPError

from oraculo.brokers.address import read_address
from oraculo.brokers.age import warning_of_age
from oraculo.brokers.rabbitmq.connection import BLOCKED, CLOSED, Connection, Refused, all_of
from oraculo.brokers.rabbitmq.consumer import RabbitMQConsumer
from oraculo.brokers.rabbitmq.dead_letters import DeadLetters
from oraculo.brokers.rabbitmq.frames import Parcel
from oraculo.brokers.rabbitmq.properties import PERSISTENT, dead, encoded, fitted
from oraculo.brokers.rabbitmq.publisher import Publisher
from oraculo.brokers.rabbitmq.queue_health import StuckQueues
from oraculo.brokers.rabbitmq.queues import Depth, Queues
from oraculo.errors import BrokerError, BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import NO_REASON, BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState
from oraculo.ports.clock import Clock, SystemClock
from oraculo.wire.naming import dlq_name, dlq_of, is_dlq

PORT = 5672
OLDEST = (3, 10)
TLS_PORT = 5671
HIGHEST_PRIORITY = 9
_BY_PRIORITY = {  # also for 0: RabbitMQ 4.3 takes a message without a priority for one of 4
    priority: encoded(BasicProperties("application/json", delivery_mode=PERSISTENT, priority=priority))
    for priority in range(HIGHEST_PRIORITY + 1)
}


class RabbitMQBroker:
    """The broker behind `amqp://user:password@host:port/vhost`; `amqps://` for TLS.

    Several hosts are the nodes of one cluster; it is connected to one that answers.

    `delivery_limit`: how often a message is delivered, at most, before it goes to the dead letters.
    `connect_timeout`, `publish_timeout`, `call_timeout`: seconds after which an attempt to connect, the silence of a
    queue that is published to, or any other question to the server counts as failed.
    `proof_within`: seconds in which some queue is published to or heard, if any works: longer than an engine is silent
    between two canaries. None where nobody sends any.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "rabbitmq",
        clock: Clock | None = None,
        delivery_limit: int = 20,
        connect_timeout: float = 3.0,
        publish_timeout: float = 5.0,
        call_timeout: float = 5.0,
        proof_within: float | None = None,
    ) -> None:
        port = TLS_PORT if url.startswith("amqps:") else PORT
        self._address = read_address(url, port=port, is_cluster=True)
        self.name = name
        self._clock = clock or SystemClock()
        self._delivery_limit = delivery_limit
        times = {"connect_timeout": connect_timeout, "call_timeout": call_timeout}
        self._working = Connection(self._address, f"{name} working", self._note, **times)
        self._publishing = Connection(self._address, f"{name} publishing", self._note, **times)
        self._queues = Queues(self._working, delivery_limit)
        self._stuck = StuckQueues(proof_within)
        self._publisher = Publisher(
            self._publishing, self._queues, self._stuck, fitted, taken=Receipt(name), timeout=publish_timeout
        )
        self._dead_letters = DeadLetters(self._working, self._publisher.publish, delivery_limit)
        self._consumers: set[RabbitMQConsumer] = set()
        self._is_started = False
        self._trouble: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        # Quorum queues had no priorities before RabbitMQ 4. Priorities are sent for queues of the user's own.
        return Capabilities(
            durable=True,
            shared=True,
            priorities=False,
            counts_consumers=True,
            lists_queues=False,
        )

    async def start(self) -> None:
        """Connect. Raises when it cannot; every later call tries again."""
        self._is_started = True
        with self._watched():
            await all_of(self._working.start(), self._publishing.start())

    async def declare(self, queues: Sequence[str]) -> None:
        with self._watched():
            await self._queues.declare(queues)

    def statuses(self) -> Sequence[BrokerStatus]:
        if not self._is_started:
            return [BrokerStatus(self.name, CLOSED)]
        takes_nothing = self._publishing.blocked or self._publisher.forbidden
        trouble = takes_nothing or self._trouble or self._stuck.reason_of_all()
        return [BrokerStatus(self.name, trouble, stuck=self._stuck.reasons())]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self._queues.note_replies(message.queue for message in messages if message.is_reply)
        return await self._published([self._parcel(message) for message in messages])

    async def consume(self, queue: str, *, prefetch: int) -> RabbitMQConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        before = self._working.raw
        try:
            with self._watched():
                await self._queues.declare([queue])
                self._queues.refuse_stream(queue)
                consumer = await self._subscribed(queue, prefetch)
        except BrokerUnavailable as error:
            if before is not None and self._working.raw is before:  # else it is the connection's fault
                self._stuck.note(queue, str(error))
            raise
        self._stuck.works([queue])
        return consumer

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        """Return the states of queues; without names, of those that this object used last.

        AMQP cannot list the others. It also does not say what consumers hold: `unacked` is known only where all of
        them are this object's. Of messages that wait for a delay, it counts those that this object delayed.
        """
        with self._watched():
            wanted = self._queues.names if names is None else [name for name in names if not is_dlq(name)]
            found: list[QueueState] = []
            for state in await asyncio.gather(*map(self._state, wanted), return_exceptions=True):
                if isinstance(state, QueueState):
                    found.append(state)
                elif state is not None and not (names is None and isinstance(state, Refused)):
                    raise state  # a queue that we may not look at is left out, unless it was asked for
            return found

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        with self._watched():
            return await self._dead_letters.peek(queue, limit, after)

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        with self._watched():
            await self._dead_letters.look_through(queue, see, ids)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        with self._watched():
            return await self._dead_letters.redrive(queue, ids)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        with self._watched():
            return await self._dead_letters.discard(queue, ids)

    async def remove(self, queues: Sequence[str]) -> None:
        with self._watched():
            await self._queues.remove(queues)

    async def check(self) -> str:
        """Ask the server something on both connections. Without its majority a node answers, and does no work."""
        with self._watched():
            await all_of(self._queues.ping(), self._publisher.ping())
            if why := self._stuck.reason_of_all():
                raise BrokerUnavailable(why)
        version = self._working.version
        return f"RabbitMQ {version} at {self._working.place}{warning_of_age(version, OLDEST)}"

    async def close(self) -> None:
        self._is_started = False
        self._stuck.clear()
        for consumer in list(self._consumers):
            await consumer.abandon()
        await asyncio.gather(self._publishing.close(), self._working.close())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _watched(self) -> "_Watched":
        if not self._is_started:
            raise BrokerUnavailable(CLOSED)
        return _Watched(self._went)

    def _went(self, error: BaseException | None) -> None:
        """Note how a call went, and let no error of pika's through."""
        if error is None or (isinstance(error, QueueUnavailable) and self._publishing.raw is not None):
            self._trouble = None
        elif isinstance(error, BrokerUnavailable):
            self._note(str(error))
        elif isinstance(error, AMQPError | OSError):
            trouble = f"RabbitMQ at {self._working.place}: {error}"
            self._note(trouble)
            raise BrokerUnavailable(trouble) from error

    def _note(self, trouble: str) -> None:
        if self._is_started and trouble != BLOCKED:  # the server says itself when that is over
            self._trouble = trouble

    async def _published(self, parcels: Sequence[Parcel]) -> Sequence[Receipt]:
        with self._watched():
            return await self._publisher.publish(parcels)

    def _parcel(self, message: Outgoing) -> Parcel:
        properties = _BY_PRIORITY.get(message.priority)
        if properties is None:
            raise BrokerError(f"priority: must be 0 to {HIGHEST_PRIORITY}, got {message.priority}")
        if message.reason is None and not is_dlq(message.queue):
            return Parcel(message.queue, properties, message.body)
        letter = dead(properties, message.reason or NO_REASON, self._clock.now(), 0)
        return Parcel(dlq_name(message.queue), letter, message.body)

    async def _subscribed(self, queue: str, prefetch: int) -> RabbitMQConsumer:
        channel = await self._working.channel()
        consumer = RabbitMQConsumer(
            channel,
            queue,
            queues=self._queues,
            publish=self._published,
            clock=self._clock,
            delivery_limit=self._delivery_limit,
            on_end=self._consumers.discard,
            on_heard=self._stuck.works,
        )
        self._consumers.add(consumer)
        try:
            await consumer.subscribe(prefetch)
            if not self._is_started:  # closed meanwhile: nobody would ever close this one
                raise BrokerUnavailable(CLOSED)
        except BaseException:
            self._consumers.discard(consumer)
            channel.abandon()
            raise
        return consumer

    async def _state(self, name: str) -> QueueState | None:
        depth, dead_letters = await self._queues.depth(name), await self._queues.depth(dlq_of(name))
        if depth is None and dead_letters is None:
            self._queues.forget_gone(name)
            return None
        depth = depth or Depth(0, 0)
        dead_count = (dead_letters.messages if dead_letters else 0) + self._held(dlq_of(name))
        delayed = await self._queues.delayed(name)
        own = sum(consumer.queue == name for consumer in self._consumers)
        unacked = self._held(name) if depth.consumers <= own else None
        return QueueState(name, depth.messages + delayed, unacked, dead_count, depth.consumers, delayed)

    def _held(self, queue: str) -> int:
        return sum(consumer.unsettled for consumer in self._consumers if consumer.queue == queue)


class _Watched:
    """A context that reports how its body went.

    Each publish enters one, and what contextlib makes of a generator takes several times as long.
    """

    __slots__ = ("_went",)

    def __init__(self, went: Callable[[BaseException | None], None]) -> None:
        self._went = went

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._went(error)
