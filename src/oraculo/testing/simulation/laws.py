"""The laws of the system, each checked apart from the code that keeps it.

A law gets every event, looks at what was committed, and reports faults with `broken`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.run import Cause, DeliveryStatus, Run, Task, TaskStatus
from oraculo.errors import InvalidInput
from oraculo.pipeline.definition import OnLate
from oraculo.ports.broker import Delivery, Outgoing
from oraculo.ports.broker_admin import DeadLetter, QueueState
from oraculo.testing.checkers import check_history, check_state
from oraculo.testing.simulation.brokers import ServerState
from oraculo.wire import naming
from oraculo.wire.message import Message, decode_message

if TYPE_CHECKING:
    from oraculo.testing.simulation.witness import Witness

# Seconds that something may be overdue while nothing goes wrong.
PATIENCE = 12.0

_Key = tuple[str, int, int]  # run, task, attempt

# The effects of an answer that is neither late nor a repeat.
_EFFECTS = frozenset({Happened.SUCCEEDED, Happened.ATTEMPT_FAILED, Happened.FAILED, Happened.AMENDED})


class Law:
    """The base of laws: one method for each kind of event."""

    number = 0
    says = ""

    def __init__(self, world: "Witness") -> None:
        self.world = world

    def broken(self, how: str) -> None:
        self.world.law_broken(self, how)

    def commanded(self, message: Outgoing) -> tuple[Run, Task, int] | None:
        """Return the run, task and attempt of a command; None for other messages, and for commands of no task."""
        command = _read(message)
        if command is None or not _is_command(command):
            return None
        run = self.world.runs.get(command.correlation_id)
        number = None if run is None else run.plan.by_id.get(command.tarefa or "")
        return None if run is None or number is None else (run, run.tasks[number], command.tentativa or 0)

    def overdue(self, since: float) -> float | None:
        """Return the seconds since then, when nothing has gone wrong for longer than PATIENCE."""
        moment = self.world.loop.time()
        return moment - since if moment - max(since, self.world.undisturbed_since) > PATIENCE else None

    def accepted(self, run_id: str) -> None: ...
    def committed(self, before: Run | None, after: Run, entries: Sequence[HistoryEntry]) -> None: ...
    def published(self, message: Outgoing, server: str) -> None: ...
    def repeat_dropped(self, first: Outgoing, message: Outgoing) -> None: ...
    def forgot(self, server: str) -> None: ...
    def acked(self, delivery: Delivery) -> None: ...
    def delivered(self, run_id: str, channel: str, aggregate: bytes) -> None: ...
    def second(self) -> None: ...
    def at_rest(self, history: dict[str, Sequence[HistoryEntry]], queues: Sequence[QueueState]) -> None: ...


class AcceptedIsKept(Law):
    number, says = 1, "an accepted run is never lost"

    def accepted(self, run_id: str) -> None:
        if run_id not in self.world.runs:
            self.broken(f"run {run_id} was accepted and is not in the store")

    def acked(self, delivery: Delivery) -> None:
        message = _read(delivery)
        if delivery.queue == naming.REQUESTS and message is not None and message.correlation_id not in self.world.runs:
            self.broken(f"the request for run {message.correlation_id} was acked and the run is not in the store")


class EveryRunEnds(Law):
    number, says = 2, "every run ends, and needs no message for it"

    def __init__(self, world: "Witness") -> None:
        super().__init__(world)
        self._overdue: dict[str, float] = {}

    def second(self) -> None:
        now, moment = self.world.clock.now(), self.world.loop.time()
        due = {run.id for run in self.world.runs.values() if _is_due(run, now)}
        self._overdue = {run_id: self._overdue.get(run_id, moment) for run_id in sorted(due)}
        for run_id, since in self._overdue.items():
            if late := self.overdue(since):
                self.broken(f"a timer of run {run_id} is due since {late:.0f} s and nobody rings it")

    def at_rest(self, history: dict[str, Sequence[HistoryEntry]], queues: Sequence[QueueState]) -> None:
        for run in self.world.runs.values():
            if run.is_open:
                self.broken(f"run {run.id} is open though its deadline passed and all is calm")


class EndedIsFinal(Law):
    number, says = 3, "an ended task is final; repeats, late and unknown answers change nothing"

    def committed(self, before: Run | None, after: Run, entries: Sequence[HistoryEntry]) -> None:
        for fault in check_state(after):
            self.broken(f"run {after.id}: {fault}")
        if before is None:
            return
        for old, new in zip(before.tasks, after.tasks, strict=True):
            if not old.is_open:
                self._check_ended(after, old, new, {entry.what for entry in entries if entry.task == old.number})

    def _check_ended(self, run: Run, old: Task, new: Task, events: set[Happened]) -> None:
        if old.status is new.status and old.result == new.result:
            return
        reopened = Happened.REOPENED in events and self.world.may_reopen(run.id)
        amended = Happened.AMENDED in events and run.plan.on_late is OnLate.AMEND
        if old.status is TaskStatus.SUCCEEDED or not (reopened or amended):
            step = run.plan.steps[old.number].id
            self.broken(f"task {step} of run {run.id} had ended as {old.status} and became {new.status}")

    def at_rest(self, history: dict[str, Sequence[HistoryEntry]], queues: Sequence[QueueState]) -> None:
        for run in self.world.runs.values():
            for fault in check_history(run, history[run.id]):
                self.broken(f"run {run.id}: {fault}")


class SentUntilAnswered(Law):
    number, says = 4, "a command is sent at least once while its task is open, always under the same identity"

    def __init__(self, world: "Witness") -> None:
        super().__init__(world)
        self._unsent: dict[_Key, float] = {}

    def published(self, message: Outgoing, server: str) -> None:
        command = _read(message)
        if command is None or not _is_command(command):
            return
        run = self.world.runs.get(command.correlation_id)
        number = None if run is None else run.plan.by_id.get(command.tarefa or "")
        if run is None or number is None or run.tasks[number].attempt < (command.tentativa or 0):
            self.broken(f"a command was sent that no commit decided: {message.body!r}")

    def repeat_dropped(self, first: Outgoing, message: Outgoing) -> None:
        known, command = _read(first), _read(message)
        if known is None or command is None or _identity(known) != _identity(command):
            self.broken(f"a command was taken for the repeat of another: {message.body!r}, {first.body!r}")

    def second(self) -> None:
        moment = self.world.loop.time()
        waiting = [_key(run, task) for run in self.world.runs.values() for task in run.tasks if task.unsent]
        self._unsent = {key: self._unsent.get(key, moment) for key in waiting}
        for key, since in self._unsent.items():
            if late := self.overdue(since):
                self.broken(f"the command or dead letter {key} is not sent since {late:.0f} s")


class SentAgainWhenLost(Law):
    """The law for lost brokers: their commands are sent again, once another works or they are back without memory."""

    number, says = 4, "what a broker had taken that is lost is sent again"

    def __init__(self, world: "Witness") -> None:
        super().__init__(world)
        self._taken_by: dict[_Key, str] = {}  # the last broker of each
        self._forgotten: set[_Key] = set()
        self._lost: dict[_Key, float] = {}

    def published(self, message: Outgoing, server: str) -> None:
        found = self.commanded(message)
        if found is not None and message.reason is None:
            run, task, attempt = found
            self._taken_by[run.id, task.number, attempt] = server
            self._forgotten.discard((run.id, task.number, attempt))

    def forgot(self, server: str) -> None:
        open_keys = {_key(run, task) for run, task in self._sent()}
        self._forgotten |= {key for key, by in self._taken_by.items() if by == server and key in open_keys}

    def second(self) -> None:
        moment = self.world.loop.time()
        lost = [_key(run, task) for run, task in self._sent() if self._is_lost(_key(run, task), task)]
        self._lost = {key: self._lost.get(key, moment) for key in lost}
        for key, since in self._lost.items():
            if late := self.overdue(since):
                self.broken(f"the command {key} was lost {late:.0f} s ago and is not sent again")

    def _sent(self) -> Iterator[tuple[Run, Task]]:
        """Yield tasks whose commands are recorded as sent, and not answered."""
        for run in self.world.runs.values():
            for task in run.tasks:
                if run.is_open and task.status is TaskStatus.RUNNING and not task.unsent:
                    yield run, task

    def _is_lost(self, key: "_Key", task: Task) -> bool:
        is_away = any(server.name == task.via and server.state is not ServerState.UP for server in self.world.servers)
        return is_away or key in self._forgotten


class DependenciesFirst(Law):
    number, says = 5, "a task is sent only when all that it depends on has succeeded"

    def published(self, message: Outgoing, server: str) -> None:
        if (found := self.commanded(message)) is None:
            return
        run, task, _ = found
        for before in run.plan.dependencies[task.number]:
            if run.tasks[before].status is not TaskStatus.SUCCEEDED:
                sent, missing = run.plan.steps[task.number].id, run.plan.steps[before].id
                self.broken(f"'{sent}' of run {run.id} was sent before '{missing}' had succeeded")


class AckedAfterCommit(Law):
    """The law of acks. Every answer leaves a trace: the end of an attempt, an amendment, or a count of strays.

    So there are never more acks than traces.
    """

    number, says = 6, "a message is acked only after its effect is committed"

    def __init__(self, world: "Witness") -> None:
        super().__init__(world)
        self._traces: dict[str, int] = {}
        self._acks: dict[str, int] = {}

    def committed(self, before: Run | None, after: Run, entries: Sequence[HistoryEntry]) -> None:
        strays = after.head.late + after.head.duplicates
        known = 0 if before is None else before.head.late + before.head.duplicates
        ended = sum(entry.what in _EFFECTS and not _is_unsendable(after, entry) for entry in entries)
        self._traces[after.id] = self._traces.get(after.id, 0) + ended + strays - known

    def acked(self, delivery: Delivery) -> None:
        message = _read(delivery) if delivery.queue == naming.ANSWERS else None
        if message is None or message.tipo_evento not in naming.ANSWER_EVENTS:
            return
        run = self.world.runs.get(message.correlation_id)
        if run is None or _task_of(run, message) is None:
            return
        acks = self._acks[run.id] = self._acks.get(run.id, 0) + 1
        traces = self._traces.get(run.id, 0)
        if acks > traces:
            self.broken(f"{acks} answers to run {run.id} were acked and {traces} left a trace; the last: {message}")


class OneAggregate(Law):
    """The law of aggregates. The oracle compares what they say with the tasks."""

    number, says = 7, "the aggregate is a function of the tasks, delivered at least once, under one versao"

    def __init__(self, world: "Witness") -> None:
        super().__init__(world)
        self._seen: dict[tuple[str, int], bytes] = {}
        self._reached: set[tuple[str, str, int]] = set()

    def delivered(self, run_id: str, channel: str, aggregate: bytes) -> None:
        edition = msgspec.json.decode(aggregate)["versao"]
        self._reached.add((run_id, channel, edition))
        if self._seen.setdefault((run_id, edition), aggregate) != aggregate:
            self.broken(f"run {run_id} was delivered twice as versao {edition}, with different contents")

    def at_rest(self, history: dict[str, Sequence[HistoryEntry]], queues: Sequence[QueueState]) -> None:
        for run in self.world.runs.values():
            events = [entry.what for entry in history[run.id]]
            amended_after_end = events.count(Happened.RUN_ENDED) - 1 - events.count(Happened.RUN_REOPENED)
            if not run.is_open and not 0 <= amended_after_end <= events.count(Happened.AMENDED):
                self.broken(f"run {run.id} ended {events.count(Happened.RUN_ENDED)} times without a reason to")
            for delivery in run.head.deliveries:
                key = (run.id, delivery.channel, run.head.edition)
                if delivery.status is DeliveryStatus.PENDING and not run.is_open:
                    self.broken(f"run {run.id} ended and its aggregate was not brought to {delivery.channel}")
                if delivery.status is DeliveryStatus.UNDELIVERED:  # its attempts last longer than all faults
                    self.broken(f"run {run.id} was given up for {delivery.channel}: {delivery.error}")
                if delivery.status is DeliveryStatus.DELIVERED and key not in self._reached:
                    self.broken(f"run {run.id} is recorded as delivered to {delivery.channel}, and was not")


class NothingIsDropped(Law):
    number, says = 8, "nothing is dropped in silence"

    def __init__(self, world: "Witness") -> None:
        super().__init__(world)
        self._dead_lettered: set[tuple[str, str, int]] = set()  # commands published as dead letters

    def published(self, message: Outgoing, server: str) -> None:
        command = None if message.reason is None else _read(message)
        if command is not None:
            self._dead_lettered.add(_identity(command))

    def acked(self, delivery: Delivery) -> None:
        if delivery.queue not in (naming.ANSWERS, naming.REQUESTS):
            return
        message = _read(delivery)
        if message is None:
            self.broken(f"a message that cannot be read was acked: {delivery.body!r}")
        elif delivery.queue == naming.ANSWERS and message.tipo_evento != naming.PROGRESS:
            run = self.world.runs.get(message.correlation_id)
            if run is None or _task_of(run, message) is None:
                self.broken(f"an answer that fits no task was acked: {delivery.body!r}")

    def at_rest(self, history: dict[str, Sequence[HistoryEntry]], queues: Sequence[QueueState]) -> None:
        for state in queues:
            if state.queue in (naming.ANSWERS, naming.REQUESTS) and (state.ready or state.unacked):
                self.broken(f"queue {state.queue} still holds {state.ready + (state.unacked or 0)} messages")
        for letter in self.world.dead_letters:
            if not letter.reason:
                self.broken(f"a dead letter of {letter.queue} has no reason: {letter.body!r}")
            if letter.queue == naming.ANSWERS and self._is_a_good_answer(letter):
                self.broken(f"an answer that fits its task became a dead letter ({letter.reason}): {letter.body!r}")
        for one in self.world.garbage:
            if not any((letter.queue, letter.body) == (one.queue, one.body) for letter in self.world.dead_letters):
                self.broken(f"garbage on {one.queue} is not among its dead letters: {one.body!r}")
        for run in self.world.runs.values():
            for task in run.tasks:
                letter_of = (run.id, run.plan.steps[task.number].id, task.attempt)
                if task.dead_letter and not task.unsent and letter_of not in self._dead_lettered:
                    self.broken(f"the command {letter_of} is recorded as a dead letter, and was never sent there")

    def _is_a_good_answer(self, letter: DeadLetter) -> bool:
        message = _read(letter)
        if message is None or message.tipo_evento not in naming.ANSWER_EVENTS:
            return False
        run = self.world.runs.get(message.correlation_id)
        task = None if run is None else _task_of(run, message)
        return task is not None and task.attempt > 0


class MemoryIsBounded(Law):
    """The law of memory. Each of the two queues has its prefetch, and a lost consumer may leave as many again."""

    number, says = 9, "memory is bounded"

    def second(self) -> None:
        for engine in self.world.engines():
            waiting, limit = sum(1 for _ in engine.parts.runs.inbox.arrived), 3 * engine.settings.engine.prefetch
            if waiting > limit:
                self.broken(f"an engine's inbox holds {waiting} messages, more than {limit}")


LAWS: tuple[Callable[["Witness"], Law], ...] = (
    AcceptedIsKept,
    EveryRunEnds,
    EndedIsFinal,
    SentUntilAnswered,
    SentAgainWhenLost,
    DependenciesFirst,
    AckedAfterCommit,
    OneAggregate,
    NothingIsDropped,
    MemoryIsBounded,
)


def _is_unsendable(run: Run, entry: HistoryEntry) -> bool:
    """Return True when that attempt ended without an answer, because its command was too large."""
    return entry.task is not None and run.tasks[entry.task].cause is Cause.UNSENDABLE


def _key(run: Run, task: Task) -> _Key:
    return run.id, task.number, task.attempt


def _read(message: Delivery | Outgoing | DeadLetter) -> Message | None:
    try:
        return decode_message(message.body)
    except InvalidInput:
        return None


def _identity(command: Message) -> tuple[str, str, int]:
    return command.correlation_id, command.tarefa or "", command.tentativa or 0


def _is_command(message: Message) -> bool:
    return message.tipo_evento in (naming.START_COLLECT, naming.START_EXECUTE)


def _payload(message: Message) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(message.payload)
    return decoded


def _task_of(run: Run, message: Message) -> Task | None:
    """Return the task that a message names, in a field or in its payload."""
    number = run.plan.by_id.get(message.tarefa or _payload(message).get("tarefa", ""))
    return None if number is None else run.tasks[number]


def _is_due(run: Run, now: float) -> bool:
    if run.head.due_at is not None and run.head.due_at <= now:
        return True
    return any(task.due_at is not None and task.due_at <= now for task in run.tasks)
