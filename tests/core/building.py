"""Builders of runs, and a driver that applies events to one and checks the laws after each."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from oraculo.core import machine
from oraculo.core.answers import read_answer
from oraculo.core.events import Answered, Event, Redriven, Repeated, RunDue, Sent, TaskDue
from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.machine import Verdict
from oraculo.core.plan import Plan
from oraculo.core.request import Limits, definition_of, new_run, read_request
from oraculo.core.run import Changes, DeliveryStatus, Run, RunHead, Task, TaskStatus
from oraculo.pipeline.definition import Definition, decode_definition, parse_pipeline
from oraculo.wire.message import decode_message

START = 1_760_443_200.0  # 2025-10-14T12:00:00Z, as in the README
RUN_ID = "abc123"
OK = b'{"status": "ok"}'
_COUNTERS = {
    "succeeded": TaskStatus.SUCCEEDED,
    "failed": TaskStatus.FAILED,
    "timed_out": TaskStatus.TIMED_OUT,
    "skipped": TaskStatus.SKIPPED,
    "task_cancelled": TaskStatus.CANCELLED,
}
_MAY_REOPEN = (Repeated, Redriven, Answered)  # an answer only by an amendment


class Catalogue:
    def __init__(self, *pipelines: Definition, routes: Mapping[str, Sequence[str]] | None = None) -> None:
        self.pipelines = {definition.name: definition for definition in pipelines}
        self.routes = routes or {}


class Plans:
    """Always compiled from the stored bytes, as another engine would."""

    def plan(self, definition_hash: str, encoded: bytes, definition: Definition | None = None) -> Plan:
        return Plan(decode_definition(encoded))


def pipeline(*steps: dict[str, Any] | str, name: str = "p", **options: Any) -> Definition:
    """A definition; a step that is a text is `id` or `id<dependency,dependency`."""
    return parse_pipeline({"name": name, "steps": [_step(step) for step in steps], **options})


def _step(step: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(step, dict):
        return step
    name, _, after = step.partition("<")
    return {"type": name, "dependsOn": after.split(",") if after else []}


def run_of(request: dict[str, Any], *known: Definition, **routes: Sequence[str]) -> Run:
    """A run that was asked for by `request`, before its first event."""
    asked = read_request(json.dumps(request).encode(), Limits())
    definition = definition_of(asked, Catalogue(*known, routes=routes), default_timeout=300.0)
    return new_run(asked, definition, run_id=RUN_ID, now=START, plans=Plans())


def fan_out(*destinations: Any, checked: bool = True, **request: Any) -> "Driver":
    return Driver(run_of({"destinos": list(destinations), **request}), checked=checked)


def flow(*steps: dict[str, Any] | str, request: dict[str, Any] | None = None, **options: Any) -> "Driver":
    """A started run of a pipeline. `options` are the pipeline's own."""
    definition = pipeline(*steps, **options)
    return Driver(run_of({"pipeline": definition.name, **(request or {})}, definition))


class Driver:
    """A started run. Time passes only by `at`; every event is followed by a check of the laws."""

    def __init__(self, run: Run, *, checked: bool = True) -> None:
        self.run = run
        self.now = START
        self.checked = checked
        self.history: list[HistoryEntry] = []
        self.commands: list[tuple[int, int]] = []
        self.dead_letters: list[tuple[int, int]] = []
        self.changes = machine.start(run, self.now)
        self._keep()
        if checked:
            check_laws(run)

    # -- what happens -----------------------------------------------------------------------------------------

    def at(self, seconds: float) -> "Driver":
        """The clock shows this many seconds since the run's start."""
        self.now = START + seconds
        return self

    def apply(self, event: Event) -> Verdict:
        self.changes = Changes(self.run)
        if not self.checked:
            verdict = machine.apply(self.run, event, self.now, self.changes)
            self._keep()
            return verdict
        tasks, head = [copied(task) for task in self.run.tasks], copied(self.run.head)
        verdict = machine.apply(self.run, event, self.now, self.changes)
        self._check_changes(event, verdict, tasks, head)
        self._keep()
        check_laws(self.run)
        return verdict

    def sent(self, *names: str) -> "Driver":
        """The broker confirms the commands of these tasks, or of all that are unsent."""
        for task in self.run.tasks if not names else [self.task(name) for name in names]:
            if task.unsent:
                assert self.apply(Sent(task.number, task.attempt, not task.is_open)) is Verdict.APPLIED
        return self

    def ok(self, name: str, payload: bytes = OK, attempt: int | None = None) -> Verdict:
        return self.apply(Answered(self.number(name), attempt, payload))

    def fail(
        self,
        name: str,
        reason: str = "boom",
        *,
        attempt: int | None = None,
        retryable: bool = True,
        mark: int = 0,
        jitter: float = 0.5,
        redelivered: bool = False,
    ) -> Verdict:
        answered = Answered(self.number(name), attempt, b"{}", True, retryable, reason, mark, jitter, redelivered)
        return self.apply(answered)

    def fail_for_good(self, name: str, reason: str = "boom") -> Verdict:
        return self.fail(name, reason, retryable=False)

    def answer(self, payload: dict[str, Any], kind: str = "resultado_coleta", **fields: Any) -> Verdict | str:
        """A worker's message, from bytes to verdict; or why no task was found for it."""
        event = read_answer(self.run, message(payload, kind, **fields), jitter=0.5)
        return event if isinstance(event, str) else self.apply(event)

    def due(self, name: str) -> Verdict:
        return self.apply(TaskDue(self.number(name)))

    def run_due(self) -> Verdict:
        return self.apply(RunDue())

    # -- what came of it --------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        return self.run.plan.by_id[name]

    def task(self, name: str) -> Task:
        return self.run.tasks[self.number(name)]

    @property
    def head(self) -> RunHead:
        return self.run.head

    @property
    def status(self) -> str:
        return str(self.run.head.status)

    @property
    def statuses(self) -> dict[str, str]:
        return {step.id: str(self.run.tasks[number].status) for number, step in enumerate(self.run.plan.steps)}

    def recorded(self, *, last: int | None = None) -> list[tuple[str, str | None]]:
        """The history as (what, task) pairs."""
        steps = self.run.plan.steps
        pairs = [(str(one.what), None if one.task is None else steps[one.task].id) for one in self.history]
        return pairs if last is None else pairs[-last:]

    def commands_of(self, name: str) -> list[int]:
        return [attempt for number, attempt in self.commands if number == self.number(name)]

    # -- the laws ---------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        self.history += self.changes.history
        self.commands += self.changes.commands
        self.dead_letters += self.changes.dead_letters
        assert self.head.entries == len(self.history)
        assert not self.changes.history or self.changes.dirty
        assert all(entry.at == self.now for entry in self.changes.history), "an entry has the moment of its event"
        if self.checked:
            assert [entry.seq for entry in self.history] == list(range(1, len(self.history) + 1))
            assert len(set(self.commands)) == len(self.commands), "a command was decided twice"

    def _check_changes(self, event: Event, verdict: Verdict, tasks: list[Task], head: RunHead) -> None:
        changed = {old.number for old, new in zip(tasks, self.run.tasks, strict=True) if stored(old) != stored(new)}
        assert changed <= set(self.changes.tasks), "a changed task would not be written"
        assert self.changes.dirty or (not changed and head == self.run.head), "a change would not be written"
        if verdict is not Verdict.APPLIED:
            assert not changed, f"{verdict} but tasks {changed} changed"
            assert not self.changes.commands
            assert not self.changes.dead_letters
            assert not self.changes.ended
        if verdict in (Verdict.NOTHING, Verdict.REFUSED, Verdict.UNKNOWN):
            assert head == self.run.head
            assert not self.changes.dirty
        if verdict in (Verdict.LATE, Verdict.DUPLICATE) and isinstance(event, Answered):
            assert self.head.late + self.head.duplicates == head.late + head.duplicates + 1
        for old, new in zip(tasks, self.run.tasks, strict=True):
            assert new.attempt >= old.attempt
            if not old.is_open and new.status is not old.status:
                assert old.status is not TaskStatus.SUCCEEDED
                assert isinstance(event, _MAY_REOPEN)
        assert self.head.edition >= head.edition
        assert self.changes.ended is (self.head.edition > head.edition)


