"""The rows of the SQLite store: from a run's changes to rows, and from rows to a run.

Rows are built in the event loop's thread before a commit waits, because the engine goes on changing the run. So this
code is written for speed.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, Task
from oraculo.ports.store import Creation
from oraculo.stores.sqlite.bulk import NULL, Row
from oraculo.stores.stored_words import CAUSE, HAPPENED, RUN_STATUS, TASK_STATUS, deliveries_of

_NO_DELIVERIES = "[]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Write:
    """One run's part of a commit. Column 0 of each row is the run's number, which the transaction fills in."""

    __slots__ = ("changes", "head", "history", "run_id", "size", "tasks", "version")

    def __init__(self, changes: Changes, head: Row) -> None:
        steps = changes.run.plan.steps
        self.changes = changes
        self.run_id = changes.run.head.id
        self.version = changes.based_on + 1
        self.head = head
        self.tasks = [_task_row(task, steps[task.number].id) for task in changes.tasks.values()]
        self.history = [_history_row(entry) for entry in changes.history]
        self.size = 1 + len(self.tasks) + len(self.history)  # in rows

    def note_version(self) -> None:
        self.changes.run.head.version = self.version

    def belong_to(self, n: int) -> None:
        self.head[0] = n
        for row in chain(self.tasks, self.history):
            row[0] = n


class Update(Write):
    """The rows of a changed run."""

    __slots__ = ()

    def __init__(self, changes: Changes) -> None:
        super().__init__(changes, [0, *_changing_columns(changes.run.head, changes.based_on + 1)])


class Insert(Write):
    """The rows of a new run."""

    __slots__ = ("fingerprint", "inputs", "key")

    def __init__(self, creation: Creation) -> None:
        run = creation.changes.run
        self.fingerprint = creation.fingerprint
        self.key = creation.idempotency_key
        self.inputs: Row = [0, bytearray(run.definition), bytearray(run.payload)]
        head = [0, *_lasting_columns(run.head, self.fingerprint, self.key), *_changing_columns(run.head, 1)]
        super().__init__(creation.changes, head)
        self.version = 1

    def belong_to(self, n: int) -> None:
        super().belong_to(n)
        self.inputs[0] = n


def _lasting_columns(head: RunHead, fingerprint: str, key: str | None) -> tuple[Any, ...]:
    return (
        head.id,
        head.name,
        head.definition_hash,
        head.created_at,
        head.timeout,
        head.total,
        head.priority,
        NULL if head.traceparent is None else head.traceparent,
        fingerprint,
        NULL if key is None else key,
    )


def _changing_columns(head: RunHead, version: int) -> tuple[Any, ...]:
    return (
        head.status._value_,
        NULL if head.ended_at is None else head.ended_at,
        NULL if head.due_at is None else head.due_at,
        version,
        head.deadline,
        head.edition,
        1 if head.cancelled else 0,
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
    return [
        0,
        task.number,
        step,
        task.status._value_,
        task.attempt,
        task.last_attempt,
        1 if task.unsent else 0,
        NULL if task.due_at is None else task.due_at,
        NULL if task.deadline is None else task.deadline,
        NULL if task.result is None else bytearray(task.result),
        NULL if task.cause is None else task.cause._value_,
        NULL if task.reason is None else task.reason,
        task.mark,
        NULL if task.percent is None else task.percent,
        NULL if task.note is None else task.note,
        NULL if task.sent_at is None else task.sent_at,
        NULL if task.ended_at is None else task.ended_at,
        1 if task.dead_letter else 0,
        NULL if task.via is None else task.via,
    ]


def _history_row(entry: HistoryEntry) -> Row:
    return [
        0,
        entry.seq,
        entry.at,
        entry.what._value_,
        NULL if entry.task is None else entry.task,
        NULL if entry.attempt is None else entry.attempt,
        NULL if entry.detail is None else entry.detail,
    ]


def head_of(row: Sequence[Any]) -> RunHead:
    head = RunHead(*row)
    head.status = RUN_STATUS[row[8]]
    head.cancelled = bool(head.cancelled)
    head.deliveries = [] if row[-1] == _NO_DELIVERIES else deliveries_of(_decode(row[-1]))
    return head


def task_of(row: Sequence[Any]) -> Task:
    task = Task(*row)
    task.status = TASK_STATUS[row[1]]
    task.unsent = bool(task.unsent)
    task.cause = CAUSE[row[8]]
    task.dead_letter = bool(task.dead_letter)
    return task


def entry_of(row: Sequence[Any]) -> HistoryEntry:
    seq, at, what, *rest = row
    return HistoryEntry(seq, at, HAPPENED[what], *rest)
