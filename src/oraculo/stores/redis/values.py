"""The values of the Redis store: a run's changes as arguments of a script, and values as a run's head and tasks.

They are built before a commit waits, because the engine goes on changing the run. Values are MessagePack arrays without
names. A new field goes to the end, so that older values can still be read. A task's value begins with five bytes for
scripts: whether it is unsent, and the attempt.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from oraculo.clients.redis import Command, Part, Script
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, Task, TaskStatus
from oraculo.ports.store import Creation, Snapshot
from oraculo.stores.redis.layout import member, slot_name
from oraculo.stores.stored_words import CAUSE, HAPPENED, RUN_STATUS, TASK_STATUS, deliveries_of

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode

_UNSENT, _SENT = b"1", b"0"
_TASK_HEAD = 5


class Write:
    """One run's part of a commit, as the arguments of its script."""

    __slots__ = ("changes", "command", "is_written", "run_id", "version")

    def __init__(self, changes: Changes, version: int, script: Script, *arguments: Part) -> None:
        self.changes = changes
        self.run_id = changes.run.head.id
        self.version = version
        self.command: Command = ("EVALSHA", script.sha, 0, *arguments)
        self.is_written = False

    @property
    def is_insert(self) -> bool:
        return self.version == 1

    def note_version(self) -> None:
        self.changes.run.head.version = self.version
        self.is_written = True


def insert(creation: Creation, script: Script) -> Write:
    changes, run = creation.changes, creation.changes.run
    head, key = run.head, creation.idempotency_key
    return Write(
        changes,
        1,
        script,
        head.id.encode(),
        key_field(key),
        creation.fingerprint.encode(),
        head.name.encode(),
        _state(head),
        *_sections(changes, 1, b"definition", run.definition, b"payload", run.payload),
    )


def key_field(key: str | None) -> bytes:
    """Return the field of an idempotency key; empty for none."""
    return b"" if key is None else f"={key}".encode()


def update(changes: Changes, script: Script) -> Write:
    version, head = changes.based_on + 1, changes.run.head
    return Write(
        changes, version, script, head.id.encode(), changes.based_on, _state(head), *_sections(changes, version)
    )


def _state(head: RunHead) -> str:
    ended = "" if head.ended_at is None or head.due_at is not None else repr(head.ended_at)
    return f"{head.status._value_}:{ended}"


class _Index:
    """The changes of one index by this run: members that it gains and loses."""

    __slots__ = ("gained", "lost")

    def __init__(self) -> None:
        self.gained: list[Part] = []
        self.lost: list[Part] = []

    def note(self, value: Part | None, place: bytes) -> None:
        if value is None:
            self.lost.append(place)
        else:
            self.gained += (value, place)


def _sections(changes: Changes, version: int, *inputs: Part) -> list[Part]:
    """Return the arguments as the scripts expect them, each list after its length."""
    head, run_id = changes.run.head, changes.run.head.id.encode()
    fields: list[Part] = [b"version", version, b"head", _head_value(head, version), *inputs]
    timers, unsent, held = _Index(), _Index(), _Index()
    timers.note(_score(head.due_at), member(run_id, None))
    for number, task in changes.tasks.items():
        place = member(run_id, number)
        fields += (number, _task_value(task))
        timers.note(_score(task.due_at), place)
        unsent.note(b"0" if task.unsent else None, place)
        held.note(_holder(task), place)
    sections: list[Part] = [len(changes.history), *map(_history_value, changes.history), len(fields), *fields]
    for index in (timers, unsent, held):
        lost = () if inputs else index.lost  # a new run is in no index yet
        sections += (len(index.gained), *index.gained, len(lost), *lost)
    return sections


def _score(due_at: float | None) -> str | None:
    return None if due_at is None else repr(due_at)


def _holder(task: Task) -> bytes | None:
    """Return the slot of the broker that took the command in work, or the dead letter."""
    if task.unsent or not (task.dead_letter or task.status is TaskStatus.RUNNING):
        return None
    return slot_name(task.via, task.dead_letter)


def _head_value(head: RunHead, version: int) -> bytes:
    return _encode(
        (
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
            head.traceparent,
            head.ended_at,
            head.due_at,
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
            head.deliveries,
        )
    )


def _task_value(task: Task) -> bytes:
    rest = _encode(
        (
            task.status._value_,
            task.last_attempt,
            task.due_at,
            task.deadline,
            task.result,
            None if task.cause is None else task.cause._value_,
            task.reason,
            task.mark,
            task.percent,
            task.note,
            task.sent_at,
            task.ended_at,
            task.dead_letter,
            task.via,
        )
    )
    return (_UNSENT if task.unsent else _SENT) + task.attempt.to_bytes(4, "big") + rest


def _history_value(entry: HistoryEntry) -> bytes:
    return _encode((entry.seq, entry.at, entry.what._value_, entry.task, entry.attempt, entry.detail))


_STATUS_PLACE = 8


def snapshot_of(reply: list[bytes]) -> Snapshot:
    """Return a run from its hash, in which fields and values alternate in any order."""
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    head, definition, payload = fields[b"head"], fields[b"definition"], fields[b"payload"]
    numbers = sorted(int(name) for name in fields if name.isdigit())
    tasks = [task_of(number, fields[b"%d" % number]) for number in numbers]
    return Snapshot(head_of(head), definition, payload, tasks)


def head_of(value: bytes) -> RunHead:
    row = _decode(value)
    head = RunHead(*row)
    head.status = RUN_STATUS[row[_STATUS_PLACE]]
    if head.deliveries:
        head.deliveries = deliveries_of(row[-1])
    return head


def task_of(number: int, value: bytes) -> Task:
    status, last_attempt, due_at, deadline, result, cause, *rest = _decode(memoryview(value)[_TASK_HEAD:])
    return Task(
        number,
        TASK_STATUS[status],
        attempt_of(value),
        last_attempt,
        value[:1] == _UNSENT,
        due_at,
        deadline,
        result,
        CAUSE[cause],
        *rest,
    )


def attempt_of(value: bytes) -> int:
    return int.from_bytes(value[1:_TASK_HEAD], "big")


def entries_of(values: Iterable[bytes]) -> list[HistoryEntry]:
    rows = map(_decode, values)
    return [HistoryEntry(seq, at, HAPPENED[what], *rest) for seq, at, what, *rest in rows]
