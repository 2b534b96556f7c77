"""The rows of the PostgreSQL store: a run's changes as rows of the types in 0002_commit.sql, and rows as a run.

Rows are built before a commit waits, because the engine goes on changing the run. asyncpg encodes whole rows three
times as fast as a list for each column.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, Task
from oraculo.ports.store import Creation, Snapshot
from oraculo.stores.stored_words import CAUSE, HAPPENED, RUN_STATUS, TASK_STATUS, deliveries_of

Row = tuple[Any, ...]

HEAD_COLUMNS = 24
_NO_DELIVERIES = "[]"
ROW_BYTES = 200  # rough size of a row without results and payloads
BETWEEN = "\x1f"  # separates id and name in the searched text; no id holds it
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Write:
    """One run's part of a commit. The first column of its rows is filled in when a group is written."""

    __slots__ = ("changes", "head", "history", "run_id", "size", "tasks", "version")

    def __init__(self, changes: Changes, head: Row, version: int) -> None:
        steps = changes.run.plan.steps
        self.changes = changes
        self.run_id = changes.run.head.id
        self.version = version
        self.head = head
        self.tasks = [_task_row(task, steps[task.number].id) for task in changes.tasks.values()]
        self.history = [_history_row(entry) for entry in changes.history]
        self.size = ROW_BYTES * (1 + len(self.tasks) + len(self.history))
        self.size += sum(len(task.result) for task in changes.tasks.values() if task.result is not None)

    def note_version(self) -> None:
        self.changes.run.head.version = self.version


class Update(Write):
    """The rows of a changed run."""

    __slots__ = ()

    def __init__(self, changes: Changes) -> None:
        version = changes.based_on + 1
        head = changes.run.head
        super().__init__(changes, (head.id, *_changing_columns(head, version)), version)


class Insert(Write):
    """The rows of a new run."""

    __slots__ = ("fingerprint", "key")

    def __init__(self, creation: Creation) -> None:
        run = creation.changes.run
        self.fingerprint = creation.fingerprint
        self.key = creation.idempotency_key
        lasting = _lasting_columns(run.head, self.fingerprint, self.key)
        head = (*lasting, run.definition, run.payload, *_changing_columns(run.head, 1))
        super().__init__(creation.changes, head, 1)
        self.size += len(run.definition) + len(run.payload)


def searched(text: str) -> str:
    return text.casefold()


def _lasting_columns(head: RunHead, fingerprint: str, key: str | None) -> Row:
    return (
        head.id,
        head.name,
        f"{searched(head.id)}{BETWEEN}{searched(head.name)}",
        head.definition_hash,
        head.created_at,
        head.timeout,
        head.total,
        head.priority,
        head.traceparent,
        fingerprint,
        key,
    )


def _changing_columns(head: RunHead, version: int) -> Row:
    return (
        head.status,
        head.ended_at,
        head.due_at,
        version,
        head.deadline,
        head.edition,
        head.cancelled,
        head.entries,
        head.late,
        head.duplicates,
        head.succeeded,
        head.failed,
        head.timed_out,
        head.skipped,
        head.task_cancelled,
        _encode(head.deliveries).decode() if head.deliveries else _NO_DELIVERIES,
    )


def _task_row(task: Task, step: str) -> Row:
    return (
        task.number,
        step,
        task.status,
        task.attempt,
        task.last_attempt,
        task.unsent,
        task.due_at,
        task.deadline,
        task.result,
        task.cause,
        _without_nul(task.reason),
        task.mark,
        task.percent,
        _without_nul(task.note),
        task.sent_at,
        task.ended_at,
        task.dead_letter,
        task.via,
    )


def _history_row(entry: HistoryEntry) -> Row:
    return (entry.seq, entry.at, entry.what, entry.task, entry.attempt, _without_nul(entry.detail))


def _without_nul(text: str | None) -> str | None:
    """Remove NUL, the one character that PostgreSQL's texts cannot hold: a reason with it must not stop a commit."""
    return text.replace("\0", "\N{SYMBOL FOR NULL}") if text is not None and "\0" in text else text


def head_of(row: Sequence[Any]) -> RunHead:
    head = RunHead(*row)
    head.status = RUN_STATUS[row[8]]
    head.deliveries = [] if row[-1] == _NO_DELIVERIES else deliveries_of(_decode(row[-1]))
    return head


def task_of(row: Sequence[Any]) -> Task:
    task = Task(*row)
    task.status = TASK_STATUS[row[1]]
    task.cause = CAUSE[row[8]]
    return task


def entry_of(row: Sequence[Any]) -> HistoryEntry:
    seq, at, what, task, attempt, detail = row
    return HistoryEntry(seq, at, HAPPENED[what], task, attempt, detail)


def snapshots_of(rows: Iterable[Sequence[Any]]) -> dict[str, Snapshot]:
    """Return runs from rows of tasks in any order. A run's first row also holds the run."""
    tasks: dict[int, list[Task]] = {}
    snapshots: list[Snapshot] = []
    for n, definition, payload, *columns in rows:
        of_run = tasks.setdefault(n, [])
        of_run.append(task_of(columns[HEAD_COLUMNS:]))
        if definition is not None:
            snapshots.append(Snapshot(head_of(columns[:HEAD_COLUMNS]), definition, payload, of_run))
    for of_run in tasks.values():
        of_run.sort(key=attrgetter("number"))
    return {snapshot.head.id: snapshot for snapshot in snapshots}
