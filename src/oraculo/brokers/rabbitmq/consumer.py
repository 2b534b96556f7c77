"""A subscription to one queue of RabbitMQ: deliveries, and what becomes of each of them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any, NamedTuple

from pika.exceptions import AMQPError

from oraculo.brokers.prefetch import Prefetch
from oraculo.brokers.rabbitmq.connection import Channel, unused
from oraculo.brokers.rabbitmq.dead_letters import (
    OUR_HEADERS,
    REDELIVERIES,
    carried,
    dead,
    redeliveries_of,
)
from oraculo.brokers.rabbitmq.frames import Deliveries, Parcel
from oraculo.brokers.rabbitmq.publisher import NotConfirmed
from oraculo.brokers.rabbitmq.queues import NotDelayed, Queues
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Delivery
from oraculo.ports.clock import Clock
from oraculo.wire.naming import dlq_name, is_dlq

MOST_PREFETCH = 65_535  # what AMQP can say
FAILED_MOVE_PAUSE = 1.0  # seconds until it is tried again to move a message, or it comes again
LONGEST_MOVE_PAUSE = 5.0
LONGEST_HELD = 60.0  # seconds that a message waits here which can wait in no queue: it takes a place of the prefetch
MOVED_TOGETHER = 50  # of the messages that could not be moved before
IDLE_AFTER = 1.0  # seconds without a message, after which it asks for few again

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
        self._prefetch = Prefetch(1)
        self._subscriptions = count(1)
        self._subscription = ""  # the consumer tag
        self._is_changing = False  # how many it asks for: the server has not answered yet
        self._surplus: list[Token] = []  # came meanwhile, and is too much to hold
        self._idle: asyncio.TimerHandle | None = None
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
        self._prefetch = Prefetch(min(prefetch, MOST_PREFETCH))
        await self._channel.call("basic_qos", prefetch_count=self._prefetch.asked)
        self._subscription = self._next_subscription()
        await self._channel.call("basic_consume", **self._consuming)

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
            kept = OUR_HEADERS if is_dlq(self.queue) else ()  # a letter comes back as what it was
            counted = carried(properties, kept, **{REDELIVERIES: deliveries})
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
        async with self._burying:
            if self._fault is not None:
                raise self._lost()
            # What is given back counts as a delivery. Past its limit RabbitMQ moves it without our reason, or drops it.
            moves: dict[Token, _Move] = {}
            for delivery, reason in letters:  # not before their turn: they may have been settled, or lost, meanwhile
                properties = self._held.get(delivery.token)
                if properties is not None and delivery.token not in self._moving:
                    letter = dead(properties, reason, self._clock.now(), delivery.redeliveries)
                    moves[delivery.token] = _Move(self._grave, letter, delivery.body)
            if moves:
                await self._move(moves)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing to do: a delivery is its consumer's while that lives. Raises BrokerUnavailable when it does not."""
        if self._fault is not None:
            raise self._lost()

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self.abandon()
        finally:  # also when whoever closes it is cancelled: the server would go on giving it messages
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
        self._held[tag] = properties
        if self._is_changing and self._prefetch.is_over:
            self._surplus.append(tag)
            return
        delivery = Delivery(self.queue, body, tag, redeliveries_of(properties, is_redelivered))
        self._prefetch.add(tag, len(body))
        if not self._is_changing and self._prefetch.adapt():
            self._change_prefetch()
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
        self._prefetch.clear()
        self._surplus.clear()
        if self._idle is not None:
            self._idle.cancel()
        self._moving.clear()
        self._kept.clear()
        self._waiting.clear()
        self._arrived.set()
        for task in self._tasks:
            task.cancel()

    def _tell_ack(self, tag: Token, *, multiple: bool = False) -> None:
        if self._channel.is_open:  # else what it held comes again
            self._channel.raw.connection.ack(self._channel.raw.channel_number, tag, multiple=multiple)

    # -- how many it asks for -------------------------------------------------------------------------------------

    @property
    def _consuming(self) -> dict[str, Any]:
        return {"queue": self.queue, "on_message_callback": unused, "consumer_tag": self._subscription}

    def _next_subscription(self) -> str:
        return f"oraculo-{next(self._subscriptions)}"

    def _change_prefetch(self) -> None:
        """AMQP lets a subscription keep its prefetch for life: there is a new one before the old one ends, because some
        queues delete themselves without any. Until the server has ended the old one, messages still come by it."""
        before, self._subscription = self._subscription, self._next_subscription()
        self._is_changing = True
        with suppress(BrokerError):  # the channel is closing, and `_lose` hears of it
            self._channel.tell("basic_qos", prefetch_count=self._prefetch.asked)
            self._channel.tell("basic_consume", **self._consuming)
            self._channel.tell("basic_cancel", consumer_tag=before, callback=self._has_changed)

    def _has_changed(self, _: object) -> None:
        """Now it can give back what was too much: before, the old subscription would have brought it again at once."""
        self._is_changing = False
        surplus, self._surplus = self._surplus, []
        for tag in surplus:
            self._give_back(tag)
        if self._prefetch.adapt():
            self._change_prefetch()

    def _note_idle(self) -> None:
        """Expect large messages again, however small the last ones were."""
        self._idle = None
        if self._held or self._fault is not None or self._closed:
            return
        if not self._is_changing and self._prefetch.begin_anew():
            self._change_prefetch()

    # -- the ways of a message ------------------------------------------------------------------------------------

    def _settles(self, tag: Token) -> bool:
        """Whether it was still this consumer's to settle; it no longer is."""
        if tag in self._moving or self._held.pop(tag, None) is None:
            return False
        self._prefetch.remove(tag)
        if not self._held and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_AFTER, self._note_idle)
        return True

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
            if not self._moving.issuperset(moves):
                return  # the consumer ended while a queue was made to wait in: it comes again
            await self._publish(parcels)
        except NotDelayed:
            raise  # it is still ours to move
        except BrokerError as error:
            if len(moves) > 1 and not isinstance(error, BrokerUnavailable):
                self._moving.difference_update(moves)
                await self._move_singly(moves)
                return
            left = _not_taken(moves, parcels, error)
            self._have_moved(moves.keys() - left.keys())
            if not self._keeps(left):
                raise
        except BaseException:
            self._moving.difference_update(moves)
            raise
        else:
            self._have_moved(moves)

    async def _move_singly(self, moves: dict[Token, _Move]) -> None:
        """One of them is refused, and nobody tells which of the others were taken before it: each that is tried with it
        again may come to lie there once more."""
        refusal: BrokerError | None = None
        for tag, move in moves.items():
            if tag in self._held and tag not in self._moving:  # else it was settled, or the consumer has ended
                try:
                    await self._move({tag: move})
                except BrokerError as error:
                    refusal = refusal or error
        if refusal is not None:
            raise refusal

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
        delivery.redeliveries -= 1  # without this one, which nobody was shown
        self._run(self._buried(delivery, reason), "bury a message")

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"{what} of {self.queue}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _buried(self, delivery: Delivery, reason: str) -> None:
        with suppress(BrokerError):  # then it comes again, and so to this point
            await self.dead_letter(delivery, reason)
