"""A subscription to one queue of RabbitMQ: deliveries, and what becomes of each of them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any

from pika.exceptions import AMQPError

from oraculo.brokers.prefetch import Prefetch
from oraculo.brokers.rabbitmq.connection import Channel, unused
from oraculo.brokers.rabbitmq.frames import Deliveries, Parcel
from oraculo.brokers.rabbitmq.properties import OUR_HEADERS, REDELIVERIES, carried, dead, redeliveries_of
from oraculo.brokers.rabbitmq.queues import Queues
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Delivery, Receipt
from oraculo.ports.clock import Clock
from oraculo.wire.naming import dlq_name, is_dlq

MAX_PREFETCH = 65_535  # AMQP has no larger number
FAILED_MOVE_PAUSE = 1.0  # seconds until a message is moved again that could not be moved, or comes again
LONGEST_MOVE_PAUSE = 5.0
LONGEST_HELD = 60.0  # seconds that a message waits here when it can wait in no queue: it takes a place of the prefetch
MOVED_TOGETHER = 50  # of the messages that could not be moved before
IDLE_AFTER = 1.0  # seconds without a message, after which it asks for few again

Token = Any  # a delivery tag of AMQP; the port knows it as `int | str`
Publish = Callable[[Sequence[Parcel]], Awaitable[Sequence[Receipt]]]
Moves = Mapping[Token, Parcel]  # messages on their way from this queue to another


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
        self._held: dict[Token, bytes] = {}  # the properties of unsettled messages, by delivery tag, ascending
        self._prefetch = Prefetch(1)
        self._subscriptions = count(1)
        self._subscription = ""  # the consumer tag
        self._is_changing = False  # it asks for another number, and the server has not answered yet
        self._surplus: list[Token] = []  # held messages that came meanwhile and are too much
        self._idle: asyncio.TimerHandle | None = None
        self._moving: set[Token] = set()  # held messages on their way to another queue
        self._kept: dict[Token, Parcel] = {}  # moving ones that could not be moved yet
        self._max_kept = 0
        self._waiting: deque[Delivery] = deque()  # held messages that nobody took yet
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BrokerError | None = None
        self._closed = False

    @property
    def unsettled(self) -> int:
        return len(self._held)

    async def subscribe(self, prefetch: int) -> None:
        # Kept messages must not fill the whole prefetch, or the queue would be deaf. A queue of ours moves by itself
        # what is given back too often.
        self._max_kept = prefetch // 2 if self._is_counting else prefetch
        self._channel.on_close = self._lose
        self._channel.listen(Deliveries(self._on_message))
        self._channel.raw.add_on_cancel_callback(self._on_cancel)
        self._prefetch = Prefetch(min(prefetch, MAX_PREFETCH))
        await self._channel.call("basic_qos", prefetch_count=self._prefetch.asked)
        self._subscription = self._next_subscription()
        await self._channel.call("basic_consume", **self._consuming)

    async def take(self, limit: int) -> Sequence[Delivery]:
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        while not self._waiting:
            if self._closed:
                return []
            self._check()
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
            kept = OUR_HEADERS if is_dlq(self.queue) else ()  # a dead letter comes back as what it was
            counted = carried(properties, kept, **{REDELIVERIES: deliveries})
            queue = self._queues.delay(self.queue, delay) if delay > 0 else self.queue

            def wait_here(_: Token) -> None:
                self._run(self._retry_after(delivery, min(delay, LONGEST_HELD), reason), "retry a message")

            await self._move({delivery.token: Parcel(queue, counted, delivery.body)}, wait_here)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        await self.dead_letter_all([(delivery, reason)])

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """Move messages to the dead letters. One that cannot be moved now is kept until it can be.

        Raises BrokerUnavailable when too many are kept so. Such a message comes again, after a pause.
        """
        self._check()
        moves: dict[Token, Parcel] = {}
        for delivery, reason in letters:
            properties = self._held.get(delivery.token)
            if properties is not None and delivery.token not in self._moving:
                letter = dead(properties, reason, self._clock.now(), delivery.redeliveries)
                moves[delivery.token] = Parcel(dlq_name(self.queue), letter, delivery.body)
        if moves:
            await self._move(moves, self._give_back_later)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Check the subscription: a delivery is its consumer's while that lives."""
        self._check()

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self.abandon()
        finally:  # also when the caller is cancelled: the server would go on delivering
            await self._channel.close()

    async def abandon(self) -> None:
        """Close it without a word to the server, which learns of it when the channel or the connection ends."""
        self._closed = True
        self._on_end(self)
        self._forget()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self) -> None:
        if self._fault is not None:
            raise BrokerUnavailable(f"the subscription to {self.queue} is lost: {self._fault}")

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
        """Forget what was held: the server gives it to others."""
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

    # -- how many it asks for -------------------------------------------------------------------------------------

    @property
    def _consuming(self) -> dict[str, Any]:
        return {"queue": self.queue, "on_message_callback": unused, "consumer_tag": self._subscription}

    def _next_subscription(self) -> str:
        return f"oraculo-{next(self._subscriptions)}"

    def _change_prefetch(self) -> None:
        """Begin a new subscription before the old one ends, because AMQP cannot change the prefetch of one.

        A queue may delete itself when it has no subscription. Messages come by the old one until the server ends it.
        """
        before, self._subscription = self._subscription, self._next_subscription()
        self._is_changing = True
        with suppress(BrokerError):  # the channel is closing, and `_lose` hears of it
            self._channel.tell("basic_qos", prefetch_count=self._prefetch.asked)
            self._channel.tell("basic_consume", **self._consuming)
            self._channel.tell("basic_cancel", consumer_tag=before, callback=self._has_changed)

    def _has_changed(self, _: object) -> None:
        """Give back what was too much. Before, the old subscription would have brought it again at once."""
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

    # -- settling -------------------------------------------------------------------------------------------------

    def _ack(self, tags: Iterable[Token]) -> None:
        """Send one ack for all up to the oldest that is still held, and one for each behind it."""
        settled = [tag for tag in tags if self._settle(tag)]
        oldest = next(iter(self._held), None)
        together = settled if oldest is None else [tag for tag in settled if tag < oldest]
        if together:
            self._send_ack(max(together), multiple=True)
        if len(together) < len(settled):
            for tag in set(settled).difference(together):
                self._send_ack(tag)

    def _send_ack(self, tag: Token, *, multiple: bool = False) -> None:
        if self._channel.is_open:  # else what it held comes again
            self._channel.raw.connection.ack(self._channel.raw.channel_number, tag, multiple=multiple)

    def _give_back(self, tag: Token) -> None:
        if self._settle(tag):
            with suppress(AMQPError):  # the channel is closing in this moment, and what it held comes again
                self._channel.raw.basic_reject(tag, requeue=True)  # since RabbitMQ 4.3 a nack is not counted

    def _settle(self, tag: Token) -> bool:
        """Let go of a message. Return False when it was not this consumer's to settle."""
        if tag in self._moving or self._held.pop(tag, None) is None:
            return False
        self._prefetch.remove(tag)
        if not self._held and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_AFTER, self._note_idle)
        return True

    # -- moving to another queue ----------------------------------------------------------------------------------

    async def _move(self, moves: Moves, refused: Callable[[Token], None]) -> None:
        """Publish messages elsewhere. Each leaves this queue once it is confirmed there.

        One that cannot be moved now is kept: giving it back would count as a delivery, and past its limit it would
        lose its reason, or be dropped by a queue without dead letters. Raises BrokerUnavailable where there is no room
        to keep it. `refused` handles a message that its new queue never takes.
        """
        self._moving.update(moves)
        try:
            left, error = await self._try_to_move(moves, refused)
        except BaseException:
            self._moving.difference_update(moves)
            raise
        has_room = True
        for tag in left:
            if tag in self._moving and len(self._kept) < self._max_kept:
                self._keep(tag, moves[tag])
            else:
                self._give_back_later(tag)
                has_room = False
        if error is not None and not has_room:
            raise error

    async def _try_to_move(
        self, moves: Moves, refused: Callable[[Token], None]
    ) -> tuple[list[Token], BrokerUnavailable | None]:
        """Return what could not be moved now, and why."""
        try:
            receipts = await self._publish(list(moves.values()))
        except BrokerUnavailable as error:
            return list(moves), error
        left, taken, unavailable = list[Token](), list[Token](), None
        for tag, receipt in zip(moves, receipts, strict=True):
            if receipt.error is None:
                taken.append(tag)
            elif isinstance(receipt.error, BrokerUnavailable):
                left.append(tag)
                unavailable = receipt.error
            elif tag in self._moving:  # else the consumer has ended
                refused(tag)
        moved = self._moving.intersection(taken)
        self._moving -= moved
        self._ack(moved)
        return left, unavailable

    def _keep(self, tag: Token, parcel: Parcel) -> None:
        self._kept[tag] = parcel
        if len(self._kept) == 1:
            self._run(self._move_kept(), "move what could not be moved")

    async def _move_kept(self) -> None:
        """Move kept messages, until none is left or the consumer ends."""
        pause = FAILED_MOVE_PAUSE
        await asyncio.sleep(pause)
        while self._kept:
            moves = dict(islice(self._kept.items(), MOVED_TOGETHER))
            left, _ = await self._try_to_move(moves, self._give_back_later)
            for tag in moves:
                self._kept.pop(tag, None)
            if left:
                self._kept |= {tag: moves[tag] for tag in left}  # the others come first the next time
                pause = min(2 * pause, LONGEST_MOVE_PAUSE)
                await asyncio.sleep(pause)

    def _give_back_later(self, tag: Token) -> None:
        asyncio.get_running_loop().call_later(FAILED_MOVE_PAUSE, self._not_moved, tag)

    def _not_moved(self, tag: Token) -> None:
        if tag in self._moving:
            self._moving.discard(tag)
            self._give_back(tag)

    async def _retry_after(self, delivery: Delivery, delay: float, reason: str) -> None:
        """Hold a message that can wait nowhere else."""
        await asyncio.sleep(delay)
        self._moving.discard(delivery.token)
        with suppress(BrokerError):  # then it comes again
            await self.retry(delivery, 0.0, reason)

    def _bury(self, delivery: Delivery) -> None:
        """Put away a message that was delivered too often before it came here."""
        reason = f"delivered {delivery.redeliveries} times and never settled"
        delivery.redeliveries -= 1  # without this one, which nobody was shown
        self._run(self._buried(delivery, reason), "bury a message")

    async def _buried(self, delivery: Delivery, reason: str) -> None:
        with suppress(BrokerError):  # then it comes again, and so to this point
            await self.dead_letter(delivery, reason)

    def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"{what} of {self.queue}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
