"""The queues behind `memory://`: where a message goes, and which queue still has room.

A message leaves memory only by an ack, a discard or its expiry. A queue that nobody declared is forgotten once it is
empty and nobody consumes it.

Memory is bounded, and no queue can take all of it:
- A queue without a consumer takes messages while less than half of the memory is in use. The other half stays free for
queues with consumers.
- A queue with a consumer holds at most as many bytes as are still free.
- Dead letters have a second budget of the same size, first come, first served.
"""

from collections.abc import Iterable, Sequence
from math import inf

from oraculo.brokers.memory_queues import Budget, DeadLetterStock, Queue, Stock, StoredMessage
from oraculo.errors import BrokerUnavailable, QueueFull
from oraculo.ports.broker import NO_REASON, Outgoing
from oraculo.ports.clock import Clock
from oraculo.wire.naming import dlq_name, is_dlq, source_name

MESSAGE_OVERHEAD = 200  # bytes that a message costs beside its body, so that empty bodies are bounded too
NEARLY_FULL = 0.95  # of a budget: `check` fails beyond it, before a queue refuses messages
# Seconds of pause after a sweep, for each message and each queue that it looked at. So sweeps take a few percent of the
# time at most. The pause is counted, not measured, because virtual time stands still during a sweep.
SWEEP_PAUSE, QUEUE_PAUSE = 2e-6, 100e-6
# Advice for when there is no room. The limit is no setting, so the advice never says to raise it.
_ANOTHER_BROKER = "or use a real broker (ORACULO_BROKER_URL)"
_DISCARD = "redrive or discard some of them"
_START_A_WORKER = (
    f"nobody reads it, and half is kept for queues that are read: start a worker for it, {_ANOTHER_BROKER}"
)
_START_MORE = f"it holds as much as it may: start more workers for it, {_ANOTHER_BROKER}"


