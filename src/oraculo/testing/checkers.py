"""Checks that hold for any run at rest, for example in a store after a crash.

Each returns the faults that it found, as texts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from oraculo.core.aggregate import end_status
from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.plan import Plan
from oraculo.core.run import OPEN, Run, RunStatus, TaskStatus
from oraculo.pipeline.definition import content_hash, decode_definition
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Snapshot, Storage


async def check_store(store: Storage) -> list[str]:
    """Return the faults of every run in the store, each after the run's id."""
    faults: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.runs(RunQuery(limit=200, cursor=cursor))
        snapshots = await store.load([head.id for head in page.heads])
        for run_id, snapshot in snapshots.items():
            history = await store.history(run_id, limit=1_000_000)
            faults += [f"run {run_id}: {fault}" for fault in check_run(snapshot, history)]
        cursor = page.cursor
        if cursor is None:
            return faults


def check_run(snapshot: Snapshot, history: Sequence[HistoryEntry]) -> list[str]:
    run = Run(
        snapshot.head,
        Plan(decode_definition(snapshot.definition)),
        snapshot.definition,
        snapshot.payload,
        snapshot.tasks,
    )
    return [*check_state(run), *check_history(run, history)]


def check_state(run: Run) -> list[str]:
    """Return contradictions between the run and its tasks."""
    return [*_head(run), *_tasks(run), *_order(run)]


def _head(run: Run) -> Iterator[str]:
    head = run.head
    counts = Counter(task.status for task in run.tasks)
    counted = {
        TaskStatus.SUCCEEDED: head.succeeded,
        TaskStatus.FAILED: head.failed,
        TaskStatus.TIMED_OUT: head.timed_out,
        TaskStatus.SKIPPED: head.skipped,
        TaskStatus.CANCELLED: head.task_cancelled,
    }
    for status, number in counted.items():
        if counts[status] != number:
            yield f"the head counts {number} tasks as {status}, there are {counts[status]}"
    if head.total != len(run.tasks) or len(run.plan) != len(run.tasks):
        yield f"the head says {head.total} tasks, the plan {len(run.plan)}, there are {len(run.tasks)}"
    if content_hash(run.definition) != head.definition_hash:
        yield "the definition is not the one that the run is pinned to"
    if run.is_open != bool(run.open_tasks):
        yield f"the run is {head.status} with {run.open_tasks} tasks open"
    if run.is_open and head.due_at is None:
        yield "the run is open and no timer will end it"
    if not run.is_open and head.ended_at is None:
        yield "the run ended and does not say when"
    if not run.is_open and not run.open_tasks and end_status(run) is not head.status:
        yield f"the run ended as {head.status}, its tasks make it {end_status(run)}"


def _tasks(run: Run) -> Iterator[str]:
    for task in run.tasks:
        name = run.plan.steps[task.number].id
        if (task.status is TaskStatus.SUCCEEDED) != (task.result is not None):
            yield f"task {name} is {task.status} and its result is {task.result!r}"
        if task.status in OPEN and task.ended_at is not None:
            yield f"task {name} is {task.status} and has an end"
        if task.status not in OPEN and task.due_at is not None:
            yield f"task {name} is {task.status} and its timer is set"
        if task.awaits_retry and task.due_at is None:
            yield f"task {name} awaits its next attempt and no timer will begin it"
        if task.attempt > task.last_attempt:
            yield f"task {name} is at attempt {task.attempt} of {task.last_attempt}"


def _order(run: Run) -> Iterator[str]:
    """Yield tasks that were sent before all their dependencies had succeeded."""
    for task in run.tasks:
        for number in run.plan.dependencies[task.number]:
            before = run.tasks[number]
            if task.attempt and before.status is not TaskStatus.SUCCEEDED:
                names = run.plan.steps
                yield f"task {names[task.number].id} was sent though {names[number].id} is {before.status}"


def check_history(run: Run, history: Sequence[HistoryEntry]) -> list[str]:
    """Return contradictions between a run and its whole history."""
    return list(_history(run, history))


def _history(run: Run, history: Sequence[HistoryEntry]) -> Iterator[str]:
    if [entry.seq for entry in history] != list(range(1, run.head.entries + 1)):
        yield f"the history has {len(history)} entries, the head says {run.head.entries}, or there are gaps"
    ends = sum(entry.what is Happened.RUN_ENDED for entry in history)
    if ends != run.head.edition:
        yield f"the history has {ends} ends, and the head {run.head.edition}"
    if run.head.status is not RunStatus.RUNNING and not ends:
        yield f"the run is {run.head.status} and its history has no end"
    for number, task in enumerate(run.tasks):
        events = [entry.what for entry in history if entry.task == number]
        if task.status is TaskStatus.SUCCEEDED and not {Happened.SUCCEEDED, Happened.AMENDED} & set(events):
            yield f"task {run.plan.steps[number].id} succeeded, and its history does not say so"
        if events.count(Happened.SUCCEEDED) > 1:
            yield f"task {run.plan.steps[number].id} succeeded {events.count(Happened.SUCCEEDED)} times in its history"
