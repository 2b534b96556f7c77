"""Sends what was committed: commands and dead letters. The outbox is the state itself: a task whose command is not
noted as sent is sent again by whoever finds it, under the same identity."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

from oraculo.core.chunks import pages
from oraculo.core.command import Written, deadline_of, encode_command
from oraculo.core.events import Answered, Sent, Unsendable
from oraculo.core.queue_health import TroubledQueues
from oraculo.core.result_reference import ResultReference
from oraculo.core.run import Changes, Run, Task, TaskStatus
from oraculo.engine.inbox import Inbox, Note
from oraculo.engine.queues.removal import NotedQueues
from oraculo.engine.results.reader import ResultReader
from oraculo.engine.send.backlog import Backlog
from oraculo.engine.send.publisher import MAX_WAITING, Entry, Key, PublishLine
from oraculo.engine.send.run_order import FEW
from oraculo.errors import BrokerError, MessageTooLarge, ObjectLost, ObjectsError, OraculoError
from oraculo.ports.broker import Broker, Outgoing
from oraculo.ports.clock import Clock
from oraculo.ports.store import Store, Unsent
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.wire.naming import QueueNames
from oraculo.wire.timestamps import to_iso

# Commands that are lined up in one go. To encode all 50,000 of a wide run at once would hold the event loop for half a
# second.
PORTION = 500
_NONE: Mapping[str, bytes] = MappingProxyType({})
_ROOM_FOR_MANY = 0.8  # of a line; the rest is kept for small runs
_MOST_READING = 200  # commands that wait for large results
_REFUSING_TOLD = 60.0  # seconds since a queue did not take something: longer than until it is tried again

OnRefused = Callable[[Unsent, str, TroubledQueues], None]  # what, by which queue, and where that is noted
_Wanted = tuple[int, int]  # task, attempt
_Portion = tuple[Run, Sequence[_Wanted], Sequence[_Wanted]]  # of the commands of a run, and of its dead letters


class _Flight(NamedTuple):
    """Of a message: from the decision until the note that it was sent is committed."""

    task: Task
    was_taken: bool  # by a broker that was lost since


class _Shared(NamedTuple):
    """By the commands of one commit: what many of them hand on is looked at, and written, once."""

    now_iso: str
    written: Written | None  # None: there is but one
    references: dict[tuple[int, ...], dict[str, ResultReference]]
    are_many: bool  # as of a wide run, for which small ones are not to wait


class Outbox:
    """`others_answer`: answers come to other processes, which would commit them before a note that lingers here."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        inbox: Inbox,
        results: ResultReader,
        names: QueueNames,
        clock: Clock,
        telemetry: Telemetry,
        made_queues: NotedQueues,
        backlog: Backlog,
        on_refused: OnRefused,
        *,
        others_answer: bool = False,
    ) -> None:
        self._broker = broker
        self._store = store
        self._inbox = inbox
        self._others_answer = others_answer
        self._results = results
        self._names = names
        self._clock = clock
        self._telemetry = telemetry
        self._backlog = backlog
        self._on_refused = on_refused
        self._refusing = TroubledQueues(_REFUSING_TOLD)
        self._refusing_letters = TroubledQueues(_REFUSING_TOLD)
        self._known = made_queues.known
        # Apart, so that none of these holds up the commands: queues that have to be made first, which takes a broker a
        # while; a queue that did not take something of late, which may take its time to say no again; and a quarantine
        # that is full.
        self._commands, self._first_commands, self._doubtful, self._dead_letters = (
            PublishLine(
                publisher,
                clock,
                telemetry,
                self._confirmed,
                self._refused,
                self._still_wanted,
                refusing,
                inbox.holds_back,
                self._known,
            )
            for publisher, refusing in (
                (broker, self._refusing),
                (made_queues, self._refusing),
                (broker, self._refusing),
                (broker, self._refusing_letters),
            )
        )
        inbox.on_eased = self._wake_lines
        self._in_flight: dict[Key, _Flight] = {}
        self._dying: dict[Key, DeadLettered] = {}  # told when it is in quarantine: a full one is tried again and again
        self._reading: dict[Key, asyncio.Task[None]] = {}  # the large results that a command hands on
        self._later: asyncio.Queue[_Portion] = asyncio.Queue(MAX_WAITING // PORTION)
        self.has_spilled = False  # there was no room: the sweep finds what was left out

    # -- what the intake hands over -----------------------------------------------------------------------------

    def send(self, changes: Changes) -> None:
        """Takes the commands of a committed change. Never blocks; what it has no room for is left to the sweep. Where
        there are many, they are lined up a portion at a time, for the engine has other things to do."""
        if (not changes.commands and not changes.dead_letters) or self._backlog.makes_wait(changes):
            return
        if len(changes.commands) + len(changes.dead_letters) <= PORTION:
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
        if _is_overtaken(task, key):  # within the same batch
            return
        if references := self._results.needed(run, number, shared.references):
            if len(self._reading) >= _MOST_READING:
                return  # found by a later sweep: at once, it would be asked for all the time that the store is away
            self._in_flight[key] = _Flight(task, was_taken=False)
            self._reading[key] = asyncio.create_task(
                self._read_and_line_up(key, run, references, dead, shared.are_many), name="large results"
            )
            self._reading[key].add_done_callback(partial(self._has_read, key))
        else:
            body = encode_command(run, task, shared.now_iso, self._names.answers, written=shared.written)
            self._line_up(key, run, dead, body, shared.are_many)

    def _has_room(self, run: Run, number: int, dead: str | None, are_many: bool) -> bool:
        return self._line_of(run, number, dead).load < (_ROOM_FOR_MANY if are_many else 1)

    def _line_up(self, key: Key, run: Run, dead: str | None, body: bytes, are_many: bool) -> None:
        number, task = key[1], run.tasks[key[1]]
        queue = self._names.physical(run.plan.steps[number].queue)
        if dead is not None:
            dead = f"failed for good at attempt {task.attempt}: {dead}"
            step = run.plan.steps[number]
            self._dying[key] = DeadLettered(step.queue, dead, run.id, step.id, task.attempt)
        expires_at = None if dead is not None else deadline_of(run, task)
        self._in_flight[key] = _Flight(task, task.status is TaskStatus.RUNNING)
        own = None if dead is not None else _message_key(run, task)
        message = Outgoing(queue, body, run.head.priority, dead, expires_at, key=own, leaves_room=True)
        self._line_of(run, number, dead).add(key, message, age=run.head.created_at, is_one_of_many=are_many)

    def _line_of(self, run: Run, number: int, dead: str | None) -> PublishLine:
        if dead is not None:
            return self._dead_letters
        queue = self._names.physical(run.plan.steps[number].queue)
        if self._refusing and self._refusing.has(queue, asyncio.get_running_loop().time()):
            return self._doubtful
        # What still waits for a queue that has just been made goes out before what comes now.
        is_new = queue not in self._known or self._first_commands.has_waiting(queue)
        return self._first_commands if is_new else self._commands

    async def _read_and_line_up(
        self, key: Key, run: Run, references: Mapping[str, ResultReference], dead: str | None, are_many: bool
    ) -> None:
        """Left unsent when the object store is away: the sweep tries again. A result that is lost will not come back:
        then the task fails and says so, and its dead letter keeps the reference."""
        results: Mapping[str, bytes] = _NONE
        try:
            results = await self._results.read(run, key[1], references)
        except ObjectLost as error:
            if dead is None:
                self._note_lost(key, error)
                return
        task = run.tasks[key[1]]
        if not self._has_room(run, key[1], dead, are_many):  # it filled up while the results were read
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
        """Whatever was not lined up is nobody's any more: the sweep may find it."""
        if self._reading.get(key) is task:
            del self._reading[key]
            self._in_flight.pop(key, None)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, ObjectsError):
            self._telemetry.emit(LoopFailed("outbox", f"{type(error).__name__}: {error}"))

    def noted(self, run_id: str, event: Sent) -> None:
        """The note of this sending is committed, or no longer matters."""
        self._in_flight.pop((run_id, event.task, event.attempt, event.dead_letter), None)

    # -- publishing -----------------------------------------------------------------------------------------------

    @property
    def _lines(self) -> tuple[PublishLine, ...]:
        return self._commands, self._first_commands, self._doubtful, self._dead_letters

    def _wake_lines(self) -> None:
        for line in self._lines:
            line.wake()

    @property
    def trouble(self) -> str | None:
        """Why no command is taken now, by any queue."""
        return self._commands.trouble or self._first_commands.trouble

    @property
    def refusing(self) -> Mapping[str, str]:
        """Queues that do not take commands now, and why."""
        return self._refusing.reasons(asyncio.get_running_loop().time())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as lines:  # one that fails stops the others: all are taken up again
            lines.create_task(self._add_later())
            for line in self._lines:
                lines.create_task(line.run())

    async def _still_wanted(self, entries: Sequence[Entry], have_waited: bool) -> Sequence[Entry]:
        """A run may end while the broker is away, and then nobody waits for what its commands ask for. Where that was
        decided and could not be written, the sweep finds them."""
        wanted = [entry for entry in entries if self._is_wanted(entry[0])]
        if have_waited and (ended := await self._ended({key[0] for key, _ in wanted})):
            wanted = [entry for entry in wanted if entry[0][0] not in ended or entry[0][3]]
        if len(wanted) < len(entries):
            for key in {key for key, _ in entries} - {key for key, _ in wanted}:
                self._in_flight.pop(key, None)
                self._dying.pop(key, None)
        return wanted

    async def _ended(self, run_ids: Collection[str]) -> set[str]:
        """Of these runs those that ended, by whomever: the copies that the commands were made of may be out of date."""
        try:
            heads = await self._store.heads(list(run_ids))
        except OraculoError:
            return set()  # rather too much is sent than too little
        return {run_id for run_id in run_ids if run_id not in heads or heads[run_id].ended_at is not None}

    def _is_wanted(self, key: Key) -> bool:
        flight = self._in_flight.get(key)
        return flight is not None and not _is_overtaken(flight.task, key)

    def _confirmed(self, keys: Sequence[Key], vias: Sequence[str], started: float) -> None:
        """Each counts as sent when that began: a confirm may be read after the broker was emptied, and what it took
        before then is to be sent again."""
        for key in keys:
            if (dead := self._dying.pop(key, None)) is not None:
                self._telemetry.emit(dead)
        notes = [Note(key[0], Sent(key[1], key[2], key[3], via, started)) for key, via in zip(keys, vias, strict=True)]
        self._inbox.note(notes, at_once=self._others_answer and not self._has_more)

    @property
    def _has_more(self) -> bool:
        """To send: what a wide run is noted with, a little at a time, would be in the way of its answers."""
        return bool(self._later.qsize()) or self._commands.has_more or self._first_commands.has_more

    def _refused(self, refused: Sequence[tuple[Entry, BrokerError]]) -> None:
        """Left unsent: the sweep tries again, until the task's deadline says that it was never taken. A command that is
        too large never will be: its task fails now, unless a broker that had it may bring its answer."""
        for (key, message), error in refused:
            flight = self._in_flight.pop(key, None)
            self._dying.pop(key, None)
            run_id, task, attempt, is_dead_letter = key
            if isinstance(error, MessageTooLarge) and not is_dead_letter:
                reason = f"its command is too large for {self._broker.name}: {error}"
                if flight is None or not flight.was_taken:  # else it may be answered
                    self._inbox.note([Note(run_id, Unsendable(task, attempt, reason))])
                    continue
                self._refusing.note([message.queue], reason, asyncio.get_running_loop().time())
            refusing = self._refusing_letters if is_dead_letter else self._refusing
            self._on_refused(Unsent(run_id, task, attempt), message.queue, refusing)

    async def flushed(self) -> None:
        """Returns when everything that was handed over is confirmed."""
        await self._later.join()
        while self._reading:
            await asyncio.wait(list(self._reading.values()))
        for line in self._lines:
            await line.flushed()

    async def abandon(self) -> None:
        """Stops reading for commands, which stay unsent."""
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
        """Whether commands to queues that work leave no room for more."""
        loads = self._commands.load, self._first_commands.load, self._later.qsize() / self._later.maxsize
        return max(loads) >= 0.5


def _message_key(run: Run, task: Task) -> str:
    """Of a command. With the run's birth, for its id may be given again once that run is gone; and with the last
    sending that was noted, for what is sent again because a broker was lost is meant to come again."""
    return f"{_birth(run.id, run.head.created_at)}:{task.number}:{task.attempt}:{task.sent_at}"


@lru_cache(maxsize=16)
def _birth(run_id: str, created_at: float) -> str:
    """Kept, for a float takes long to write, and the commands of a run are lined up together."""
    return f"{run_id}:{created_at}"


def _is_overtaken(task: Task, key: Key) -> bool:
    """An open task has a command to send, an ended one at most a dead letter."""
    _, _, attempt, is_dead = key
    return task.attempt != attempt or not task.unsent or task.is_open is is_dead
