"""`memory://`: queues inside this process, with the same promises as a real broker while the process lives.

Each queue keeps its messages in one lane for each priority. A message that was handed out stays with its consumer until
it is settled; given back, it stands before everything that was never delivered, in the order of publication. It leaves
memory only by an ack, a discard or its expiry. `<queue>.dlq` is a queue too, but it keeps its messages by id. A queue
that nobody declared is forgotten once nothing is in it and nobody consumes it.

Memory is bounded, and no queue can take all of it from the others. A queue that nobody reads takes no more once half of
the memory is taken, so that those which are read find room, however many nobody reads; and one that is read, maybe too
slowly, holds no more than it leaves free. Dead letters have as much again for themselves, first come, first served.

One event loop, no threads, no chance: on a virtual-time loop every run is the same.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from math import inf

from oraculo.brokers.dead_letter_page import DeadLetterPage
from oraculo.brokers.memory_queues import Budget, DeadLetterStock, Lanes, Queue, StoredMessage
from oraculo.errors import BrokerError, BrokerUnavailable, QueueFull
from oraculo.ports.broker import NO_REASON, BrokerStatus, Capabilities, Delivery, Outgoing, Receipt
from oraculo.ports.broker_admin import DeadLetter, FullBroker, NotAnId, QueueState
from oraculo.ports.clock import Clock
from oraculo.wire.naming import dlq_name, dlq_of, is_dlq, source_name

MIB = 1024 * 1024
MESSAGE_OVERHEAD = 200  # what a message costs beside its body, so that empty bodies are bounded too
HIGHEST_PRIORITY = 9
PAUSE_AFTER = 256  # messages one consumer is handed before the rest of the loop gets a turn
NEARLY_FULL = 0.95  # the part of a budget past which the broker says that it is not well
FULL_PAUSE = 5.0  # seconds until a message comes again for which the quarantine had no room
# Seconds until the next look, for each message and for each queue looked at: sweeping takes a few percent of the time
# at most. By the count and not by a clock, for a rehearsal's stands still meanwhile.
SWEEP_PAUSE, QUEUE_PAUSE = 2e-6, 100e-6
_CLOSED = "the memory broker is closed: call start() first"
_LONGEST_ID = 19  # digits; a longer id was never given
_MOST_TOLD = 5  # queues that a refusal names
# What helps when there is no room. The limit is no setting, so nobody is told to raise it.
_ANOTHER_BROKER = "or use a real broker (ORACULO_BROKER_URL)"
_DISCARD = "redrive or discard some of them"
_START_A_WORKER = (
    f"nobody reads it, and half is kept for queues that are read: start a worker for it, {_ANOTHER_BROKER}"
)
_START_MORE = f"no queue takes more than it leaves to the others: start more workers for it, {_ANOTHER_BROKER}"


class _Depot:
    """Every queue of a broker, what they weigh together, and the ways of a message between them."""

    def __init__(self, clock: Clock, delivery_limit: int, max_bytes: int) -> None:
        self.clock = clock
        self.delivery_limit = delivery_limit
        self.work = Budget("messages", max_bytes)
        self.dead = Budget("dead letters", max_bytes)
        self.tokens = 0
        self.expired = 0  # messages dropped because nobody needed them any more
        self.queues: dict[str, Queue] = {}
        self._sequence = 0
        self._next_sweep = 0.0

    # -- the queues -----------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        return self.queues.get(name) or self._new_queue(name)

    def quarantine(self, name: str) -> Queue:
        """The dead-letter queue of `name`; a dead-letter queue is its own."""
        return self.queue(dlq_name(name))

    def letters(self, name: str) -> DeadLetterStock | None:
        """The dead letters of `name`, where there is a place for them."""
        queue = self.queues.get(dlq_name(name))
        return queue.stock if queue and isinstance(queue.stock, DeadLetterStock) else None

    def declare(self, name: str) -> None:
        dlq = self.quarantine(name)
        dlq.is_declared = self.queue(source_name(dlq.name)).is_declared = True

    def tidy(self, name: str) -> None:
        """Forgets the queue and its dead-letter queue where nothing is left of them and nobody declared them.

        Whoever still has such a queue in hand is a consumer that closed, and gets nothing from it any more.
        """
        source, dlq = source_name(name), dlq_name(name)
        if dlq in self.queues and self.queues[dlq].is_idle:
            del self.queues[dlq]
        if dlq not in self.queues and source in self.queues and self.queues[source].is_idle:
            del self.queues[source]

    def is_unused(self, name: str) -> bool:
        """Nothing is in it, nor in its dead-letter queue, and nobody is at either. One that is missing is unused."""
        both = (self.queues.get(each) for each in (source_name(name), dlq_name(name)))
        return all(queue is None or queue.is_unused for queue in both)

    def remove(self, name: str) -> None:
        for each in (source_name(name), dlq_name(name)):
            if queue := self.queues.pop(each, None):
                queue.stop()
                queue.weigh(-queue.held)
                for consumer in list(queue.consumers):
                    consumer.abandon()

    def _new_queue(self, name: str) -> Queue:
        if is_dlq(name):
            self.queue(source_name(name))  # dead letters are shown with their queue, so there is one
            self.queues[name] = Queue(name, DeadLetterStock(), self.dead)
        else:
            self.queues[name] = Queue(name, Lanes(), self.work)
        return self.queues[name]

    # -- the ways of a message ------------------------------------------------------------------------------------

    def admit(self, messages: Sequence[Outgoing]) -> list[bool]:
        """Takes what there is room for, and says of each whether it was taken."""
        queues = [self._put(message) for message in messages]
        for queue in dict.fromkeys(queues):
            if queue is not None:
                queue.wake()
        return [queue is not None for queue in queues]

    def pull(self, queue: Queue, count: int) -> list[StoredMessage]:
        """The next messages that somebody still needs."""
        messages, expired = queue.stock.pull(count, self.clock.now())
        if expired:
            self._expire(queue, expired)
        return messages

    def bury(self, queue: Queue, message: StoredMessage, reason: str) -> None:
        """Moves it to the dead letters of `queue`; raises, and leaves it where it is, when they have no room."""
        more = len(message.body) + len(reason) + MESSAGE_OVERHEAD
        if queue.budget is self.dead:
            more -= message.cost
        grave = self._with_room(dlq_name(queue.name), more)
        if grave is None:
            raise BrokerUnavailable(self.refusal([dlq_name(queue.name)], 1))
        queue.weigh(-message.cost)
        self._entomb(message, reason)
        grave.stock.put(message)
        grave.weigh(message.cost)
        grave.wake()

    def revive(self, name: str, letters: DeadLetterStock, ids: Iterable[int] | None) -> int:
        """Moves dead letters to the end of their queue, as if never delivered. Raises QueueFull when some had no room:
        these stay."""
        found, source = letters.find(ids), source_name(name)
        moved = [letter for letter in found if self._put_if_it_fits(source, self._revived(letter))]
        self.discard(name, letters, moved)
        self.queue(source).wake()
        self.tidy(name)
        if left := len(found) - len(moved):
            raise QueueFull(self.refusal([source] * left, len(found)))
        return len(moved)

    def discard(self, name: str, letters: DeadLetterStock, found: Sequence[StoredMessage]) -> None:
        letters.remove(found)
        self.forget(self.quarantine(name), found)

    def give_back(self, queue: Queue, messages: Sequence[StoredMessage], reason: str, delay: float = 0.0) -> None:
        """Lets them be delivered again, and buries those that were delivered too often. The caller wakes the queue."""
        if queue.budget is not self.dead:  # a dead letter keeps its count and has nowhere else to go
            messages = [message for message in messages if not self._is_buried(queue, message, reason)]
        if delay <= 0:
            queue.stock.put_back(messages)
            return
        for message in messages:
            queue.delay(message, delay)

    def forget(self, queue: Queue, messages: Iterable[StoredMessage]) -> None:
        queue.weigh(-sum([message.cost for message in messages]))

    def _is_buried(self, queue: Queue, message: StoredMessage, reason: str) -> bool:
        """Whether that was its last delivery; where the quarantine is full, it has one more."""
        if message.redeliveries + 1 >= self.delivery_limit:
            try:
                self.bury(queue, message, reason)
            except BrokerUnavailable:
                pass
            else:
                return True
        message.redeliveries += 1
        return False

    def _put(self, outgoing: Outgoing) -> Queue | None:
        """Returns the queue that took it; None when it has no room."""
        name, reason, expires_at = outgoing.queue, outgoing.reason, outgoing.expires_at
        message = self._message(outgoing.body, outgoing.priority, inf if expires_at is None else expires_at)
        if reason is not None or is_dlq(name):
            name = dlq_name(name)
            self._entomb(message, reason or NO_REASON)
        return self._put_if_it_fits(name, message)

    def _put_if_it_fits(self, name: str, message: StoredMessage) -> Queue | None:
        cost = message.cost
        queue = self._with_room(name, cost)
        if queue is not None:
            queue.stock.put(message)
            queue.held += cost
            queue.budget.held += cost
        return queue

    def _message(self, body: bytes, priority: int, expires_at: float) -> StoredMessage:
        self._sequence += 1
        return StoredMessage(self._sequence, body, priority, len(body) + MESSAGE_OVERHEAD, expires_at)

    def _revived(self, letter: StoredMessage) -> StoredMessage:
        return self._message(letter.body, letter.priority, inf)

    def _entomb(self, message: StoredMessage, reason: str) -> None:
        self._sequence += 1
        message.sequence, message.reason, message.died_at = self._sequence, reason, self.clock.now()
        message.cost = len(message.body) + len(reason) + MESSAGE_OVERHEAD
        message.expires_at = inf

    # -- room -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Frees every expired message. The more there was to look at, the longer until it looks again."""
        now = self.clock.now()
        if now < self._next_sweep:
            return
        pause = len(self.queues) * QUEUE_PAUSE
        for queue in list(self.queues.values()):
            pause += queue.ready * SWEEP_PAUSE
            self._expire(queue, queue.pull_expired(now))
            self.tidy(queue.name)
        self._next_sweep = self.clock.now() + pause

    def check_room(self) -> None:
        """Raises when a budget is nearly spent."""
        for budget, remedy in ((self.work, f"start workers, {_ANOTHER_BROKER}"), (self.dead, _DISCARD)):
            if budget.held > NEARLY_FULL * budget.limit:
                self.sweep()
            if budget.held > NEARLY_FULL * budget.limit:
                raise BrokerUnavailable(f"the memory broker is nearly full: {self._told(budget)}; {remedy}")

    def _with_room(self, name: str, cost: int) -> Queue | None:
        """The queue, when it may take so much more."""
        queue = self.queue(name)
        if not self._has_room(queue, cost):
            self.sweep()
            queue = self.queue(name)  # it may have been forgotten, if it was empty
            if not self._has_room(queue, cost):
                self.tidy(name)
                return None
        return queue

    def _has_room(self, queue: Queue, cost: int) -> bool:
        """See the head of this file for who may take how much."""
        budget = queue.budget
        held = budget.held + cost
        if budget is self.dead:
            return held <= budget.limit
        if not queue.consumers:
            return held <= budget.limit // 2
        return queue.held + cost <= budget.limit - held

    def _expire(self, queue: Queue, messages: Sequence[StoredMessage]) -> None:
        self.forget(queue, messages)
        self.expired += len(messages)

    def refusal(self, names: Sequence[str], of: int) -> str:
        """Why messages were not taken, `of` so many: the names of their queues, one for each."""
        by_remedy: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            by_remedy.setdefault(self._remedy(name), []).append(name)
        whys = [
            f"for {_some(queues)}: {self._told(self.dead if remedy == _DISCARD else self.work)}; {remedy}"
            for remedy, queues in by_remedy.items()
        ]
        return f"the memory broker did not take {len(names)} of {of} messages, {'; '.join(whys)}"

    def _remedy(self, name: str) -> str:
        if is_dlq(name):
            return _DISCARD
        queue = self.queues.get(name)
        return _START_MORE if queue and queue.consumers else _START_A_WORKER

    def _told(self, budget: Budget) -> str:
        """What fills it."""
        largest = max((queue for queue in self.queues.values() if queue.budget is budget), key=_held, default=None)
        most = f", most of them {largest.held} in {largest.name}" if largest else ""
        return f"{budget.what} take {budget.held} of {budget.limit} bytes{most}"


