"""The rows that the SQLite store writes for a run's changes."""

from itertools import chain

from oraculo.core.run import Changes, Task
from oraculo.ports.store import Creation
from oraculo.stores.commit_queue import Write
from oraculo.stores.records import HEAD, TASK, entry_record, head_record, task_record
from oraculo.stores.sqlite.bulk import NULL, Row

# A row begins with the run's number, and a record after it.
_CANCELLED, _UNSENT, _DEAD_LETTER, _RESULT = (
    1 + place
    for place in (HEAD.index("cancelled"), TASK.index("unsent"), TASK.index("dead_letter"), TASK.index("result"))
)


class SqliteWrite(Write):
    """One run's rows. Column 0 of each is the run's number, which the transaction fills in."""

    __slots__ = ("head", "history", "inputs", "tasks")

    def __init__(self, changes: Changes, creation: Creation | None = None) -> None:
        super().__init__(changes, creation)
        run = changes.run
        steps = run.plan.steps
        self.head = [0, *head_record(run.head, self.version, NULL)]
        self.head[_CANCELLED] = int(run.head.cancelled)
        if creation is not None:
            self.head += (self.fingerprint, NULL if self.key is None else self.key)
            self.inputs: Row = [0, bytearray(run.definition), bytearray(run.payload)]
        self.tasks = [_task_row(task, steps[task.number].id) for task in changes.tasks.values()]
        self.history = [[0, *entry_record(entry, NULL)] for entry in changes.history]
        self.size = 1 + len(self.tasks) + len(self.history)

    def belong_to(self, n: int, *, is_new: bool = False) -> None:
        for row in chain((self.head,), self.tasks, self.history, (self.inputs,) if is_new else ()):
            row[0] = n


def _task_row(task: Task, step: str) -> Row:
    row = task_record(task, NULL)
    row.insert(0, 0)
    row.append(step)
    row[_UNSENT] = 1 if task.unsent else 0
    row[_DEAD_LETTER] = 1 if task.dead_letter else 0
    if task.result is not None:
        row[_RESULT] = bytearray(task.result)
    return row