def check_laws(run: Run) -> None:
    """Assert the laws that hold for a run between any two events."""
    head, tasks = run.head, run.tasks
    for counter, status in _COUNTERS.items():
        assert getattr(head, counter) == sum(task.status is status for task in tasks), counter
    fresh = Run(head, run.plan, run.definition, run.payload, [copied(task) for task in tasks])
    assert run.open_tasks == fresh.open_tasks
    assert (run.required_failed, run.required_timed_out) == (fresh.required_failed, fresh.required_timed_out)
    assert run.hopeless == fresh.hopeless
    assert run.awaited == fresh.awaited
    assert {queue: numbers for queue, numbers in run.awaited_on.items() if numbers} == fresh.awaited_on
    assert [task.missing for task in tasks] == [task.missing for task in fresh.tasks]
    assert run.is_open is (run.open_tasks > 0)
    assert (head.ended_at is None) is run.is_open
    if run.is_open:
        assert head.due_at == head.deadline
    else:
        pending = [one.due_at for one in head.deliveries if one.status is DeliveryStatus.PENDING]
        assert head.due_at == min((due for due in pending if due is not None), default=None)
    for task in tasks:
        _check_task(run, task)


def _check_task(run: Run, task: Task) -> None:
    before = [run.tasks[number] for number in run.plan.dependencies[task.number]]
    if task.attempt:
        assert all(one.status is TaskStatus.SUCCEEDED for one in before), "sent before what it depends on"
    if task.is_open:
        assert bool(task.attempt) is (task.missing == 0), "ready and not sent"
        assert all(one.is_open or one.status is TaskStatus.SUCCEEDED for one in before), "waits for what has ended"
        assert task.ended_at is None
        assert task.cause is None
        assert not task.dead_letter
        assert task.attempt <= task.last_attempt
    else:
        assert task.due_at is None
        assert task.ended_at is not None
        assert (task.cause is None) is (task.status is TaskStatus.SUCCEEDED)
        assert bool(task.reason) is (task.status is not TaskStatus.SUCCEEDED)
    assert (task.result is not None) is (task.status is TaskStatus.SUCCEEDED)
    if task.unsent:
        assert task.attempt
        assert task.is_open or (task.status is TaskStatus.FAILED and task.dead_letter)


def copied(struct: Any) -> Any:
    copy = msgspec.structs.replace(struct)
    if isinstance(copy, RunHead):
        copy.deliveries = [msgspec.structs.replace(delivery) for delivery in copy.deliveries]
    return copy


def stored(task: Task) -> Task:
    """Return the task without the counts that are made again on load."""
    return msgspec.structs.replace(task, missing=0)


def message(payload: dict[str, Any], kind: str = "resultado_coleta", **fields: Any) -> Any:
    body = {"correlation_id": RUN_ID, "tipo_evento": kind, "payload": payload, "timestamp": "2025-10-14T12:05:00Z"}
    return decode_message(json.dumps(body | fields).encode())


def entries(driver: Driver, what: Happened) -> list[HistoryEntry]:
    return [entry for entry in driver.history if entry.what is what]
