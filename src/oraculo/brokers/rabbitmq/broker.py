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
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple

from pika import BasicProperties
from pika.exceptions import AMQPError

from oraculo.brokers.address import read_address
from oraculo.brokers.age import warning_of_age
from oraculo.brokers.rabbitmq.connection import BLOCKED, CLOSED, Channel, Connection, Refused, unused
from oraculo.brokers.rabbitmq.letters import (
    PERSISTENT,
    REDELIVERIES,
    Quarantine,
    carried,
    dead,
    encoded,
    fitted,
    redeliveries_of,
)
from oraculo.brokers.rabbitmq.publisher import NotConfirmed, Publisher
from oraculo.brokers.rabbitmq.queues import LOOKS_TOGETHER, NotDelayed, Queues, dlq_name, is_dlq
from oraculo.brokers.rabbitmq.sending import Sender, StuckQueues
from oraculo.brokers.rabbitmq.wire import Deliveries, Parcel
from oraculo.core.naming import dlq_of
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import NO_REASON, Capabilities, DeadLetter, Delivery, Link, NotTaken, Outgoing, QueueState
from oraculo.ports.clock import Clock, SystemClock

PORT = 5672
OLDEST = (3, 10)
TLS_PORT = 5671
HIGHEST_PRIORITY = 9
MOST_PREFETCH = 65_535  # what AMQP can say
FAILED_MOVE_PAUSE = 1.0  # seconds until it is tried again to move a message, or it comes again
LONGEST_MOVE_PAUSE = 5.0
LONGEST_HELD = 60.0  # seconds that a message waits here which can wait in no queue: it takes a place of the prefetch
MOVED_TOGETHER = 50  # of the messages that could not be moved before
_BY_PRIORITY = {  # also the lowest is told: RabbitMQ 4.3 takes a message without any for one of 4
    priority: encoded(BasicProperties(delivery_mode=PERSISTENT, priority=priority))
    for priority in range(HIGHEST_PRIORITY + 1)
}

Token = Any  # a delivery tag of AMQP; the port knows it as `int | str`
Publish = Callable[[Sequence[Parcel]], Awaitable[None]]
FindQueue = Callable[[], Awaitable[str]]


class _Move(NamedTuple):
    """A message on its way from this queue to another, which is made when it is missing."""

    find_queue: FindQueue
    properties: bytes
    body: bytes

    async def parcel(self) -> Parcel:
        return Parcel(await self.find_queue(), self.properties, self.body)


def _not_taken(moves: dict[Token, _Move], parcels: Sequence[Parcel], error: BrokerError) -> dict[Token, _Move]:
    """Of the moves that these parcels are, those that are not known to be done."""
    if not isinstance(error, NotConfirmed):
        return moves
    refused = set(map(id, error.parcels))
    return {tag: moves[tag] for tag, parcel in zip(moves, parcels, strict=True) if id(parcel) in refused}


