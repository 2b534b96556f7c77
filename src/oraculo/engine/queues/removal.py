"""The removal of queues that were made for requests and that nobody uses any more.

The engine looks whether an unknown queue exists before it sends there. If not, a note with its name goes to the queue
`oraculo.filas` of that broker, which so forgets both or neither. Now and then an engine takes the notes, removes the
queues that are unused, and puts the other notes back. A note is with one engine at a time, so two never remove the same
queue.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import msgspec

from oraculo.core.chunks import pages
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.queues.known import KnownQueues
from oraculo.errors import BrokerError
from oraculo.ports.broker import Consumer, Delivery, Outgoing, Receipt, publish_all
from oraculo.ports.broker_admin import FullBroker, QueueState
from oraculo.ports.clock import Clock
from oraculo.ports.telemetry import QueuesRemoved, Telemetry
from oraculo.wire.naming import RABBITMQ_PREFIX, QueueNames

LOOK_EVERY = 3600.0  # seconds, or a tenth of the time without use if that is less
NEW = 60.0  # seconds for which a noted queue may not exist yet
_TAKEN_TOGETHER = 500  # notes
_REMOVED_TOGETHER = 20  # queues, to which nothing is sent meanwhile
_TAKING = 5.0  # seconds for a broker to bring notes that it says it has


class QueueNote(msgspec.Struct, frozen=True):
    """A note that a queue was made, with its physical name, and when it was last seen in use."""

    fila: str
    usada_em: float


_decoder = msgspec.json.Decoder(QueueNote)


class NotedQueues:
    """The queues that were made for requests.

    `planned` returns the queues of known pipelines and routes, which stay. `after`: seconds without use; 0 removes
    none.
    """

    def __init__(
        self,
        broker: FullBroker,
        known: KnownQueues,
        planned: Callable[[], Iterable[str]],
        names: QueueNames,
        peers: Peers,
        clock: Clock,
        telemetry: Telemetry,
        after: float,
    ) -> None:
        self._broker = broker
        self.known = known
        self._planned = planned
        self._names = names
        self._peers = peers
        self._clock = clock
        self._telemetry = telemetry
        self._after = after
        self._sending = Counter[str]()  # messages on their way, by unknown queue
        self._removing: set[str] = set()
        self._removed = asyncio.Event()

    # -- making ---------------------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        """Publish as the broker does, after noting each queue that must be made. None is removed meanwhile."""
        new = self._unknown(message.queue for message in messages)
        while not self._removing.isdisjoint(new):
            await self._removed.wait()
        self._sending.update(new)
        try:
            await self.note(new)
            receipts = await self._broker.publish(messages)
            taken = (message for message, receipt in zip(messages, receipts, strict=True) if receipt.error is None)
            self.known.add(message.queue for message in taken)
            return receipts
        finally:
            self._sending -= Counter(new)

    async def note(self, queues: Iterable[str]) -> None:
        """Note those queues that do not exist.

        Without a broker none is noted: one queue too many does less harm than a command that is not sent.
        """
        if (new := self._unknown(queues)) and self._has_notes:
            with suppress(BrokerError):
                await self._note_missing(new)

    def _unknown(self, queues: Iterable[str]) -> set[str]:
        return {queue for queue in queues if queue not in self.known and not queue.startswith(RABBITMQ_PREFIX)}

    @property
    def _has_notes(self) -> bool:
        """Return whether queues are noted. A broker inside this process forgets an empty queue by itself."""
        return self._after > 0 and self._broker.capabilities.shared

    async def _note_missing(self, queues: Collection[str]) -> None:
        there = {state.queue for state in await self._broker.queues(sorted(queues))}
        now = self._clock.now()
        if missing := [QueueNote(queue, now) for queue in sorted(queues) if queue not in there]:
            await publish_all(self._broker, [self._message(note) for note in missing])

    def _message(self, note: QueueNote) -> Outgoing:
        return Outgoing(self._names.made, msgspec.json.encode(note))

    # -- removing -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while self._has_notes:
            await asyncio.sleep(min(LOOK_EVERY, self._after / 10))
            for broker in self._broker.behind():
                with suppress(BrokerError):  # the next look tries again
                    await self.look_through(broker)
        await asyncio.Event().wait()

    async def look_through(self, broker: FullBroker) -> None:
        """Take the notes of one broker, and act on them."""
        is_alone = self._peers.is_alone and not self._peers.has_apis_beside
        if not (is_alone or broker.capabilities.removes_safely):
            return
        left = sum(state.ready for state in await broker.queues([self._names.made]))
        if not left:
            return
        consumer = await broker.consume(self._names.made, prefetch=_TAKEN_TOGETHER)
        try:
            while left > 0:
                async with asyncio.timeout(_TAKING):
                    taken = await consumer.take(min(left, _TAKEN_TOGETHER))
                left -= max(len(taken), 1)
                await self._settle(broker, consumer, taken)
        except TimeoutError:
            pass  # another engine has them
        finally:
            await consumer.close()

    async def _settle(self, broker: FullBroker, consumer: Consumer, taken: Sequence[Delivery]) -> None:
        notes: dict[str, QueueNote] = {}
        for delivery in taken:
            with suppress(msgspec.DecodeError):
                note = _decoder.decode(delivery.body)
                if note.fila not in notes or notes[note.fila].usada_em < note.usada_em:
                    notes[note.fila] = note
        if again := await self._acted_on(broker, list(notes.values())):
            await publish_all(broker, [self._message(note) for note in again])
        await consumer.ack(taken)

    async def _acted_on(self, broker: FullBroker, notes: Sequence[QueueNote]) -> list[QueueNote]:
        """Remove unused queues, and return the notes that are still needed."""
        states = {state.queue: state for state in await broker.queues([note.fila for note in notes])}
        planned = set(map(self._names.physical, self._planned()))
        now, again, unused = self._clock.now(), list[QueueNote](), list[str]()
        for note in notes:
            state = states.get(note.fila)
            if state is None:
                again += [note] if now - note.usada_em < NEW else []
            elif state.consumers:
                continue  # a worker reads it, and it is the worker's from now on
            elif note.fila in planned or note.fila in self.known or _holds_something(state):
                again.append(QueueNote(note.fila, now))
            elif now - note.usada_em < self._after:
                again.append(note)
            else:
                unused.append(note.fila)
        for some in pages(unused, _REMOVED_TOGETHER):
            gone = await self._remove(broker, some)
            again += [QueueNote(queue, now) for queue in some if queue not in gone]
        return again

    async def _remove(self, broker: FullBroker, queues: Sequence[str]) -> Collection[str]:
        self._removing = {queue for queue in queues if not self._sending[queue] and queue not in self.known}
        self._removed.clear()
        try:
            gone = await broker.remove_unused(sorted(self._removing))
        finally:
            self._removing = set()
            self._removed.set()
        if gone:
            self._telemetry.emit(QueuesRemoved(tuple(gone)))
        return gone


def _holds_something(state: QueueState) -> bool:
    return bool(state.ready or state.unacked or state.dead_letters)
