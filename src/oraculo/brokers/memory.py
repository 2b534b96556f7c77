"""`memory://`: queues inside this process, with the same promises as a real broker while the process lives.

Each queue keeps its messages in one lane for each priority. A message that was handed out stays with its consumer until
it is settled; given back, it stands before everything that was never delivered, in the order of publication. It leaves
memory only by an ack or a discard. `<queue>.dlq` is a queue too, but it keeps its messages by id.

One event loop, no threads, no chance: on a virtual-time loop every run is the same.
"""

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

import msgspec

from oraculo.core.naming import DLQ_SUFFIX, dlq_of, shown
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Capabilities, DeadLetter, Delivery, Outgoing, QueueState
from oraculo.ports.clock import Clock

MIB = 1024 * 1024
MESSAGE_OVERHEAD = 200  # what a message costs beside its body, so that empty bodies are bounded too
HIGHEST_PRIORITY = 9
PAUSE_AFTER = 256  # messages one consumer is handed before the rest of the loop gets a turn
NO_REASON = "published to the dead-letter queue without a reason"
_LONGEST_ID = 19  # digits; a longer id was never given


class _Message(msgspec.Struct, order=True, gc=False):
    """What a queue holds. Sorted by its sequence, which no two messages share."""

    sequence: int
    body: bytes
    priority: int
    cost: int
    redeliveries: int = 0
    lease_ends: float = 0.0
    reason: str | None = None
    died_at: float = 0.0


class _Lane:
    """The waiting messages of one priority.

    Whatever was handed out is older than all that was not, so those given back need no place among the fresh ones:
    a heap before the deque keeps the order, and no return costs more than its logarithm.
    """

    __slots__ = ("fresh", "returned")

    def __init__(self) -> None:
        self.fresh: deque[_Message] = deque()
        self.returned: list[_Message] = []

    def pull(self, count: int) -> list[_Message]:
        pulled = [heapq.heappop(self.returned) for _ in range(min(count, len(self.returned)))]
        count -= len(pulled)
        if count >= len(self.fresh):
            pulled += self.fresh
            self.fresh.clear()
        else:
            pulled += [self.fresh.popleft() for _ in range(count)]
        return pulled


class _Lanes:
    """The stock of an ordinary queue: the highest priority first, in order within each."""

    __slots__ = ("_lanes", "_size")

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, message: _Message) -> None:
        self._lane(message.priority).fresh.append(message)
        self._size += 1

    def put_back(self, messages: Sequence[_Message]) -> None:
        for message in messages:
            heapq.heappush(self._lane(message.priority).returned, message)
        self._size += len(messages)

    def pull(self, count: int) -> list[_Message]:
        pulled: list[_Message] = []
        for lane in self._lanes.values():
            pulled += lane.pull(count - len(pulled))
            if len(pulled) == count:
                break
        self._size -= len(pulled)
        return pulled

    def _lane(self, priority: int) -> _Lane:
        return self._lanes.get(priority) or self._new_lane(priority)

    def _new_lane(self, priority: int) -> _Lane:
        lane = _Lane()
        self._lanes = dict(sorted({**self._lanes, priority: lane}.items(), reverse=True))
        return lane


class _Quarantine:
    """The stock of a dead-letter queue: oldest first, and each found by its number."""

    __slots__ = ("_letters",)

    def __init__(self) -> None:
        self._letters: OrderedDict[int, _Message] = OrderedDict()

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, message: _Message) -> None:
        self._letters[message.sequence] = message

    def put_back(self, messages: Sequence[_Message]) -> None:
        oldest = next(iter(self._letters), None)
        for message in sorted(messages, reverse=True):
            self._letters[message.sequence] = message
            self._letters.move_to_end(message.sequence, last=False)
        if oldest is not None and messages and max(messages).sequence > oldest:
            self._letters = OrderedDict(sorted(self._letters.items()))

    def pull(self, count: int) -> list[_Message]:
        return [self._letters.popitem(last=False)[1] for _ in range(min(count, len(self._letters)))]

    def peek(self, limit: int, after: int) -> list[_Message]:
        return list(islice((letter for number, letter in self._letters.items() if number > after), limit))

    def remove(self, numbers: Iterable[int]) -> list[_Message]:
        return [self._letters.pop(number) for number in numbers if number in self._letters]


