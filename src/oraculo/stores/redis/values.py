"""The values of the Redis store: a run's changes as arguments of a script, and values as a run's head and tasks.

Values are records as MessagePack. A task's value begins with five bytes for scripts: whether it is unsent, and the
attempt. A script may set the first alone, so it counts.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from oraculo.clients.redis import Command, Part, Script
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, Task, TaskStatus
from oraculo.ports.store import Creation, Snapshot
from oraculo.stores import records
from oraculo.stores.commit_queue import Write
from oraculo.stores.records import entry_record, head_record, task_record
from oraculo.stores.redis.layout import member, slot_name

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode

_UNSENT, _SENT = b"1", b"0"
_TASK_HEAD = 5
_PLACE_OF_UNSENT = records.TASK.index("unsent")


class RedisWrite(Write):
    """One run's part of a commit, as the arguments of its script."""

    __slots__ = ("command", "is_written")

    def __init__(self, script: Script, changes: Changes, creation: Creation | None = None) -> None:
        super().__init__(changes, creation)
        arguments = _of_a_change(changes) if creation is None else _of_a_creation(creation)
        self.command: Command = ("EVALSHA", script.sha, 0, *arguments)
        self.is_written = False

    @property
    def is_insert(self) -> bool:
        return self.version == 1

    def note_version(self) -> None:
        super().note_version()
        self.is_written = True


def _of_a_creation(creation: Creation) -> list[Part]:
    run = creation.changes.run
    return [
        run.id.encode(),
        key_field(creation.idempotency_key),
        creation.fingerprint.encode(),
        run.head.name.encode(),
        _state(run.head),
        *_sections(creation.changes, 1, b"definition", run.definition, b"payload", run.payload),
    ]


def _of_a_change(changes: Changes) -> list[Part]:
    head = changes.run.head
    return [head.id.encode(), changes.based_on, _state(head), *_sections(changes, changes.based_on + 1)]


def key_field(key: str | None) -> bytes:
    """Return the field of an idempotency key; empty for none."""
    return b"" if key is None else f"={key}".encode()


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
    fields: list[Part] = [b"version", version, b"head", _encode(head_record(head, version)), *inputs]
    timers, unsent, held = _Index(), _Index(), _Index()
    timers.note(_score(head.due_at), member(run_id, None))
    for number, task in changes.tasks.items():
        place = member(run_id, number)
        fields += (number, _task_value(task))
        timers.note(_score(task.due_at), place)
        unsent.note(b"0" if task.unsent else None, place)
        held.note(_holder(task), place)
    sections: list[Part] = [
        len(changes.history),
        *(_encode(entry_record(entry)) for entry in changes.history),
        len(fields),
        *fields,
    ]
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


def _task_value(task: Task) -> bytes:
    return (_UNSENT if task.unsent else _SENT) + task.attempt.to_bytes(4, "big") + _encode(task_record(task))


def snapshot_of(reply: list[bytes]) -> Snapshot:
    """Return a run from its hash, in which fields and values alternate in any order."""
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    head, definition, payload = fields[b"head"], fields[b"definition"], fields[b"payload"]
    numbers = sorted(int(name) for name in fields if name.isdigit())
    tasks = [task_of(fields[b"%d" % number]) for number in numbers]
    return Snapshot(head_of(head), definition, payload, tasks)


def head_of(value: bytes) -> RunHead:
    return records.head_of(_decode(value))


def task_of(value: bytes) -> Task:
    record = _decode(memoryview(value)[_TASK_HEAD:])
    record[_PLACE_OF_UNSENT] = value[:1] == _UNSENT
    return records.task_of(record)


def attempt_of(value: bytes) -> int:
    return int.from_bytes(value[1:_TASK_HEAD], "big")


def entries_of(values: Iterable[bytes]) -> list[HistoryEntry]:
    return [records.entry_of(_decode(value)) for value in values]