class RabbitMQConsumer:
    """One subscription, on a channel of its own. Once that is lost, settling does nothing: what it held comes again."""

    def __init__(
        self,
        channel: Channel,
        queue: str,
        *,
        queues: Queues,
        publish: Publish,
        clock: Clock,
        delivery_limit: int,
        on_end: "Callable[[RabbitMQConsumer], None]",
        on_heard: Callable[[], None],
    ) -> None:
        self.queue = queue
        self._on_heard = on_heard
        self._on_end = on_end
        self._channel = channel
        self._queues = queues
        self._is_counting = queues.is_ours(queue)
        self._publish = publish
        self._clock = clock
        self._limit = None if is_dlq(queue) else delivery_limit  # a dead letter has nowhere else to go
        self._held: dict[Token, bytes] = {}  # the properties of what is not settled, by delivery tag, ascending
        self._moving: set[Token] = set()  # of these, those that are on the way to another queue
        self._burying = asyncio.Lock()  # a few at a time: what is on the way when the line breaks may come twice
        self._waiting: deque[Delivery] = deque()  # of these, those that nobody took yet
        self._arrived = asyncio.Event()
        self._kept: dict[Token, _Move] = {}  # of these, those that could not be moved yet
        self._most_kept = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BrokerError | None = None
        self._closed = False

    @property
    def unsettled(self) -> int:
        return len(self._held)

    async def subscribe(self, prefetch: int) -> None:
        # A queue of ours is not to be deaf for good messages: what is given back too often, the server moves itself.
        self._most_kept = prefetch // 2 if self._is_counting else prefetch
        self._channel.on_close = self._lose
        self._channel.listen(Deliveries(self._on_message))
        self._channel.raw.add_on_cancel_callback(self._on_cancel)
        await self._channel.call("basic_qos", prefetch_count=min(prefetch, MOST_PREFETCH))
        await self._channel.call("basic_consume", queue=self.queue, on_message_callback=unused)

    async def take(self, limit: int) -> Sequence[Delivery]:
        """Raises BrokerUnavailable once the subscription is lost."""
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        while not self._waiting:
            if self._closed:
                return []
            if self._fault is not None:
                raise self._lost()
            self._arrived.clear()
            await self._arrived.wait()
        self._on_heard()
        if len(self._waiting) <= limit:
            taken = list(self._waiting)
            self._waiting.clear()
            return taken
        return [self._waiting.popleft() for _ in range(limit)]

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._ack([delivery.token for delivery in deliveries])

    def _ack(self, tags: Iterable[Token]) -> None:
        """One ack for all up to the oldest that is still held, and one for each behind it."""
        settled = [tag for tag in tags if self._settles(tag)]
        oldest = next(iter(self._held), None)
        together = settled if oldest is None else [tag for tag in settled if tag < oldest]
        if together:
            self._tell_ack(max(together), multiple=True)
        if len(together) < len(settled):
            for tag in set(settled).difference(together):
                self._tell_ack(tag)

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        properties = self._held.get(delivery.token)
        if properties is None or delivery.token in self._moving:
            return
        deliveries = delivery.redeliveries + 1
        if self._limit is not None and deliveries >= self._limit:
            await self.dead_letter(delivery, reason)
        elif delay <= 0 and self._is_counting:
            self._give_back(delivery.token)
        else:
            counted = carried(properties, **{REDELIVERIES: deliveries})
            try:
                await self._move({delivery.token: _Move(lambda: self._later(delay), counted, delivery.body)})
            except NotDelayed:
                if delivery.token in self._moving:  # else the consumer has ended
                    self._run(self._retry_after(delivery, min(delay, LONGEST_HELD), reason), "retry a message")

    def _lost(self) -> BrokerUnavailable:
        return BrokerUnavailable(f"the subscription to {self.queue} is lost: {self._fault}")

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        await self.dead_letter_all([(delivery, reason)])

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """One that cannot be moved now is held until it can be. Raises BrokerUnavailable when too many are held so; it
        then comes again, after a pause."""
        moves: dict[Token, _Move] = {}
        for delivery, reason in letters:
            properties = self._held.get(delivery.token)
            if properties is not None and delivery.token not in self._moving:
                letter = dead(properties, reason, self._clock.now(), delivery.redeliveries)
                moves[delivery.token] = _Move(self._grave, letter, delivery.body)
        if moves:
            async with self._burying:
                await self._move(moves)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing to do: a delivery is its consumer's while that lives. Raises BrokerUnavailable when it does not."""
        if self._fault is not None:
            raise self._lost()

    async def close(self) -> None:
        if self._closed:
            return
        await self.abandon()
        await self._channel.close()

    async def abandon(self) -> None:
        """Closes it without telling the server, who hears it when the channel or the connection ends."""
        self._closed = True
        self._on_end(self)
        self._forget()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what the server says -------------------------------------------------------------------------------------

    def _on_message(self, tag: int, is_redelivered: bool, properties: bytes, body: bytes) -> None:
        if self._closed or self._fault is not None:
            return
        delivery = Delivery(self.queue, body, tag, redeliveries_of(properties, is_redelivered))
        self._held[tag] = properties
        if self._limit is not None and delivery.redeliveries >= self._limit:
            self._bury(delivery)
        else:
            self._waiting.append(delivery)
            self._arrived.set()

    def _on_cancel(self, _: object) -> None:
        self._lose(BrokerUnavailable("RabbitMQ cancelled it: the queue was deleted, or its node left"))
        self._channel.abandon()

    def _lose(self, fault: BrokerError) -> None:
        self._fault = fault
        self._on_end(self)
        self._forget()

    def _forget(self) -> None:
        """The server gives to others what was held."""
        self._held.clear()
        self._moving.clear()
        self._kept.clear()
        self._waiting.clear()
        self._arrived.set()
        for task in self._tasks:
            task.cancel()

    def _tell_ack(self, tag: Token, *, multiple: bool = False) -> None:
        if self._channel.is_open:  # else what it held comes again
            self._channel.raw.connection.ack(self._channel.raw.channel_number, tag, multiple=multiple)

    # -- the ways of a message ------------------------------------------------------------------------------------

    def _settles(self, tag: Token) -> bool:
        """Whether it was still this consumer's to settle; it no longer is."""
        return tag not in self._moving and self._held.pop(tag, None) is not None

    def _give_back(self, tag: Token) -> None:
        if self._settles(tag):
            with suppress(AMQPError):  # the channel is closing in this moment, and what it held comes again
                self._channel.raw.basic_reject(tag, requeue=True)  # since RabbitMQ 4.3 a nack is not counted

    async def _move(self, moves: dict[Token, _Move]) -> None:
        """To another queue: each leaves this one once it is confirmed there. To give it back meanwhile would be
        counted: it would lose its reason, or all be dropped by a queue that has a limit and no dead letters."""
        self._moving.update(moves)
        parcels: list[Parcel] = []
        try:
            parcels += [await move.parcel() for move in moves.values()]
            await self._publish(parcels)
        except NotDelayed:
            raise  # it is still ours to move
        except BrokerError as error:
            left = _not_taken(moves, parcels, error)
            self._have_moved(moves.keys() - left.keys())
            if not self._keeps(left):
                raise
        except BaseException:
            self._moving.difference_update(moves)
            raise
        else:
            self._have_moved(moves)

    def _keeps(self, moves: dict[Token, _Move]) -> bool:
        """Whether there is room for all that could not be moved; the others come again, after a pause."""
        has_room = True
        for tag, move in moves.items():
            if tag in self._moving and len(self._kept) < self._most_kept:
                self._keep(tag, move)
            else:
                asyncio.get_running_loop().call_later(FAILED_MOVE_PAUSE, self._not_moved, tag)
                has_room = False
        return has_room

    async def _retry_after(self, delivery: Delivery, delay: float, reason: str) -> None:
        """It waits here, for it can wait nowhere else."""
        await asyncio.sleep(delay)
        self._moving.discard(delivery.token)
        with suppress(BrokerError):  # then it comes again
            await self.retry(delivery, 0.0, reason)

    def _keep(self, tag: Token, move: _Move) -> None:
        self._kept[tag] = move
        if len(self._kept) == 1:
            self._run(self._move_kept(), "move what could not be moved")

    async def _move_kept(self) -> None:
        """Until none is left, or the consumer ends."""
        pause = FAILED_MOVE_PAUSE
        await asyncio.sleep(pause)
        while self._kept:
            if left := await self._moved_some(dict(islice(self._kept.items(), MOVED_TOGETHER))):
                self._kept |= {tag: self._kept.pop(tag) for tag in left}  # the others come first the next time
                pause = min(2 * pause, LONGEST_MOVE_PAUSE)
                await asyncio.sleep(pause)

    async def _moved_some(self, moves: dict[Token, _Move]) -> list[Token]:
        """Returns those that could not be moved this time either."""
        left: dict[Token, _Move] = {}
        parcels: list[Parcel] = []
        try:
            parcels += [await move.parcel() for move in moves.values()]
            await self._publish(parcels)
        except BrokerUnavailable as error:
            left = _not_taken(moves, parcels, error)
        except BrokerError:
            return await self._moved_singly(moves)
        done = moves.keys() - left.keys()
        for tag in done:
            del self._kept[tag]
        self._have_moved(done)
        return list(left)

    async def _moved_singly(self, moves: dict[Token, _Move]) -> list[Token]:
        """One of them will never be taken where it is to go: it comes again, and holds up no other."""
        if len(moves) > 1:
            return [left for tag, move in moves.items() for left in await self._moved_some({tag: move})]
        for tag in moves:
            del self._kept[tag]
            self._not_moved(tag)
        return []

    def _have_moved(self, tags: Iterable[Token]) -> None:
        moved = self._moving.intersection(tags)  # without those that it held no more when it ended
        self._moving -= moved
        self._ack(moved)

    def _not_moved(self, tag: Token) -> None:
        if tag in self._moving:
            self._moving.discard(tag)
            self._give_back(tag)

    async def _grave(self) -> str:
        return dlq_name(self.queue)

    async def _later(self, delay: float) -> str:
        return await self._queues.delay(self.queue, delay) if delay > 0 else self.queue

    def _bury(self, delivery: Delivery) -> None:
        """It was delivered too often before it came here."""
        reason = f"delivered {delivery.redeliveries} times and never settled"
        self._run(self._buried(delivery, reason), "bury a message")

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"{what} of {self.queue}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _buried(self, delivery: Delivery, reason: str) -> None:
        with suppress(BrokerError):  # then it comes again, and so to this point
            await self.dead_letter(delivery, reason)


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
        self._name = name
        self._clock = clock or SystemClock()
        self._delivery_limit = delivery_limit
        times = {"connect_timeout": connect_timeout, "call_timeout": call_timeout}
        self._working = Connection(self._address, f"{name} working", self._note, **times)
        self._publishing = Connection(self._address, f"{name} publishing", self._note, **times)
        self._queues = Queues(self._working, delivery_limit, call_timeout)
        self._publisher = Publisher(self._publishing, self._queues.remake, fitted)
        self._stuck = StuckQueues(proof_within)
        self._sender = Sender(self._publisher, self._queues, publish_timeout, self._stuck)
        self._quarantine = Quarantine(self._working, self._sender.send)
        self._consumers: set[RabbitMQConsumer] = set()
        self._is_started = False
        self._trouble: str | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """Quorum queues had no priorities before RabbitMQ 4; they are sent, for queues of the user's own."""
        return Capabilities(durable=True, shared=True, priorities=False, counts_consumers=True)

    async def start(self) -> None:
        """Connects. If it cannot, it raises, and every later call tries again."""
        self._is_started = True
        async with self._watched():
            await _all(self._working.start(), self._publishing.start())

    async def declare(self, queues: Sequence[str]) -> None:
        async with self._watched():
            await self._queues.declare(queues)

    def links(self) -> Sequence[Link]:
        if not self._is_started:
            return [Link(self.name, CLOSED)]
        takes_nothing = self._publishing.blocked or self._publisher.forbidden
        trouble = takes_nothing or self._trouble or self._stuck.all_of_them()
        return [Link(self.name, trouble, stuck=self._stuck.told())]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        parcels = [self._parcel(message) for message in messages]
        try:
            async with self._watched():
                await self._sender.send(parcels)
        except NotConfirmed as error:
            refused = set(map(id, error.parcels))
            vias = [None if id(parcel) in refused else self.name for parcel in parcels]
            down = {n for n, parcel in enumerate(parcels) if vias[n] is None and parcel.queue in error.down}
            raise NotTaken(str(error), vias, down) from error
        return [self.name] * len(messages)

    async def consume(self, queue: str, *, prefetch: int) -> RabbitMQConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        before = self._working.raw
        try:
            async with self._watched():
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
        """All: the last that this object declared, published to or consumed, for AMQP cannot list the others. Unacked
        are those that its own consumers hold; of messages that wait for a delay it knows those that it delayed."""
        async with self._watched():
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
        async with self._watched():
            return await self._quarantine.peek(queue, limit, after)

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        async with self._watched():
            await self._quarantine.look_through(queue, see, ids)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        try:
            async with self._watched():
                return await self._quarantine.redrive(queue, ids)
        except NotConfirmed as error:
            raise NotTaken(str(error)) from error

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        async with self._watched():
            return await self._quarantine.discard(queue, ids)

    async def remove(self, queues: Sequence[str]) -> None:
        async with self._watched():
            await self._queues.remove(queues)

    async def check(self) -> str:
        """Asks the server something on both connections: without its majority a node answers, and does no work."""
        async with self._watched():
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

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Notes how a call went, for `links`, and lets no error of pika's through."""
        if not self._is_started:
            raise BrokerUnavailable(CLOSED)
        try:
            yield
        except NotConfirmed:  # by a server that works, unless it was lost meanwhile
            if (raw := self._publishing.raw) is not None and raw.is_open:
                self._trouble = None
            raise
        except BrokerUnavailable as error:
            self._note(str(error))
            raise
        except (AMQPError, OSError) as error:
            self._note(f"RabbitMQ at {self._working.place}: {error}")
            raise BrokerUnavailable(self._trouble) from error
        else:
            self._trouble = None

    def _note(self, trouble: str) -> None:
        if self._is_started and trouble != BLOCKED:  # the server itself says when that is over
            self._trouble = trouble

    async def _send_watched(self, parcels: Sequence[Parcel]) -> None:
        async with self._watched():
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
        depth = await self._queues.depth(name)
        if depth is None:
            return None
        dead_letters = await self._queues.depth(dlq_of(name))
        dead_count = (dead_letters.messages if dead_letters else 0) + self._held(dlq_of(name))
        delayed = await self._queues.delayed(name)
        return QueueState(name, depth.messages + delayed, self._held(name), dead_count, depth.consumers, delayed)

    def _held(self, queue: str) -> int:
        return sum(consumer.unsettled for consumer in self._consumers if consumer.queue == queue)


async def _all(*calls: Awaitable[object]) -> None:
    """Waits for all, and raises what the first to fail raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