class MemoryServer:
    """The queues of one memory broker, their budgets, and the moves of messages between them."""

    def __init__(self, clock: Clock, delivery_limit: int, max_bytes: int) -> None:
        self.clock = clock
        self.delivery_limit = delivery_limit
        self.work = Budget("messages", max_bytes)
        self.dead = Budget("dead letters", max_bytes)
        self.tokens = 0
        self.expired = 0  # messages dropped so far because they had expired
        self.queues: dict[str, Queue] = {}
        self._sequence = 0
        self._next_sweep = 0.0

    # -- queues ---------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        return self.queues.get(name) or self._new_queue(name)

    def dead_letters(self, name: str) -> DeadLetterStock | None:
        """Return the dead letters of `name`, or None where it has no dead-letter queue."""
        queue = self.queues.get(dlq_name(name))
        return queue.stock if queue and isinstance(queue.stock, DeadLetterStock) else None

    def declare(self, name: str) -> None:
        dlq = self.queue(dlq_name(name))
        dlq.is_declared = self.queue(source_name(dlq.name)).is_declared = True

    def tidy(self, name: str) -> None:
        """Forget the queue and its dead-letter queue where they are empty, undeclared and without consumers."""
        source, dlq = source_name(name), dlq_name(name)
        if dlq in self.queues and self.queues[dlq].is_idle:
            del self.queues[dlq]
        if dlq not in self.queues and source in self.queues and self.queues[source].is_idle:
            del self.queues[source]

    def remove(self, name: str) -> None:
        for each in (source_name(name), dlq_name(name)):
            if queue := self.queues.pop(each, None):
                queue.stop()
                queue.weigh(-queue.held)
                for consumer in list(queue.consumers):
                    consumer.abandon()

    def _new_queue(self, name: str) -> Queue:
        if is_dlq(name):
            self.queue(source_name(name))  # dead letters are listed with their queue, so it has to exist
            self.queues[name] = Queue(name, DeadLetterStock(), self.dead)
        else:
            self.queues[name] = Queue(name, Stock(), self.work)
        return self.queues[name]

    # -- messages -------------------------------------------------------------------------------------------------

    def admit(self, messages: Sequence[Outgoing]) -> list[bool]:
        """Take the messages that there is room for. Return for each whether it was taken."""
        queues = [self._put(message) for message in messages]
        for queue in dict.fromkeys(queues):
            if queue is not None:
                queue.wake()
        return [queue is not None for queue in queues]

    def pull(self, queue: Queue, count: int) -> list[StoredMessage]:
        """Take the next messages out of the stock, and drop expired ones."""
        messages, expired = queue.stock.pull(count, self.clock.now())
        if expired:
            self._expire(queue, expired)
        return messages

    def dead_letter(self, queue: Queue, message: StoredMessage, reason: str) -> None:
        """Move a message to the dead letters of `queue`. Raises BrokerUnavailable when they have no room."""
        more = len(message.body) + len(reason) + MESSAGE_OVERHEAD
        if queue.budget is self.dead:
            more -= message.cost
        place = self._with_room(dlq_name(queue.name), more)
        if place is None:
            raise BrokerUnavailable(self.refusal(dlq_name(queue.name)))
        queue.weigh(-message.cost)
        self._mark_dead(message, reason)
        place.stock.put(message)
        place.weigh(message.cost)
        place.wake()

    def redrive(self, name: str, letters: DeadLetterStock, ids: Iterable[int] | None) -> int:
        """Move dead letters to the end of their queue, as if never delivered.

        Raises QueueFull when some had no room. Those stay.
        """
        found, source = letters.find(ids), source_name(name)
        moved = [letter for letter in found if self._put_if_it_fits(source, self._redriven(letter))]
        self.discard(name, letters, moved)
        self.queue(source).wake()
        self.tidy(name)
        if len(moved) < len(found):
            raise QueueFull(self.refusal(source))
        return len(moved)

    def discard(self, name: str, letters: DeadLetterStock, found: Sequence[StoredMessage]) -> None:
        letters.remove(found)
        self.forget(self.queue(dlq_name(name)), found)

    def give_back(self, queue: Queue, messages: Sequence[StoredMessage], reason: str, delay: float = 0.0) -> None:
        """Make messages deliverable again, except that one at the delivery limit becomes a dead letter.

        The caller wakes the queue.
        """
        if queue.budget is not self.dead:  # a dead letter has nowhere else to go
            messages = [message for message in messages if not self._dead_letter_at_limit(queue, message, reason)]
        if delay <= 0:
            queue.stock.put_back(messages)
            return
        for message in messages:
            queue.delay(message, delay)

    def forget(self, queue: Queue, messages: Iterable[StoredMessage]) -> None:
        queue.weigh(-sum([message.cost for message in messages]))

    def _dead_letter_at_limit(self, queue: Queue, message: StoredMessage, reason: str) -> bool:
        """Move a message at its delivery limit to the dead letters, and return whether it was moved.

        Where they are full, it is delivered once more.
        """
        if message.redeliveries + 1 >= self.delivery_limit:
            try:
                self.dead_letter(queue, message, reason)
            except BrokerUnavailable:
                pass
            else:
                return True
        message.redeliveries += 1
        return False

    def _put(self, outgoing: Outgoing) -> Queue | None:
        """Return the queue that took the message, or None when it has no room."""
        name, reason, expires_at = outgoing.queue, outgoing.reason, outgoing.expires_at
        message = self._message(outgoing.body, outgoing.priority, inf if expires_at is None else expires_at)
        if reason is not None or is_dlq(name):
            name = dlq_name(name)
            self._mark_dead(message, reason or NO_REASON)
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

    def _redriven(self, letter: StoredMessage) -> StoredMessage:
        return self._message(letter.body, letter.priority, inf)

    def _mark_dead(self, message: StoredMessage, reason: str) -> None:
        self._sequence += 1
        message.sequence, message.reason, message.died_at = self._sequence, reason, self.clock.now()
        message.cost = len(message.body) + len(reason) + MESSAGE_OVERHEAD
        message.expires_at = inf

    # -- room -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Drop every expired message. A larger sweep means a longer pause until the next."""
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
        """Raise BrokerUnavailable when a budget is nearly spent."""
        for budget, remedy in ((self.work, f"start workers, {_ANOTHER_BROKER}"), (self.dead, _DISCARD)):
            if budget.held > NEARLY_FULL * budget.limit:
                self.sweep()
            if budget.held > NEARLY_FULL * budget.limit:
                raise BrokerUnavailable(f"the memory broker is nearly full: {self._usage(budget)}; {remedy}")

    def _with_room(self, name: str, cost: int) -> Queue | None:
        """Return the queue if it may hold `cost` more bytes, after a sweep of expired messages if that is needed."""
        queue = self.queue(name)
        if not self._has_room(queue, cost):
            self.sweep()
            queue = self.queue(name)  # the sweep forgets empty queues
            if not self._has_room(queue, cost):
                self.tidy(name)
                return None
        return queue

    def _has_room(self, queue: Queue, cost: int) -> bool:
        """Apply the rules at the head of this file."""
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

    def refusal(self, name: str) -> str:
        """Return why a queue has no room."""
        queue = self.queues.get(name)
        budget, remedy = self.work, _START_MORE if queue and queue.consumers else _START_A_WORKER
        if is_dlq(name):
            budget, remedy = self.dead, _DISCARD
        return f"the memory broker has no room for {name}: {self._usage(budget)}; {remedy}"

    def _usage(self, budget: Budget) -> str:
        """Return how full a budget is, and which queue holds most of it."""
        queues = [queue for queue in self.queues.values() if queue.budget is budget]
        largest = max(queues, key=lambda queue: queue.held, default=None)
        most = f", most of them {largest.held} in {largest.name}" if largest else ""
        return f"{budget.what} take {budget.held} of {budget.limit} bytes{most}"