def _resting_place(message: Outgoing) -> str:
    """The queue that it goes to."""
    return message.queue if message.reason is None else dlq_name(message.queue)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(names[:_MOST_TOLD]) + more


def _held(queue: Queue) -> int:
    return queue.held


class MemoryConsumer:
    """One subscription to a queue of a MemoryBroker."""

    def __init__(self, depot: _Depot, queue: Queue, prefetch: int, lease: float | None) -> None:
        self._depot = depot
        self._queue = queue
        self._prefetch = prefetch
        self._lease = lease
        self._out: dict[int | str, StoredMessage] = {}  # by token; the lease that ends first stands first
        self._handed = 0  # messages since the event loop last had a turn
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        queue.consumers[self] = None

    @property
    def unsettled(self) -> int:
        return len(self._out)

    @property
    def bodies(self) -> Iterator[bytes]:
        return (message.body for message in self._out.values())

    @property
    def room(self) -> int:
        return self._prefetch - len(self._out)

    async def take(self, limit: int) -> Sequence[Delivery]:
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        await self._pause_now_and_then()
        has_turn = not self._queue.woken
        while not self._closed:
            deliveries = self._pull(limit) if has_turn else None
            if deliveries:
                return deliveries
            await self._queue.turn(self)
            self._handed, has_turn = 0, True
        self._queue.wake()  # the turn was for a message that another may have
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        settle = self._out.pop
        settled = [settle(delivery.token, None) for delivery in deliveries]
        self._depot.forget(self._queue, filter(None, settled))
        self._queue.wake()

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        message = self._settle(delivery)
        if message is not None:
            self._depot.give_back(self._queue, [message], reason, delay)
        self._queue.wake()

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Raises BrokerUnavailable when the quarantine is full; it then comes again later, and is in nobody's way."""
        message = self._settle(delivery)
        if message is None:
            return
        try:
            self._depot.bury(self._queue, message, reason)
        except BrokerUnavailable:
            self._depot.give_back(self._queue, [message], reason, FULL_PAUSE)
            raise
        finally:
            self._queue.wake()

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        for delivery, reason in letters:
            await self.dead_letter(delivery, reason)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        if self._lease is None:
            return
        for delivery in deliveries:
            message = self._settle(delivery)
            if message is not None:
                self._out[delivery.token] = message  # to the end: its lease is now the last to run out
                message.lease_ends = asyncio.get_running_loop().time() + self._lease

    async def close(self) -> None:
        if self._closed:
            return
        self._depot.give_back(self._queue, sorted(self._out.values()), self._too_often("the consumer closed"))
        self.abandon()
        self._queue.wake()
        self._depot.tidy(self._queue.name)

    def abandon(self) -> None:
        """Closes without giving anything back: what it held is gone with the broker, or back already."""
        self._closed = True
        self._out.clear()
        self._queue.consumers.pop(self, None)
        self._queue.release(self)
        if self._timer is not None:
            self._timer.cancel()

    async def _pause_now_and_then(self) -> None:
        """A take that finds messages does not wait; without this a loop of takes would never let others run."""
        if self._handed >= PAUSE_AFTER:
            self._handed = 0
            await asyncio.sleep(0)

    def _pull(self, limit: int) -> list[Delivery]:
        """What there is, less the fair share of the others who have a turn too."""
        queue = self._queue
        share = -(-len(queue.stock) // (queue.woken + 1))
        count = min(limit, self.room, share)
        if count <= 0:
            return []
        return self._hand_out(self._depot.pull(queue, count))

    def _hand_out(self, messages: Sequence[StoredMessage]) -> list[Delivery]:
        name, first = self._queue.name, self._depot.tokens + 1
        self._depot.tokens += len(messages)
        self._handed += len(messages)
        self._out.update(enumerate(messages, first))
        if self._lease is not None:
            self._start_leases(messages, self._lease)
        return [
            Delivery(name, message.body, token, message.redeliveries) for token, message in enumerate(messages, first)
        ]

    def _settle(self, delivery: Delivery) -> StoredMessage | None:
        """The message, which is no longer this consumer's; None when it was settled or redelivered before."""
        return self._out.pop(delivery.token, None)

    def _start_leases(self, messages: Sequence[StoredMessage], lease: float) -> None:
        ends = asyncio.get_running_loop().time() + lease
        for message in messages:
            message.lease_ends = ends
        if self._timer is None:
            self._arm(ends)

    def _arm(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._end_leases, when)

    def _end_leases(self, now: float) -> None:
        self._timer = None
        ended = list(takewhile(lambda token: self._out[token].lease_ends <= now, self._out))
        reason = self._too_often(f"its lease of {self._lease} s ran out")
        self._depot.give_back(self._queue, [self._out.pop(token) for token in ended], reason)
        if self._out:
            self._arm(next(iter(self._out.values())).lease_ends)
        self._queue.wake()

    def _too_often(self, last: str) -> str:
        return f"delivered {self._depot.delivery_limit} times and never settled; the last time {last}"


class MemoryBroker:
    """The broker behind `memory://`.

    `delivery_limit`: how often a message is delivered, at most, before it goes to the dead letters.
    `lease`: seconds after which a delivery that was neither settled nor extended is delivered again; None is never.
    `max_bytes`: what all messages may take together, MESSAGE_OVERHEAD for each included; dead letters may take as much
    again, so that neither stops the other. How much of it a queue may take is at the head of this file.
    """

    def __init__(
        self, clock: Clock, *, delivery_limit: int = 20, lease: float | None = None, max_bytes: int = 256 * MIB
    ) -> None:
        self._clock = clock
        self._delivery_limit = delivery_limit
        self._lease = lease
        self._max_bytes = max_bytes
        self._depot: _Depot | None = None

    @property
    def name(self) -> str:
        return "memory"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(durable=False, shared=False, priorities=True, counts_consumers=True, peeks=True)

    async def start(self) -> None:
        """Opens it, empty. What was in it before a `close` is lost, as it is when the process ends."""
        if self._depot is None:
            self._depot = _Depot(self._clock, self._delivery_limit, self._max_bytes)

    async def declare(self, queues: Sequence[str]) -> None:
        depot = self._open()
        for queue in queues:
            depot.declare(queue)

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus(self.name, None if self._depot is not None else _CLOSED)]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        depot = self._open()
        for priority in {message.priority for message in messages}:
            if not 0 <= priority <= HIGHEST_PRIORITY:
                raise BrokerError(f"priority: must be 0 to {HIGHEST_PRIORITY}, got {priority}")
        taken = depot.admit(messages)
        here = Receipt(self.name)
        if all(taken):
            return [here] * len(messages)
        left = [_resting_place(message) for message, is_in in zip(messages, taken, strict=True) if not is_in]
        full = Receipt(error=QueueFull(depot.refusal(left, len(messages))))
        return [here if is_in else full for is_in in taken]

    async def consume(self, queue: str, *, prefetch: int) -> MemoryConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        depot = self._open()
        return MemoryConsumer(depot, depot.queue(queue), prefetch, self._lease)

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        depot = self._open()
        depot.sweep()
        wanted = list(depot.queues) if names is None else names
        return [self._state(depot, name) for name in wanted if name in depot.queues and not is_dlq(name)]

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        if after is not None and not _number(after):
            raise NotAnId(after)
        letters, source = self._open().letters(queue), source_name(queue)
        page = DeadLetterPage(limit)
        page.fill(_shown_letter(source, one) for one in (letters.peek(limit, _number(after or "")) if letters else ()))
        return page.letters

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        letters, source = self._open().letters(queue), source_name(queue)
        for letter in letters.find(None if ids is None else sorted(map(_number, ids))) if letters else ():
            see(_shown_letter(source, letter))

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        """Moves what there is room for, and raises QueueFull when that is not all."""
        depot = self._open()
        letters = depot.letters(queue)
        return depot.revive(queue, letters, None if ids is None else map(_number, ids)) if letters else 0

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        depot = self._open()
        letters = depot.letters(queue)
        found = letters.find(map(_number, ids)) if letters else []
        if letters and found:
            depot.discard(queue, letters, found)
            depot.tidy(queue)
        return len(found)

    async def remove(self, queues: Sequence[str]) -> None:
        depot = self._open()
        for queue in queues:
            depot.remove(queue)

    async def remove_unused(self, queues: Sequence[str]) -> Sequence[str]:
        """Look and remove in one step, between which nothing can come."""
        depot = self._open()
        unused = [queue for queue in queues if depot.is_unused(queue)]
        await self.remove(unused)
        return unused

    async def check(self) -> str:
        """Raises BrokerUnavailable, too, when it is nearly full: before no queue has room."""
        depot = self._open()
        depot.check_room()
        held, dead, limit = depot.work.held / MIB, depot.dead.held / MIB, depot.work.limit / MIB
        used = f"{held:.1f} MiB of messages and {dead:.1f} MiB of dead letters, of {limit:.1f} MiB each"
        return f"memory, in this process: {len(depot.queues)} queues, {used}, {depot.expired} expired"

    async def close(self) -> None:
        depot, self._depot = self._depot, None
        for queue in depot.queues.values() if depot else ():
            queue.stop()
            for consumer in list(queue.consumers):
                consumer.abandon()

    def _open(self) -> _Depot:
        if self._depot is None:
            raise BrokerUnavailable(_CLOSED)
        return self._depot

    @staticmethod
    def _state(depot: _Depot, name: str) -> QueueState:
        queue, dlq = depot.queues[name], depot.queues.get(dlq_of(name))
        dead = dlq.ready + dlq.unacked if dlq else 0
        consumers, taken = len(queue.consumers), tuple(queue.taken())
        return QueueState(name, queue.ready, queue.unacked, dead, consumers, queue.delayed, taken=taken)


def _number(letter_id: str) -> int:
    """The sequence behind the id of a dead letter; 0, which no letter has, for what cannot be one."""
    is_number = letter_id.isascii() and letter_id.isdecimal() and len(letter_id) <= _LONGEST_ID
    return int(letter_id) if is_number else 0


def _shown_letter(queue: str, letter: StoredMessage) -> DeadLetter:
    reason = letter.reason or NO_REASON
    return DeadLetter(str(letter.sequence), queue, letter.body, reason, letter.died_at, letter.redeliveries)