class _Queue:
    """A stock of messages, those that wait for their delay, and the consumers that share them."""

    def __init__(self, name: str, stock: _Lanes | _Quarantine) -> None:
        self.name = name
        self.stock = stock
        self.consumers: dict[MemoryConsumer, None] = {}
        self.woken = 0  # takes that were given a turn and have not used it yet
        self._waiting: dict[asyncio.Future[None], MemoryConsumer] = {}
        self._delayed: list[tuple[float, _Message]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> int:
        return len(self.stock) + len(self._delayed)

    @property
    def unacked(self) -> int:
        return sum(consumer.unsettled for consumer in self.consumers)

    async def turn(self, consumer: "MemoryConsumer") -> None:
        """Waits until there is something for this consumer, behind those who waited longer."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = consumer
        self.wake()
        try:
            if turn.done():
                await asyncio.sleep(0)  # others had their turn before: let them use it
            await turn
        except asyncio.CancelledError:
            self._leave(turn)
            self.wake()  # the turn may have been given already: let the next one have it
            raise
        self._leave(turn)

    def wake(self) -> None:
        """Gives a turn to as many waiting takes as there are messages, the longest waiting first."""
        turns = len(self.stock) - self.woken
        if turns <= 0 or not self._waiting:
            return
        able = (turn for turn, consumer in self._waiting.items() if not turn.done() and consumer.room > 0)
        self._give_turns(list(islice(able, turns)))

    def release(self, consumer: "MemoryConsumer") -> None:
        """Ends the waiting of a consumer that closes."""
        self._give_turns([turn for turn, its in self._waiting.items() if its is consumer and not turn.done()])

    def delay(self, message: _Message, seconds: float) -> None:
        """Puts the message back, but not before so many seconds."""
        due = asyncio.get_running_loop().time() + seconds
        heapq.heappush(self._delayed, (due, message))
        if self._delayed[0][1] is message:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_turns(self, turns: Sequence[asyncio.Future[None]]) -> None:
        for turn in turns:
            turn.set_result(None)
        self.woken += len(turns)

    def _leave(self, turn: asyncio.Future[None]) -> None:
        del self._waiting[turn]
        self.woken -= not turn.cancelled()

    def _arm(self) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_at(self._delayed[0][0], self._return_delayed)

    def _return_delayed(self) -> None:
        # The loop fires a timer up to its clock's resolution early: the first one is due whatever the clock says.
        now = max(asyncio.get_running_loop().time(), self._delayed[0][0])
        due: list[_Message] = []
        while self._delayed and self._delayed[0][0] <= now:
            due.append(heapq.heappop(self._delayed)[1])
        self.stock.put_back(due)
        if self._delayed:
            self._arm()
        self.wake()


class _Depot:
    """Every queue of a broker, what they weigh together, and the ways of a message between them."""

    def __init__(self, clock: Clock, delivery_limit: int, max_bytes: int) -> None:
        self.clock = clock
        self.delivery_limit = delivery_limit
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.tokens = 0
        self.queues: dict[str, _Queue] = {}
        self._sequence = 0

    def queue(self, name: str) -> _Queue:
        return self.queues.get(name) or self._new_queue(name)

    def quarantine(self, name: str) -> tuple[_Queue, _Quarantine]:
        """The dead-letter queue of `name`; a dead-letter queue is its own."""
        queue = self.queue(name if name.endswith(DLQ_SUFFIX) else dlq_of(name))
        assert isinstance(queue.stock, _Quarantine)
        return queue, queue.stock

    def admit(self, messages: Sequence[Outgoing]) -> None:
        """Takes all of them or, when they would pass the limit of memory, none."""
        cost = sum([len(message.body) for message in messages]) + MESSAGE_OVERHEAD * len(messages)
        if self.held_bytes + cost > self.max_bytes:
            raise BrokerUnavailable(self._full(cost))
        self.held_bytes += cost
        for queue in {id(queue): queue for queue in map(self._put, messages)}.values():
            queue.wake()

    def bury(self, queue: _Queue, message: _Message, reason: str) -> None:
        """Moves it to the dead letters of `queue`."""
        grave, letters = self.quarantine(queue.name)
        self._entomb(message, reason)
        letters.put(message)
        grave.wake()

    def revive(self, queue: str, letters: Sequence[_Message]) -> None:
        """Moves dead letters to the end of their queue, as if never delivered."""
        target = self.queue(queue.removesuffix(DLQ_SUFFIX))
        for letter in letters:
            self.held_bytes -= len(letter.reason or "")
            target.stock.put(self._message(letter.body, letter.priority))
        target.wake()

    def give_back(self, queue: _Queue, messages: Sequence[_Message], reason: str, delay: float = 0.0) -> None:
        """Lets them be delivered again, and buries those that were delivered too often. The caller wakes the queue."""
        if not isinstance(queue.stock, _Quarantine):  # a dead letter keeps its count and has nowhere else to go
            messages = self._count_delivery(queue, messages, reason)
        if delay <= 0:
            queue.stock.put_back(messages)
            return
        for message in messages:
            queue.delay(message, delay)

    def forget(self, messages: Iterable[_Message]) -> None:
        self.held_bytes -= sum([message.cost for message in messages])

    def _count_delivery(self, queue: _Queue, messages: Sequence[_Message], reason: str) -> list[_Message]:
        """Those that may be delivered once more."""
        kept = []
        for message in messages:
            if message.redeliveries + 1 >= self.delivery_limit:
                self.bury(queue, message, reason)
            else:
                message.redeliveries += 1
                kept.append(message)
        return kept

    def _new_queue(self, name: str) -> _Queue:
        is_dlq = name.endswith(DLQ_SUFFIX)
        if is_dlq:
            self.queue(name.removesuffix(DLQ_SUFFIX))  # dead letters are shown with their queue, so there is one
        self.queues[name] = _Queue(name, _Quarantine() if is_dlq else _Lanes())
        return self.queues[name]

    def _put(self, outgoing: Outgoing) -> _Queue:
        name, reason = outgoing.queue, outgoing.reason
        queue = self.queue(name) if reason is None else self.quarantine(name)[0]
        message = self._message(outgoing.body, outgoing.priority)
        if type(queue.stock) is _Quarantine:
            self._entomb(message, reason or NO_REASON)
        queue.stock.put(message)
        return queue

    def _message(self, body: bytes, priority: int) -> _Message:
        self._sequence += 1
        return _Message(self._sequence, body, priority, len(body) + MESSAGE_OVERHEAD)

    def _entomb(self, message: _Message, reason: str) -> None:
        self._sequence += 1
        self.held_bytes += len(reason) - len(message.reason or "")
        message.sequence, message.reason, message.died_at = self._sequence, reason, self.clock.now()
        message.cost = len(message.body) + len(reason) + MESSAGE_OVERHEAD

    def _full(self, cost: int) -> str:
        held = f"{self.held_bytes} of {self.max_bytes} bytes are in use"
        return f"the memory broker is full: {held} and {cost} more were to be published; consume, or raise max_bytes"


class MemoryConsumer:
    """One subscription to a queue of a MemoryBroker."""

    def __init__(self, depot: _Depot, queue: _Queue, prefetch: int, lease: float | None) -> None:
        self._depot = depot
        self._queue = queue
        self._prefetch = prefetch
        self._lease = lease
        self._out: dict[int | str, _Message] = {}  # by token; the lease that ends first stands first
        self._handed = 0  # messages since the event loop last had a turn
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        queue.consumers[self] = None

    @property
    def unsettled(self) -> int:
        return len(self._out)

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
        self._depot.forget(filter(None, settled))
        self._queue.wake()

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        message = self._settle(delivery)
        if message is not None:
            self._depot.give_back(self._queue, [message], reason, delay)
        self._queue.wake()

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        message = self._settle(delivery)
        if message is not None:
            self._depot.bury(self._queue, message, reason)
        self._queue.wake()

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
        return self._hand_out(queue.stock.pull(count))

    def _hand_out(self, messages: Sequence[_Message]) -> list[Delivery]:
        name, first = self._queue.name, self._depot.tokens + 1
        self._depot.tokens += len(messages)
        self._handed += len(messages)
        self._out.update(enumerate(messages, first))
        if self._lease is not None:
            self._start_leases(messages, self._lease)
        return [
            Delivery(name, message.body, token, message.redeliveries) for token, message in enumerate(messages, first)
        ]

    def _settle(self, delivery: Delivery) -> _Message | None:
        """The message, which is no longer this consumer's; None when it was settled or redelivered before."""
        return self._out.pop(delivery.token, None)

    def _start_leases(self, messages: Sequence[_Message], lease: float) -> None:
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
    `max_bytes`: what all messages may take together, MESSAGE_OVERHEAD for each and dead letters included.
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
        return Capabilities(durable=False, shared=False, priorities=True, counts_consumers=True)

    async def start(self) -> None:
        """Opens it, empty. What was in it before a `close` is lost, as it is when the process ends."""
        if self._depot is None:
            self._depot = _Depot(self._clock, self._delivery_limit, self._max_bytes)

    async def declare(self, queues: Sequence[str]) -> None:
        depot = self._open()
        for queue in queues:
            depot.quarantine(queue)

    async def publish(self, messages: Sequence[Outgoing]) -> None:
        """All or nothing. Raises BrokerUnavailable when they would pass `max_bytes`."""
        depot = self._open()
        for priority in {message.priority for message in messages}:
            if not 0 <= priority <= HIGHEST_PRIORITY:
                raise BrokerError(f"priority: must be 0 to {HIGHEST_PRIORITY}, got {priority}")
        depot.admit(messages)

    async def consume(self, queue: str, *, prefetch: int) -> MemoryConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        depot = self._open()
        return MemoryConsumer(depot, depot.queue(queue), prefetch, self._lease)

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        depot = self._open()
        wanted = list(depot.queues) if names is None else names
        return [self._state(depot, name) for name in wanted if name in depot.queues and not name.endswith(DLQ_SUFFIX)]

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        if after is not None and not _number(after):
            raise BrokerError(f"after: not the id of a dead letter: {shown(after)}")
        if self._dlq_is_missing(queue):
            return []
        dlq, letters = self._open().quarantine(queue)
        source = dlq.name.removesuffix(DLQ_SUFFIX)
        return [_shown_letter(source, letter) for letter in letters.peek(limit, _number(after or ""))]

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        removed = self._remove(queue, ids)
        self._open().revive(queue, removed)
        return len(removed)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        removed = self._remove(queue, ids)
        self._open().forget(removed)
        return len(removed)

    async def check(self) -> str:
        depot = self._open()
        held, limit = depot.held_bytes / MIB, depot.max_bytes / MIB
        return f"memory, in this process: {len(depot.queues)} queues, {held:.1f} of {limit:.1f} MiB"

    async def close(self) -> None:
        depot, self._depot = self._depot, None
        for queue in depot.queues.values() if depot else ():
            queue.stop()
            for consumer in list(queue.consumers):
                consumer.abandon()

    def _open(self) -> _Depot:
        if self._depot is None:
            raise BrokerUnavailable("the memory broker is closed: call start() first")
        return self._depot

    def _dlq_is_missing(self, queue: str) -> bool:
        return queue.removesuffix(DLQ_SUFFIX) not in self._open().queues

    def _remove(self, queue: str, ids: Sequence[str] | None) -> list[_Message]:
        if self._dlq_is_missing(queue):
            return []
        letters = self._open().quarantine(queue)[1]
        return letters.pull(len(letters)) if ids is None else letters.remove(map(_number, ids))

    @staticmethod
    def _state(depot: _Depot, name: str) -> QueueState:
        queue, dlq = depot.queues[name], depot.queues.get(dlq_of(name))
        dead = dlq.ready + dlq.unacked if dlq else 0
        return QueueState(name, queue.ready, queue.unacked, dead, len(queue.consumers))


def _number(letter_id: str) -> int:
    """The sequence behind the id of a dead letter; 0, which no letter has, for what cannot be one."""
    is_number = letter_id.isascii() and letter_id.isdecimal() and len(letter_id) <= _LONGEST_ID
    return int(letter_id) if is_number else 0


def _shown_letter(queue: str, letter: _Message) -> DeadLetter:
    reason = letter.reason or NO_REASON
    return DeadLetter(str(letter.sequence), queue, letter.body, reason, letter.died_at, letter.redeliveries)
