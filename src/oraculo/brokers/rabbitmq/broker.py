"""`amqp://` and `amqps://`: RabbitMQ, by pika on this event loop.

Two connections: one publishes, the other does everything else. When RabbitMQ is low on memory or disk it stops reading
from connections that publish; acks on the same one would then be stuck, and nothing could be drained.

A message is delivered `delivery_limit` times at most. Quorum queues count that themselves, over every consumer and
connection, and move what passes the limit to `<queue>.dlq`; a message that is retried with a delay takes its count with
it. A user's classic queue does not count: there a message is counted when it is retried, not when its consumer dies.

Whatever moves between queues is confirmed in the new one before it leaves the old: a crash makes a duplicate, never a
loss. Messages that no queue of ours needs any more (`expires_at`) are delivered all the same: the server would put what
expired among the dead letters.

The server closes the channel of a consumer that holds a delivery for too long (`consumer_timeout`, 30 minutes unless
set): the consumer is lost, and what it held comes again. There is no lease to extend.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from pika import BasicProperties
from pika.exceptions import AMQPError

from oraculo.brokers.address import read_address
from oraculo.brokers.age import warning_of_age
from oraculo.brokers.apart import published_apart_if_refused
from oraculo.brokers.rabbitmq.connection import BLOCKED, CLOSED, Connection, Refused
from oraculo.brokers.rabbitmq.consumer import RabbitMQConsumer
from oraculo.brokers.rabbitmq.dead_letters import (
    PERSISTENT,
    DeadLetters,
    dead,
    encoded,
    fitted,
)
from oraculo.brokers.rabbitmq.frames import Parcel
from oraculo.brokers.rabbitmq.publisher import NotConfirmed, Publisher
from oraculo.brokers.rabbitmq.queues import LOOKS_TOGETHER, Depth, Queues
from oraculo.brokers.rabbitmq.sending import Sender, StuckQueues
from oraculo.errors import BrokerError, BrokerUnavailable, QueueDown, QueueFull
from oraculo.ports.broker import NO_REASON, BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState
from oraculo.ports.clock import Clock, SystemClock
from oraculo.wire.naming import dlq_name, dlq_of, is_dlq

PORT = 5672
OLDEST = (3, 10)
TLS_PORT = 5671
HIGHEST_PRIORITY = 9
_BY_PRIORITY = {  # also the lowest is told: RabbitMQ 4.3 takes a message without any for one of 4
    priority: encoded(BasicProperties("application/json", delivery_mode=PERSISTENT, priority=priority))
    for priority in range(HIGHEST_PRIORITY + 1)
}


class RabbitMQBroker:
    """The broker behind `amqp://user:password@host:port/vhost`; `amqps://` for TLS. Of several hosts, which are the
    nodes of one cluster, it is connected to one that answers.

    `delivery_limit`: how often a message is delivered, at most, before it goes to the dead letters.
    `connect_timeout`, `publish_timeout`, `call_timeout`: seconds after which an attempt to connect, a publish or
    anything else that the server is asked counts as failed.
    `proof_within`: seconds in which some queue is published to or heard, if any works: longer than an engine is silent
    between two canaries. None where nobody sends such.
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
        self._taken = Receipt(name)
        self._clock = clock or SystemClock()
        self._delivery_limit = delivery_limit
        times = {"connect_timeout": connect_timeout, "call_timeout": call_timeout}
        self._working = Connection(self._address, f"{name} working", self._note, **times)
        self._publishing = Connection(self._address, f"{name} publishing", self._note, **times)
        self._queues = Queues(self._working, delivery_limit, call_timeout)
        self._publisher = Publisher(self._publishing, self._queues.remake, fitted)
        self._stuck = StuckQueues(proof_within)
        self._sender = Sender(self._publisher, self._queues, publish_timeout, self._stuck)
        self._dead_letters = DeadLetters(self._working, self._sender.send, delivery_limit)
        self._consumers: set[RabbitMQConsumer] = set()
        self._is_started = False
        self._trouble: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Quorum queues had no priorities before RabbitMQ 4; they are sent, for queues of the user's own."""
        return Capabilities(
            durable=True,
            shared=True,
            priorities=False,
            counts_consumers=True,
            removes_safely=False,
            lists_queues=False,
        )

    async def start(self) -> None:
        """Connects. If it cannot, it raises, and every later call tries again."""
        self._is_started = True
        with self._watched():
            await _all(self._working.start(), self._publishing.start())

    async def declare(self, queues: Sequence[str]) -> None:
        with self._watched():
            await self._queues.declare(queues)

    def statuses(self) -> Sequence[BrokerStatus]:
        if not self._is_started:
            return [BrokerStatus(self.name, CLOSED)]
        takes_nothing = self._publishing.blocked or self._publisher.forbidden
        trouble = takes_nothing or self._trouble or self._stuck.all_of_them()
        return [BrokerStatus(self.name, trouble, stuck=self._stuck.told())]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self._queues.note_replies(message.queue for message in messages if message.is_reply)
        return await published_apart_if_refused(self._send, [self._parcel(message) for message in messages])

    async def _send(self, parcels: Sequence[Parcel]) -> Sequence[Receipt]:
        try:
            with self._watched():
                await self._sender.send(parcels)
        except NotConfirmed as error:
            full, down = Receipt(error=QueueFull(str(error))), Receipt(error=QueueDown(str(error)))
            refused = {id(parcel): down if parcel.queue in error.down else full for parcel in error.parcels}
            return [refused.get(id(parcel), self._taken) for parcel in parcels]
        return [self._taken] * len(parcels)

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
                self._stuck.note([queue], str(error))
            raise
        self._stuck.works([queue])
        return consumer

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        """All: the last that this object declared, published to or consumed, for AMQP cannot list the others. What
        consumers hold AMQP does not tell: unacked is known only where all of them are its own, or there are none. Of
        messages that wait for a delay it knows those that it delayed."""
        with self._watched():
            wanted = self._queues.names if names is None else [name for name in names if not is_dlq(name)]
            states: dict[str, QueueState | None] = {}
            left = iter(wanted)

            async def look() -> None:
                for name in left:
                    try:
                        states[name] = await self._state(name)
                    except Refused:  # one that RabbitMQ does not let us see is left out, unless it was asked for
                        if names is not None:
                            raise

            await _all(*(look() for _ in range(min(LOOKS_TOGETHER, len(wanted)))))
        return [state for name in wanted if (state := states.get(name)) is not None]

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        with self._watched():
            return await self._dead_letters.peek(queue, limit, after)

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        with self._watched():
            await self._dead_letters.look_through(queue, see, ids)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        try:
            with self._watched():
                return await self._dead_letters.redrive(queue, ids)
        except NotConfirmed as error:
            raise QueueFull(str(error)) from error

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        with self._watched():
            return await self._dead_letters.discard(queue, ids)

    async def remove(self, queues: Sequence[str]) -> None:
        with self._watched():
            await self._queues.remove(queues)

    async def remove_unused(self, queues: Sequence[str]) -> Sequence[str]:
        """Looks first and removes then, for RabbitMQ refuses `if_empty` and `if_unused` of a quorum queue. What is
        published between the two is lost, though it may be confirmed."""
        with self._watched():
            return await self._queues.remove_unused(queues)

    async def check(self) -> str:
        """Asks the server something on both connections: without its majority a node answers, and does no work."""
        with self._watched():
            await _all(self._queues.ping(), self._publisher.ping())
            if why := self._stuck.all_of_them():
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
        """Notes how a call went, for `links`, and lets no error of pika's through."""
        if error is None:
            self._trouble = None
        elif isinstance(error, NotConfirmed):  # by a server that works, unless it was lost meanwhile
            if (raw := self._publishing.raw) is not None and raw.is_open:
                self._trouble = None
        elif isinstance(error, BrokerUnavailable):
            self._note(str(error))
        elif isinstance(error, AMQPError | OSError):
            trouble = f"RabbitMQ at {self._working.place}: {error}"
            self._note(trouble)
            raise BrokerUnavailable(trouble) from error

    def _note(self, trouble: str) -> None:
        if self._is_started and trouble != BLOCKED:  # the server itself says when that is over
            self._trouble = trouble

    async def _send_watched(self, parcels: Sequence[Parcel]) -> None:
        with self._watched():
            await self._sender.send(parcels)

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
            publish=self._send_watched,
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
            self._queues.forget(name)
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
    """Tells how what is done within it went. A class, for each publish enters one, and what contextlib makes of a
    generator takes several times as long."""

    __slots__ = ("_went",)

    def __init__(self, went: Callable[[BaseException | None], None]) -> None:
        self._went = went

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._went(error)


async def _all(*calls: Awaitable[object]) -> None:
    """Waits for all, and raises what the first to fail raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
