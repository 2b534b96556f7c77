"""The publisher: lines of messages on their way to the broker, until each is confirmed or refused."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from oraculo.core.queue_health import QueueHealth
from oraculo.engine.queues.known import KnownQueues
from oraculo.engine.send.run_order import RunOrder
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge
from oraculo.ports.broker import Outgoing, Publisher, Receipt
from oraculo.ports.clock import Clock
from oraculo.ports.telemetry import CommandsPublished, PublishFailed, Telemetry

PUBLISHED_TOGETHER = 500
PUBLISHED_BYTES = 1024 * 1024  # a broker has seconds to confirm a batch, and a connection may be slow
MAX_WAITING = 50_000
MAX_WAITING_BYTES = 64 * 1024 * 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_REFUSING_FOR = 60.0  # seconds for which a queue counts as refusing: longer than until it is tried again

Key = tuple[str, int, int, bool]  # run id, task, attempt, whether it is the dead letter
Entry = tuple[Key, Outgoing]
_Numbered = tuple[int, Entry]  # in the order in which they were added


class Sender(Protocol):
    """The owner of the messages."""

    async def still_wanted(self, entries: Sequence[Entry], have_waited: bool) -> Sequence[Entry]:
        """Return the entries that are still wanted. A run may end while its commands wait for the broker."""
        ...

    def holds_back(self) -> bool:
        """Return whether the engine has too much to decide, so that the commands of wide runs wait for `wake`."""
        ...

    def confirmed(self, keys: Sequence[Key], brokers: Sequence[str], started: float) -> None:
        """Take note of messages that were taken, each with its broker and the start of the try."""
        ...

    def refused(self, refused: Sequence[tuple[Entry, BrokerError]]) -> None: ...


class PublishLine:
    """Messages that wait for the broker, in the order of their runs.

    A broker that is away is waited for; a refused message does not hold up the others. `refusing` and `known` note the
    queues that did not take something and those that did.
    """

    def __init__(
        self,
        broker: Publisher,
        sender: Sender,
        refusing: QueueHealth,
        known: KnownQueues,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._broker = broker
        self._sender = sender
        self._refusing = refusing
        self._known = known
        self._clock = clock
        self._telemetry = telemetry
        self._turns: RunOrder[_Numbered] = RunOrder()
        self._waiting = Counter[str]()  # messages in `_turns`, by queue
        self._numbers = count()
        self._under_way: Sequence[_Numbered] = ()  # what the broker is asked to take now
        self._bytes = 0  # of all that waits or is under way
        self._waited = 0  # lower numbers waited already when the broker was last away
        self.trouble: str | None = None  # why the broker did not take the last batch
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def load(self) -> float:
        """The part of its room that is taken, from 0 to 1."""
        return max((len(self._turns) + len(self._under_way)) / MAX_WAITING, self._bytes / MAX_WAITING_BYTES)

    @property
    def has_more(self) -> bool:
        """Return whether more waits than the batch that the broker is asked to take now."""
        return bool(self._turns)

    def has_waiting(self, queue: str) -> bool:
        """Return whether a message for the queue waits that the broker was not asked to take yet."""
        return queue in self._waiting

    def add(self, key: Key, message: Outgoing, *, age: float = 0.0, is_one_of_many: bool = False) -> None:
        """Line up a message of a run that was created at `age`."""
        numbered = next(self._numbers), (key, message)
        self._turns.add(key[0], numbered, priority=message.priority, age=age, is_one_of_many=is_one_of_many)
        self._waiting[message.queue] += 1
        self._bytes += len(message.body)
        self._empty.clear()
        self._wake.set()

    def wake(self) -> None:
        """Look again whether the commands of wide runs may go out."""
        self._wake.set()

    async def flushed(self) -> None:
        """Return when every added message is confirmed or refused."""
        await self._empty.wait()

    async def run(self) -> None:
        """Publish batch after batch, for ever."""
        while True:
            self._under_way = self._under_way or self._next_batch()
            if not self._under_way:
                if not self._turns:
                    self._empty.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._publish([entry for _, entry in self._under_way])
            self._bytes -= sum(map(_size, self._under_way))
            self._under_way = ()

    def _next_batch(self) -> list[_Numbered]:
        few_only = self._sender.holds_back()
        batch = self._turns.take(PUBLISHED_TOGETHER, PUBLISHED_BYTES, _size, few_only=few_only)
        self._waiting -= Counter(message.queue for _, (_, message) in batch)
        return batch

    @property
    def _have_waited(self) -> bool:
        return self._waited > 0 and any(number < self._waited for number, _ in self._under_way)

    async def _publish(self, batch: Sequence[Entry]) -> None:
        """Publish until the broker answers. Runs time out meanwhile by their own deadlines, and say why."""
        pause = _FIRST_PAUSE
        while batch := await self._sender.still_wanted(batch, self._have_waited):
            started = self._clock.now()
            try:
                receipts = await self._broker.publish([message for _, message in batch])
            except BrokerUnavailable as error:
                self.trouble = str(error)
                self._telemetry.emit(PublishFailed(len(batch), str(error)))
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                self._waited = next(self._numbers)
                continue
            except BrokerError as error:
                receipts = [Receipt(error=error)] * len(batch)
            self._read_receipts(batch, receipts, started)
            break
        self.trouble = None  # no message waits for it any more

    def _read_receipts(self, batch: Sequence[Entry], receipts: Sequence[Receipt], started: float) -> None:
        """Report what was taken and what was not. A full queue holds up no other."""
        self._note_queues(batch, receipts)
        outcomes = list(zip(batch, receipts, strict=True))
        refused = [(entry, receipt.error) for entry, receipt in outcomes if receipt.error is not None]
        if refused:
            self._telemetry.emit(PublishFailed(len(refused), "; ".join({str(error): None for _, error in refused})))
            self._sender.refused(refused)
        if keys := [key for (key, _), receipt in outcomes if receipt.error is None]:
            if commands := sum(not is_dead_letter for *_, is_dead_letter in keys):
                self._telemetry.emit(CommandsPublished(commands, self._clock.now() - started))
            brokers = [receipt.broker or "" for receipt in receipts if receipt.error is None]
            self._sender.confirmed(keys, brokers, started)

    def _note_queues(self, batch: Sequence[Entry], receipts: Sequence[Receipt]) -> None:
        """Note which queues take messages and which do not, by the last receipt of each."""
        last = {message.queue: receipt.error for (_, message), receipt in zip(batch, receipts, strict=True)}
        works = [queue for queue, error in last.items() if error is None]
        self._refusing.works(works)
        self._known.add(works)
        now = asyncio.get_running_loop().time()
        for queue, error in last.items():
            if error is not None and not isinstance(
                error, MessageTooLarge
            ):  # a large message says nothing about its queue
                self._refusing.note([queue], str(error), now)


class PublishLines:
    """The lines of an engine, each for messages that must not delay those of another.

    A broker makes a new queue slowly, a refusing queue may be slow to refuse again, and a dead-letter queue may be
    full.
    """

    def __init__(
        self, broker: Publisher, sender: Sender, known: KnownQueues, clock: Clock, telemetry: Telemetry
    ) -> None:
        self._known = known
        self.refusing = QueueHealth(_REFUSING_FOR)
        self.refusing_dead_letters = QueueHealth(_REFUSING_FOR)

        def line(refusing: QueueHealth) -> PublishLine:
            return PublishLine(broker, sender, refusing, known, clock, telemetry)

        self._to_known = line(self.refusing)
        self._to_new = line(self.refusing)
        self._to_refusing = line(self.refusing)
        self.dead_letters = line(self.refusing_dead_letters)
        self._all = self._to_known, self._to_new, self._to_refusing, self.dead_letters

    def line_of(self, queue: str, *, is_dead_letter: bool) -> PublishLine:
        """Return the line for a message to a queue."""
        if is_dead_letter:
            return self.dead_letters
        if self.refusing and self.refusing.has(queue, asyncio.get_running_loop().time()):
            return self._to_refusing
        # What waits for a queue that was made just now goes out first.
        is_new = queue not in self._known or self._to_new.has_waiting(queue)
        return self._to_new if is_new else self._to_known

    @property
    def load(self) -> float:
        """The part of the room that is taken in the lines to working queues, from 0 to 1."""
        return max(self._to_known.load, self._to_new.load)

    @property
    def has_more(self) -> bool:
        """Return whether more waits for working queues than what the broker is asked to take now."""
        return self._to_known.has_more or self._to_new.has_more

    @property
    def trouble(self) -> str | None:
        """The reason why no queue takes commands now."""
        return self._to_known.trouble or self._to_new.trouble

    def wake(self) -> None:
        """Look again whether the commands of wide runs may go out."""
        for line in self._all:
            line.wake()

    def run_in(self, group: asyncio.TaskGroup) -> None:
        """Publish what is lined up, for ever, in tasks of the group.

        In a group of their own they start a turn of the loop later, and a command may go out twice.
        """
        for line in self._all:
            group.create_task(line.run())

    async def flushed(self) -> None:
        """Return when every added message is confirmed or refused."""
        for line in self._all:
            await line.flushed()


def _size(numbered: _Numbered) -> int:
    return len(numbered[1][1].body)
