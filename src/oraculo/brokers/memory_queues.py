"""The queues of the memory broker and their stocks of messages.

An ordinary queue orders its messages by priority and age. A dead-letter queue finds its messages by number.
`memory_server` moves messages between queues.
"""

import asyncio
import heapq
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from math import inf
from typing import Protocol

import msgspec


class StoredMessage(msgspec.Struct, order=True, gc=False):
    """A message in a queue. Messages sort by `sequence`, which is unique."""

    sequence: int
    body: bytes
    priority: int
    cost: int
    expires_at: float = inf
    redeliveries: int = 0
    lease_ends: float = 0.0
    reason: str | None = None
    died_at: float = 0.0


class Budget:
    """The bytes that messages of one kind take, and their limit."""

    __slots__ = ("held", "limit", "what")

    def __init__(self, what: str, limit: int) -> None:
        self.what = what
        self.limit = limit
        self.held = 0


class Taker(Protocol):
    """A consumer as its queue sees it."""

    @property
    def unsettled(self) -> int: ...

    @property
    def bodies(self) -> Iterator[bytes]: ...

    @property
    def room(self) -> int: ...

    def abandon(self) -> None: ...


class Stock:
    """The messages of an ordinary queue: highest priority first, and oldest first within a priority."""

    __slots__ = ("_heap", "_soonest")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, StoredMessage]] = []  # the negative priority, the number, the message
        self._soonest = inf  # the earliest expiry, or a time before it

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, message: StoredMessage) -> None:
        heapq.heappush(self._heap, (-message.priority, message.sequence, message))
        if message.expires_at < self._soonest:
            self._soonest = message.expires_at

    def put_back(self, messages: Sequence[StoredMessage]) -> None:
        for message in messages:
            self.put(message)

    def pull(self, count: int, now: float) -> tuple[list[StoredMessage], list[StoredMessage]]:
        """Take out the next live messages, and the expired ones in front of them."""
        live: list[StoredMessage] = []
        expired: list[StoredMessage] = []
        while self._heap and len(live) < count:
            message = heapq.heappop(self._heap)[2]
            (live if message.expires_at > now else expired).append(message)
        return live, expired

    def pull_expired(self, now: float) -> list[StoredMessage]:
        """Take out every expired message. Costs nothing while none can have expired."""
        if now < self._soonest:
            return []
        expired = [message for _, _, message in self._heap if message.expires_at <= now]
        self._heap = [entry for entry in self._heap if entry[2].expires_at > now]
        heapq.heapify(self._heap)
        self._soonest = min((message.expires_at for _, _, message in self._heap), default=inf)
        return expired


class DeadLetterStock:
    """The stock of a dead-letter queue: oldest first, and each found by its number. Nothing in it expires.

    `_order` has the numbers, sorted, and `_head` is the place of the first that was not pulled. A removed message
    leaves its number in `_order`; once such numbers are more than half of it, `_order` is built anew.
    """

    __slots__ = ("_head", "_letters", "_order")

    def __init__(self) -> None:
        self._letters: dict[int, StoredMessage] = {}
        self._order: list[int] = []
        self._head = 0

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, message: StoredMessage) -> None:
        """Add a new dead letter, whose number is the highest."""
        self._letters[message.sequence] = message
        self._order.append(message.sequence)

    def put_back(self, messages: Sequence[StoredMessage]) -> None:
        """Add dead letters that were pulled before."""
        for message in sorted(messages, reverse=True):
            number = message.sequence
            self._letters[number] = message
            if self._head and (self._head == len(self._order) or number < self._order[self._head]):
                self._head -= 1
                self._order[self._head] = number
            else:
                insort(self._order, number, lo=self._head)

    def pull(self, count: int, now: float) -> tuple[list[StoredMessage], list[StoredMessage]]:
        pulled: list[StoredMessage] = []
        while self._letters and len(pulled) < count:
            letter = self._letters.pop(self._order[self._head], None)
            self._head += 1
            if letter is not None:
                pulled.append(letter)
        self._compact()
        return pulled, []

    def pull_expired(self, now: float) -> list[StoredMessage]:
        return []

    def peek(self, limit: int, after: int) -> list[StoredMessage]:
        order, letters, found = self._order, self._letters, list[StoredMessage]()
        for place in range(bisect_right(order, after, lo=self._head), len(order)):
            if len(found) >= limit:
                break
            letter = letters.get(order[place])
            if letter is not None:
                found.append(letter)
        return found

    def find(self, numbers: Iterable[int] | None) -> list[StoredMessage]:
        """Return all dead letters, or those of the given numbers, each once and in the order asked for."""
        if numbers is None:
            return self.peek(len(self._letters), 0)
        return [self._letters[number] for number in dict.fromkeys(numbers) if number in self._letters]

    def remove(self, letters: Iterable[StoredMessage]) -> None:
        for letter in letters:
            del self._letters[letter.sequence]
        self._compact()

    def _compact(self) -> None:
        if len(self._order) > 2 * len(self._letters) + 64:
            self._order = [number for number in islice(self._order, self._head, None) if number in self._letters]
            self._head = 0


