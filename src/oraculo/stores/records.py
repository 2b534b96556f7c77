"""Runs, tasks and history entries as flat records, which every store writes in its own way.

A record has the values of a struct in the order of its fields, with enums as their words. Words are read through dicts,
because an enum's own lookup takes several times as long, and each task of each loaded run needs it. A change of a word
needs a new layout number in every store: see tests/stores/test_records.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never, TypeVar

import msgspec

from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.run import Cause, Channel, DeliveryStatus, RunDelivery, RunHead, RunStatus, Task, TaskStatus
from oraculo.errors import WrittenByNewer

Meant = TypeVar("Meant")
Record = list[Any]

HEAD = RunHead.__struct_fields__
TASK = Task.__struct_fields__[:-1]  # without `missing`, which is counted on load
ENTRY = HistoryEntry.__struct_fields__

_RUN_STATUS, _CANCELLED = map(HEAD.index, ("status", "cancelled"))
_TASK_STATUS, _UNSENT, _CAUSE, _DEAD_LETTER = map(TASK.index, ("status", "unsent", "cause", "dead_letter"))
_NO_DELIVERIES = "[]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class _Words(dict[str | None, Meant]):
    """The members of an enum by their stored word."""

    def __init__(self, what: str, known: Mapping[str | None, Meant]) -> None:
        super().__init__(known)
        self._what = what

    def __missing__(self, word: str | None) -> Never:
        raise WrittenByNewer(f"{word!r} for {self._what}")


RUN_STATUS = _Words("the status of a run", {status.value: status for status in RunStatus})
TASK_STATUS = _Words("the status of a task", {status.value: status for status in TaskStatus})
CAUSE: _Words[Cause | None] = _Words("why a task ended", {cause.value: cause for cause in Cause} | {None: None})
HAPPENED = _Words("an event of a run's history", {what.value: what for what in Happened})
CHANNEL = _Words("the way of a delivery", {channel.value: channel for channel in Channel})
DELIVERY_STATUS = _Words("the status of a delivery", {status.value: status for status in DeliveryStatus})


# -- written --------------------------------------------------------------------------------------------------------


def head_record(head: RunHead, version: int, null: Any = None) -> Record:
    """Return the head at its new version, with its deliveries as JSON, and `null` for what it has not."""
    return [
        head.id,
        head.name,
        head.definition_hash,
        head.created_at,
        head.deadline,
        head.timeout,
        head.total,
        version,
        head.status._value_,
        head.priority,
        null if head.traceparent is None else head.traceparent,
        null if head.ended_at is None else head.ended_at,
        null if head.due_at is None else head.due_at,
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
    ]


def task_record(task: Task, null: Any = None) -> Record:
    return [
        task.number,
        task.status._value_,
        task.attempt,
        task.last_attempt,
        task.unsent,
        null if task.due_at is None else task.due_at,
        null if task.deadline is None else task.deadline,
        null if task.result is None else task.result,
        null if task.cause is None else task.cause._value_,
        null if task.reason is None else task.reason,
        task.mark,
        null if task.percent is None else task.percent,
        null if task.note is None else task.note,
        null if task.sent_at is None else task.sent_at,
        null if task.ended_at is None else task.ended_at,
        task.dead_letter,
        null if task.via is None else task.via,
    ]


def entry_record(entry: HistoryEntry, null: Any = None) -> Record:
    return [
        entry.seq,
        entry.at,
        entry.what._value_,
        null if entry.task is None else entry.task,
        null if entry.attempt is None else entry.attempt,
        null if entry.detail is None else entry.detail,
    ]


# -- read: a store without booleans gives numbers -------------------------------------------------------------------


def head_of(record: Sequence[Any]) -> RunHead:
    head = RunHead(*record)
    head.status = RUN_STATUS[record[_RUN_STATUS]]
    head.cancelled = bool(record[_CANCELLED])
    head.deliveries = [] if record[-1] == _NO_DELIVERIES else _deliveries_of(_decode(record[-1]))
    return head


def task_of(record: Sequence[Any]) -> Task:
    task = Task(*record)
    task.status = TASK_STATUS[record[_TASK_STATUS]]
    task.unsent = bool(record[_UNSENT])
    task.cause = CAUSE[record[_CAUSE]]
    task.dead_letter = bool(record[_DEAD_LETTER])
    return task


def entry_of(record: Sequence[Any]) -> HistoryEntry:
    seq, at, what, *rest = record
    return HistoryEntry(seq, at, HAPPENED[what], *rest)


def _deliveries_of(stored: Sequence[Mapping[str, Any]]) -> list[RunDelivery]:
    """Look the words up first, because msgspec's error would not name an unknown one."""
    for delivery in stored:
        _ = CHANNEL[delivery["channel"]], DELIVERY_STATUS[delivery["status"]]
    return msgspec.convert(stored, list[RunDelivery])


def census_of(rows: Iterable[Sequence[Any]]) -> dict[RunStatus, int]:
    """Return the number of runs in each status. A status that only a newer version knows is left out."""
    known = {RUN_STATUS[status]: count for status, count in rows if status in RUN_STATUS}
    return dict.fromkeys(RunStatus, 0) | known


def unchanged_among(copies: Iterable[RunHead], stored: Mapping[str, RunHead]) -> frozenset[str]:
    """Return the ids of copies with the stored version. The creation time counts too, because an id can be reused."""
    return frozenset(
        copy.id
        for copy in copies
        if (now := stored.get(copy.id)) is not None and (now.version, now.created_at) == (copy.version, copy.created_at)
    )
