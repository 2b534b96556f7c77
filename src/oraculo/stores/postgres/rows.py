"""The rows that the PostgreSQL store writes for a run's changes, of the types in 0002_commit.sql, and runs from rows.

asyncpg encodes whole rows three times as fast as a list for each column.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, Task
from oraculo.ports.store import Creation, Snapshot
from oraculo.stores.commit_queue import Write
from oraculo.stores.records import ENTRY, HEAD, TASK, Record, entry_record, head_of, head_record, task_of, task_record

Row = tuple[Any, ...]

ROW_BYTES = 200  # rough size of a row without results and payloads
BETWEEN = "\x1f"  # separates id and name in the searched text; no id holds it
_OF_A_CHANGE = (None,) * 5  # in the place of what only a new run has
_REASON, _NOTE, _DETAIL = TASK.index("reason"), TASK.index("note"), ENTRY.index("detail")


class PostgresWrite(Write):
    """One run's rows. The first column is added when a group is written."""

    __slots__ = ("head", "history", "tasks")

    def __init__(self, changes: Changes, creation: Creation | None = None) -> None:
        super().__init__(changes, creation)
        run, head = changes.run, changes.run.head
        beside: Row = _OF_A_CHANGE
        if creation is not None:
            search = f"{searched(head.id)}{BETWEEN}{searched(head.name)}"
            beside = (search, self.fingerprint, self.key, run.definition, run.payload)
        steps = run.plan.steps
        self.head: Row = (*head_record(head, self.version), *beside)
        self.tasks = [_task_row(task, steps[task.number].id) for task in changes.tasks.values()]
        self.history = [_history_row(entry) for entry in changes.history]
        self.size = ROW_BYTES * (1 + len(self.tasks) + len(self.history))
        self.size += sum(len(task.result) for task in changes.tasks.values() if task.result is not None)
        self.size += len(run.definition) + len(run.payload) if creation is not None else 0


def searched(text: str) -> str:
    return text.casefold()


def _task_row(task: Task, step: str) -> Row:
    record = task_record(task)
    _replace_nul(record, _REASON)
    _replace_nul(record, _NOTE)
    return (*record, step)


def _history_row(entry: HistoryEntry) -> Record:
    record = entry_record(entry)
    _replace_nul(record, _DETAIL)
    return record


def _replace_nul(record: Record, place: int) -> None:
    """Replace NUL, the one character that PostgreSQL's texts cannot hold: a reason with it must not stop a commit."""
    text = record[place]
    if text is not None and "\0" in text:
        record[place] = text.replace("\0", "\N{SYMBOL FOR NULL}")


def snapshots_of(rows: Iterable[Sequence[Any]]) -> dict[str, Snapshot]:
    """Return runs from rows of tasks in any order. A run's first row also holds the run."""
    tasks: dict[int, list[Task]] = {}
    snapshots: list[Snapshot] = []
    for n, definition, payload, *columns in rows:
        of_run = tasks.setdefault(n, [])
        of_run.append(task_of(columns[len(HEAD) :]))
        if definition is not None:
            snapshots.append(Snapshot(head_of(columns[: len(HEAD)]), definition, payload, of_run))
    for of_run in tasks.values():
        of_run.sort(key=attrgetter("number"))
    return {snapshot.head.id: snapshot for snapshot in snapshots}
