"""`memory://`: a broker inside this process, with the promises of a real one while the process lives.

It uses one event loop, no threads and no randomness, so on a virtual clock every run is the same.
"""

from collections.abc import Callable, Collection, Sequence

from oraculo.brokers.dead_letter_page import DeadLetterPage
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.brokers.memory_queues import StoredMessage
from oraculo.brokers.memory_server import MemoryServer
from oraculo.errors import BrokerError, BrokerUnavailable, QueueFull
from oraculo.ports.broker import NO_REASON, BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DeadLetter, FullBroker, NotAnId, QueueState
from oraculo.ports.clock import Clock
from oraculo.wire.naming import dlq_name, dlq_of, is_dlq, source_name

MIB = 1024 * 1024
HIGHEST_PRIORITY = 9
_CLOSED = "the memory broker is closed: call start() first"
_LONGEST_ID = 19  # digits; no id has more


class MemoryBroker:
    """The broker behind `memory://`.

    `delivery_limit` is how often a message is delivered before it becomes a dead letter. `lease` is the number of
    seconds after which an unsettled delivery comes again; None means never. `max_bytes` bounds all messages together,
    each with MESSAGE_OVERHEAD. Dead letters have a second budget of the same size, so that neither kind stops the
    other.
    """

    def __init__(
        self, clock: Clock, *, delivery_limit: int = 20, lease: float | None = None, max_bytes: int = 256 * MIB
    ) -> None:
        self._clock = clock
        self._delivery_limit = delivery_limit
        self._lease = lease
        self._max_bytes = max_bytes
        self._server: MemoryServer | None = None

    @property
    def name(self) -> str:
        return "memory"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(durable=False, shared=False, priorities=True, counts_consumers=True, peeks=True)

    async def start(self) -> None:
        """Open the broker, empty. Messages from before a `close` are lost, as they are when the process ends."""
        if self._server is None:
            self._server = MemoryServer(self._clock, self._delivery_limit, self._max_bytes)

    async def declare(self, queues: Sequence[str]) -> None:
        server = self._open()
        for queue in queues:
            server.declare(queue)

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus(self.name, None if self._server is not None else _CLOSED)]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        server = self._open()
        for priority in {message.priority for message in messages}:
            if not 0 <= priority <= HIGHEST_PRIORITY:
                raise BrokerError(f"priority: must be 0 to {HIGHEST_PRIORITY}, got {priority}")
        taken = server.admit(messages)
        here, full = Receipt(self.name), dict[str, Receipt]()
        if all(taken):
            return [here] * len(messages)
        names = [message.queue if message.reason is None else dlq_name(message.queue) for message in messages]
        for name, was_taken in zip(names, taken, strict=True):
            if not was_taken and name not in full:
                full[name] = Receipt(error=QueueFull(server.refusal(name)))
        return [here if was_taken else full[name] for name, was_taken in zip(names, taken, strict=True)]

    async def consume(self, queue: str, *, prefetch: int) -> MemoryConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        server = self._open()
        return MemoryConsumer(server, server.queue(queue), prefetch, self._lease)

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        server = self._open()
        server.sweep()
        wanted = list(server.queues) if names is None else names
        return [self._state(server, name) for name in wanted if name in server.queues and not is_dlq(name)]

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        if after is not None and not _number(after):
            raise NotAnId(after)
        letters, source = self._open().dead_letters(queue), source_name(queue)
        page = DeadLetterPage(limit)
        page.fill(_shown(source, one) for one in (letters.peek(limit, _number(after or "")) if letters else ()))
        return page.letters

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        letters, source = self._open().dead_letters(queue), source_name(queue)
        for letter in letters.find(None if ids is None else sorted(map(_number, ids))) if letters else ():
            see(_shown(source, letter))

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        """Move the dead letters that there is room for. Raises QueueFull when some stay."""
        server = self._open()
        letters = server.dead_letters(queue)
        return server.redrive(queue, letters, None if ids is None else map(_number, ids)) if letters else 0

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        server = self._open()
        letters = server.dead_letters(queue)
        found = letters.find(map(_number, ids)) if letters else []
        if letters and found:
            server.discard(queue, letters, found)
            server.tidy(queue)
        return len(found)

    async def remove(self, queues: Sequence[str]) -> None:
        server = self._open()
        for queue in queues:
            server.remove(queue)

    async def check(self) -> str:
        """Return how full the broker is.

        Raises BrokerUnavailable when it is nearly full, before any queue is out of room.
        """
        server = self._open()
        server.check_room()
        held, dead, limit = server.work.held / MIB, server.dead.held / MIB, server.work.limit / MIB
        used = f"{held:.1f} MiB of messages and {dead:.1f} MiB of dead letters, of {limit:.1f} MiB each"
        return f"memory, in this process: {len(server.queues)} queues, {used}, {server.expired} expired"

    async def close(self) -> None:
        server, self._server = self._server, None
        for queue in server.queues.values() if server else ():
            queue.stop()
            for consumer in list(queue.consumers):
                consumer.abandon()

    def _open(self) -> MemoryServer:
        if self._server is None:
            raise BrokerUnavailable(_CLOSED)
        return self._server

    @staticmethod
    def _state(server: MemoryServer, name: str) -> QueueState:
        queue, dlq = server.queues[name], server.queues.get(dlq_of(name))
        dead = dlq.ready + dlq.unacked if dlq else 0
        consumers, taken = len(queue.consumers), tuple(queue.taken())
        return QueueState(name, queue.ready, queue.unacked, dead, consumers, queue.delayed, taken=taken)


def _number(letter_id: str) -> int:
    """Return the sequence behind the id of a dead letter, or 0, which no dead letter has."""
    is_number = letter_id.isascii() and letter_id.isdecimal() and len(letter_id) <= _LONGEST_ID
    return int(letter_id) if is_number else 0


def _shown(queue: str, letter: StoredMessage) -> DeadLetter:
    reason = letter.reason or NO_REASON
    return DeadLetter(str(letter.sequence), queue, letter.body, reason, letter.died_at, letter.redeliveries)
