"""The outbox: sends committed commands and dead letters at once.

The outbox is the state itself: a task whose command is not noted as sent is unsent. The sweep finds it and has it sent
again, under the same identity.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

from oraculo.core.chunks import pages
from oraculo.core.command import Written, deadline_of, encode_command
from oraculo.core.events import Answered, Sent, Unsendable
from oraculo.core.queue_health import QueueHealth
from oraculo.core.result_reference import ResultReference
from oraculo.core.run import Changes, Run, Task, TaskStatus
from oraculo.engine.dead_letters import dead_letter_of
from oraculo.engine.inbox import Inbox, Note
from oraculo.engine.queues.known import KnownQueues
from oraculo.engine.results.get import ResultReader
from oraculo.engine.send.publisher import MAX_WAITING, Entry, Key, PublishLines
from oraculo.engine.send.run_order import FEW
from oraculo.errors import BrokerError, MessageTooLarge, ObjectLost, ObjectsError, OraculoError
from oraculo.ports.broker import Broker, Outgoing
from oraculo.ports.clock import Clock
from oraculo.ports.store import Store, Unsent
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.wire.naming import QueueNames
from oraculo.wire.timestamps import to_iso

# Commands that are lined up in one go. Encoding all 50,000 of a wide run at once would block the event loop for half a
# second.
PORTION = 500
_NONE: Mapping[str, bytes] = MappingProxyType({})
_ROOM_FOR_WIDE = 0.8  # of a line; the rest is kept for small runs
_MOST_READING = 200  # commands that wait for large results

OnRefused = Callable[[Unsent, str, QueueHealth], None]  # the command, its queue, and the note of the refusal
_Wanted = tuple[int, int]  # task, attempt
_Portion = tuple[Run, Sequence[_Wanted], Sequence[_Wanted]]  # a run, some of its commands, and some of its dead letters


class _Flight(NamedTuple):
    """A message between the decision and the commit of the note that it was sent."""

    task: Task
    was_taken: bool  # by a broker that was lost later


class _Shared(NamedTuple):
    """The parts that the commands of one commit share, each looked up and written once."""

    now_iso: str
    written: Written | None  # None: there is only one command
    references: dict[tuple[int, ...], dict[str, ResultReference]]
    are_many: bool  # those of a wide run, for which small ones do not wait


class Outbox:
    """The commands and dead letters on their way to the brokers.

    `others_answer`: answers come to other processes, which would commit them before a note that lingers here.
    `on_refused` gets what the broker refused, and the note of the refusing queues.
    """

    def __init__(
        self,
        broker: Broker,
        store: Store,
        inbox: Inbox,
        results: ResultReader,
        names: QueueNames,
        known_queues: KnownQueues,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._broker = broker
        self._store = store
        self._inbox = inbox
        self._results = results
        self._names = names
        self._clock = clock
        self._telemetry = telemetry
        self.others_answer = False
        self.on_refused: OnRefused = lambda one, queue, refusing: None
        self.holds_back = inbox.holds_back
        self._lines = PublishLines(broker, self, known_queues, clock, telemetry)
        inbox.on_eased = self._lines.wake
        self._in_flight: dict[Key, _Flight] = {}
        self._unreported: dict[Key, DeadLettered] = {}  # dead letters, logged when the broker took them
        self._reading: dict[Key, asyncio.Task[None]] = {}  # the large results that a command hands on
        self._later: asyncio.Queue[_Portion] = asyncio.Queue(MAX_WAITING // PORTION)
        self.has_spilled = False  # something found no room, and is left to the sweep

    # -- what the intake hands over -----------------------------------------------------------------------------

    def send(self, changes: Changes) -> None:
        """Take the commands of a committed change, and never block.

        Many commands are lined up in portions, because the engine has other things to do. The sweep finds those for
        which there is no room.
        """
        if len(changes.commands) + len(changes.dead_letters) <= PORTION:
            if changes.commands or changes.dead_letters:
                self._add_all(changes.run, changes.commands, changes.dead_letters)
            return
        portions: list[_Portion] = [(changes.run, some, ()) for some in pages(changes.commands, PORTION)]
        portions += [(changes.run, (), some) for some in pages(changes.dead_letters, PORTION)]
        for portion in portions:
            if self._later.full():
                self.has_spilled = True
                return
            self._later.put_nowait(portion)

    async def _add_later(self) -> None:
        while True:
            portion = await self._later.get()
            try:
                self._add_all(*portion)
            finally:
                self._later.task_done()
            await asyncio.sleep(0)

    def _add_all(self, run: Run, commands: Sequence[_Wanted], dead_letters: Sequence[_Wanted]) -> None:
        count = len(commands) + len(dead_letters)
        shared = _Shared(to_iso(self._clock.now()), None if count == 1 else {}, {}, count > FEW)
        for number, attempt in commands:
            self._add(run, number, attempt, None, shared)
        for number, attempt in dead_letters:
            self._add(run, number, attempt, run.tasks[number].reason or "failed", shared)

    def _add(self, run: Run, number: int, attempt: int, dead: str | None, shared: _Shared) -> None:
        key = (run.id, number, attempt, dead is not None)
        task = run.tasks[number]
        if key in self._in_flight:
            return
        if not self._has_room(run, number, dead, shared.are_many):
            self.has_spilled = True
            return
        if _is_overtaken(task, key):  # by an answer in the same batch
            return
        if references := self._results.needed(run, number, shared.references):
            if len(self._reading) >= _MOST_READING:
                return  # to a later sweep; a flag for the next one would keep it asking while the object store is away
            self._in_flight[key] = _Flight(task, was_taken=False)
            self._reading[key] = asyncio.create_task(
                self._read_and_line_up(key, run, references, dead, shared.are_many), name="large results"
            )
            self._reading[key].add_done_callback(partial(self._has_read, key))
        else:
            body = encode_command(run, task, shared.now_iso, self._names.answers, written=shared.written)
            self._line_up(key, run, dead, body, shared.are_many)

    def _has_room(self, run: Run, number: int, dead: str | None, are_many: bool) -> bool:
        line = self._lines.line_of(self._queue_of(run, number), is_dead_letter=dead is not None)
        return line.load < (_ROOM_FOR_WIDE if are_many else 1)

    def _queue_of(self, run: Run, number: int) -> str:
        return self._names.physical(run.plan.steps[number].queue)

    def _line_up(self, key: Key, run: Run, dead: str | None, body: bytes, are_many: bool) -> None:
        task, queue = run.tasks[key[1]], self._queue_of(run, key[1])
        if dead is not None:
            message, self._unreported[key] = dead_letter_of(run, task, queue, body, dead)
        else:
            own, expires_at = _message_key(run, task), deadline_of(run, task)
            message = Outgoing(queue, body, run.head.priority, None, expires_at, key=own, leaves_room=True)
        self._in_flight[key] = _Flight(task, task.status is TaskStatus.RUNNING)
        line = self._lines.line_of(queue, is_dead_letter=dead is not None)
        line.add(key, message, age=run.head.created_at, is_one_of_many=are_many)

    async def _read_and_line_up(
        self, key: Key, run: Run, references: Mapping[str, ResultReference], dead: str | None, are_many: bool
    ) -> None:
        """Read the large results that a command hands on, and line it up.

        It stays unsent while the object store is away, and the sweep tries again. When a result is lost the task fails,
        and its dead letter keeps the reference.
        """
        results: Mapping[str, bytes] = _NONE
        try:
            results = await self._results.read(references)
        except ObjectLost as error:
            if dead is None:
                self._note_lost(key, error)
                return
        task = run.tasks[key[1]]
        if not self._has_room(run, key[1], dead, are_many):  # the line filled up while the results were read
            self.has_spilled = True
            return
        if not _is_overtaken(task, key):  # while the results were read
            now_iso = to_iso(self._clock.now())
            body = encode_command(run, task, now_iso, self._names.answers, results)
            self._line_up(key, run, dead, body, are_many)
            del self._reading[key]

    def _note_lost(self, key: Key, error: ObjectLost) -> None:
        run_id, number, attempt, _ = key
        reason = f"a result that it needs is lost: {error}"
        failed = Answered(number, attempt, b"{}", failed=True, retryable=False, reason=reason)
        self._inbox.note([Note(run_id, failed)])

    def _has_read(self, key: Key, task: "asyncio.Task[None]") -> None:
        """Leave a command to the sweep that was not lined up."""
        if self._reading.get(key) is task:
            del self._reading[key]
            self._in_flight.pop(key, None)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, ObjectsError):
            self._telemetry.emit(LoopFailed("outbox", f"{type(error).__name__}: {error}"))

    def noted(self, run_id: str, event: Sent) -> None:
        """Forget a sending whose note is committed, or does not matter any more."""
        self._in_flight.pop((run_id, event.task, event.attempt, event.dead_letter), None)

    # -- publishing -----------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """The reason why no queue takes commands now."""
        return self._lines.trouble

    @property
    def refusing(self) -> Mapping[str, str]:
        """The queues that do not take commands now, and why."""
        return self._lines.refusing.reasons(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Publish what is lined up, for ever."""
        async with asyncio.TaskGroup() as group:  # one that fails stops the others, and all are started again
            group.create_task(self._add_later())
            self._lines.run_in(group)

    async def still_wanted(self, entries: Sequence[Entry], have_waited: bool) -> Sequence[Entry]:
        """Return the entries that are still wanted, and forget the others.

        A run may end while the broker is away, and then nobody waits for the answers to its commands. The sweep finds
        those of a run whose end could not be written.
        """
        wanted = [entry for entry in entries if self._is_wanted(entry[0])]
        if have_waited and (ended := await self._ended({key[0] for key, _ in wanted})):
            wanted = [entry for entry in wanted if entry[0][0] not in ended or entry[0][3]]
        if len(wanted) < len(entries):
            for key in {key for key, _ in entries} - {key for key, _ in wanted}:
                self._in_flight.pop(key, None)
                self._unreported.pop(key, None)
        return wanted

    async def _ended(self, run_ids: Collection[str]) -> set[str]:
        """Return those of the runs that have ended by the store, because the copies here may be stale."""
        try:
            heads = await self._store.heads(list(run_ids))
        except OraculoError:
            return set()  # a repeat does less harm than a command that is not sent
        return {run_id for run_id in run_ids if run_id not in heads or heads[run_id].ended_at is not None}

    def _is_wanted(self, key: Key) -> bool:
        flight = self._in_flight.get(key)
        return flight is not None and not _is_overtaken(flight.task, key)

    def confirmed(self, keys: Sequence[Key], brokers: Sequence[str], started: float) -> None:
        """Note messages as sent, each at the start of its try.

        A confirm may be read after the broker was emptied, and what it took before then must be sent again.
        """
        for key in keys:
            if (dead := self._unreported.pop(key, None)) is not None:
                self._telemetry.emit(dead)
        notes = [
            Note(key[0], Sent(key[1], key[2], key[3], broker, started))
            for key, broker in zip(keys, brokers, strict=True)
        ]
        self._inbox.note(notes, at_once=self.others_answer and not self._has_more)

    @property
    def _has_more(self) -> bool:
        """Return whether more is to be sent.

        Notes of a wide run that are committed a few at a time would delay its answers.
        """
        return bool(self._later.qsize()) or self._lines.has_more

    def refused(self, refused: Sequence[tuple[Entry, BrokerError]]) -> None:
        """Leave refused messages to the sweep, until their task's deadline.

        The broker will never take a command that is too large. Its task fails now, unless a lost broker had the command
        and may bring its answer.
        """
        for (key, message), error in refused:
            flight = self._in_flight.pop(key, None)
            self._unreported.pop(key, None)
            run_id, task, attempt, is_dead_letter = key
            if isinstance(error, MessageTooLarge) and not is_dead_letter:
                reason = f"its command is too large for {self._broker.name}: {error}"
                if flight is None or not flight.was_taken:  # otherwise an answer may come
                    self._inbox.note([Note(run_id, Unsendable(task, attempt, reason))])
                    continue
                self._lines.refusing.note([message.queue], reason, asyncio.get_running_loop().time())
            refusing = self._lines.refusing_dead_letters if is_dead_letter else self._lines.refusing
            self.on_refused(Unsent(run_id, task, attempt), message.queue, refusing)

    async def flushed(self) -> None:
        """Return when everything that was handed over is confirmed or refused."""
        await self._later.join()
        while self._reading:
            await asyncio.wait(list(self._reading.values()))
        await self._lines.flushed()

    async def abandon(self) -> None:
        """Stop reading results for commands, which stay unsent."""
        for task in self._reading.values():
            task.cancel()
        if self._reading:
            await asyncio.wait(list(self._reading.values()))

    # -- what the sweep asks --------------------------------------------------------------------------------------

    def is_in_flight(self, one: Unsent) -> bool:
        """Return whether the command or the dead letter is on its way."""
        return any((one.run_id, one.task, one.attempt, dead) in self._in_flight for dead in (False, True))

    @property
    def is_full(self) -> bool:
        """Return whether commands to queues that work leave no room for more.

        Full dead-letter queues, refusing queues and an object store that is away do not count.
        """
        return max(self._lines.load, self._later.qsize() / self._later.maxsize) >= 0.5


def _message_key(run: Run, task: Task) -> str:
    """Return the key for the broker's deduplication.

    It includes created_at, because run ids can be reused. It includes sent_at, because a resend after a broker loss
    must not be dropped.
    """
    return f"{_birth(run.id, run.head.created_at)}:{task.number}:{task.attempt}:{task.sent_at}"


@lru_cache(maxsize=16)
def _birth(run_id: str, created_at: float) -> str:
    """Return the part of the key that the commands of a run share, cached because a float takes long to format."""
    return f"{run_id}:{created_at}"


def _is_overtaken(task: Task, key: Key) -> bool:
    """Return whether a message lost its purpose: an open task sends commands, an ended one dead letters."""
    _, _, attempt, is_dead = key
    return task.attempt != attempt or not task.unsent or task.is_open is is_dead