class Queue:
    """A stock of messages, delayed messages, and the consumers that share them."""

    def __init__(self, name: str, stock: Stock | DeadLetterStock, budget: Budget) -> None:
        self.name = name
        self.stock = stock
        self.budget = budget
        self.held = 0  # bytes in this queue, a part of the budget
        self.is_declared = False
        self.consumers: dict[Taker, None] = {}
        self.woken = 0  # consumers that got a turn and have not used it yet
        self._waiting: dict[asyncio.Future[None], Taker] = {}
        self._delayed: list[tuple[float, StoredMessage]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def delayed(self) -> int:
        return len(self._delayed)

    @property
    def ready(self) -> int:
        return len(self.stock) + len(self._delayed)

    @property
    def unacked(self) -> int:
        return sum(consumer.unsettled for consumer in self.consumers)

    def taken(self) -> Iterator[bytes]:
        """Yield the bodies of the messages that consumers hold."""
        return chain.from_iterable(consumer.bodies for consumer in self.consumers)

    @property
    def is_idle(self) -> bool:
        """Return True when the queue is empty, has no consumer and was not declared."""
        return not (self.is_declared or self.consumers or self.stock or self._delayed)

    def weigh(self, cost: int) -> None:
        """Add to the bytes in this queue and in its budget."""
        self.held += cost
        self.budget.held += cost

    def pull_expired(self, now: float) -> list[StoredMessage]:
        expired = self.stock.pull_expired(now)
        late = [message for _, message in self._delayed if message.expires_at <= now]
        if late:
            self._delayed = [entry for entry in self._delayed if entry[1].expires_at > now]
            heapq.heapify(self._delayed)
            self._arm()
        return expired + late

    async def turn(self, consumer: Taker) -> None:
        """Wait until there is a message for this consumer. Consumers that waited longer come first."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = consumer
        self.wake()
        try:
            if turn.done():
                await asyncio.sleep(0)  # consumers with an earlier turn go first
            await turn
        except asyncio.CancelledError:
            self._leave(turn)
            self.wake()  # pass on a turn that was given already
            raise
        self._leave(turn)

    def wake(self) -> None:
        """Give a turn to as many waiting consumers as there are messages, longest waiting first."""
        turns = len(self.stock) - self.woken
        if turns <= 0 or not self._waiting:
            return
        able = (turn for turn, consumer in self._waiting.items() if not turn.done() and consumer.room > 0)
        self._give_turns(list(islice(able, turns)))

    def release(self, consumer: Taker) -> None:
        """End the waiting of a consumer that closes."""
        self._give_turns([turn for turn, waiting in self._waiting.items() if waiting is consumer and not turn.done()])

    def delay(self, message: StoredMessage, seconds: float) -> None:
        """Put a message back after `seconds`."""
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
        if self._delayed:
            self._timer = asyncio.get_running_loop().call_at(self._delayed[0][0], self._return_delayed)

    def _return_delayed(self) -> None:
        # The loop may fire a timer slightly early, so the first message is due whatever the clock says.
        now = max(asyncio.get_running_loop().time(), self._delayed[0][0])
        due: list[StoredMessage] = []
        while self._delayed and self._delayed[0][0] <= now:
            due.append(heapq.heappop(self._delayed)[1])
        self.stock.put_back(due)
        self._arm()
        self.wake()
