"""The log lines of a run's history: the text and level of each entry, and the limit for wide runs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from logging import DEBUG, INFO
from typing import Any, NamedTuple

from oraculo.core.history import Happened, HistoryEntry
from oraculo.ports.telemetry import HistoryAdded
from oraculo.wire.timestamps import to_iso
from oraculo.wire.tracebacks import split_traceback

LINES_A_SECOND = 20  # about the tasks of one run; the rest is counted and reported in one line
_WINDOW = 1.0  # seconds

# What another record reports already (RunFinished, DeliveryAttempted, AnswerTaken, DeadLettered) has no line here.
LINES: Mapping[Happened, tuple[str, int] | None] = {
    Happened.STARTED: ("run accepted", INFO),
    Happened.SENT: ("command sent", DEBUG),
    Happened.PROGRESS: ("progress", DEBUG),
    Happened.SUCCEEDED: ("task answered", DEBUG),
    Happened.ATTEMPT_FAILED: ("attempt failed", INFO),
    Happened.FAILED: ("task failed", INFO),
    Happened.TIMED_OUT: ("task timed out", INFO),
    Happened.SKIPPED: ("task skipped", DEBUG),
    Happened.CANCELLED: ("task cancelled", INFO),
    Happened.REOPENED: ("task reopened", INFO),
    Happened.BROKER_LOST: ("commands of a lost broker are sent again", INFO),
    Happened.LATE: None,
    Happened.DUPLICATE: None,
    Happened.AMENDED: ("late answer accepted", INFO),
    Happened.ANSWER_REFUSED: None,
    Happened.RUN_ENDED: None,
    Happened.RUN_REOPENED: ("run reopened", INFO),
    Happened.DELIVERED: None,
    Happened.DELIVERY_FAILED: None,
    Happened.UNDELIVERED: None,
    Happened.DEAD_LETTER_DISCARDED: ("dead letter discarded", INFO),
}
_REOPENINGS = (Happened.REOPENED, Happened.RUN_REOPENED)  # their detail says how: "repeated" or "redriven"
_QUIET = frozenset(what for what, line in LINES.items() if line is None or line[1] == DEBUG)


class HistoryLine(NamedTuple):
    event: str
    level: int
    fields: dict[str, Any]


def lines_of(record: HistoryAdded, *, with_debug: bool) -> Iterator[HistoryLine]:
    for entry in record.entries:
        if entry.what in _QUIET and not with_debug:
            continue
        if (line := LINES[entry.what]) is not None:
            event, level = line
            if entry.what in _REOPENINGS and entry.detail is not None:
                event = event.replace("reopened", entry.detail)
            yield HistoryLine(event, level, _fields(record, entry))


def _fields(record: HistoryAdded, entry: HistoryEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {"correlation_id": record.run_id}
    if entry.what is Happened.STARTED:
        return fields | {"name": record.name, "tasks": len(record.tasks)}
    if entry.task is not None:
        step, task = record.steps[entry.task], record.tasks[entry.task]
        fields |= {"tarefa": step.id, "fila": step.queue}
        if entry.attempt is not None:
            fields["tentativa"] = entry.attempt
        if entry.what is Happened.ATTEMPT_FAILED and task.awaits_retry and task.due_at is not None:
            fields["proxima_tentativa_em"] = to_iso(task.due_at)
    if entry.detail is not None and entry.what not in _REOPENINGS:
        fields["reason"] = split_traceback(entry.detail)[0]
    return fields


class _Window:
    """The lines of one run within one second."""

    __slots__ = ("began", "left_out", "written")

    def __init__(self, began: float) -> None:
        self.began = began
        self.written = 0
        self.left_out: Counter[str] = Counter()


class TaskLines:
    """The limit of lines about tasks, so that thousands of failures at once do not fill the log."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._due = 0.0

    def allows(self, run_id: str, event: str, now: float) -> bool:
        """Return whether the run may write one more line now. Count the line if not."""
        window = self._windows.setdefault(run_id, _Window(now))
        if window.written < LINES_A_SECOND:
            window.written += 1
            return True
        window.left_out[event] += 1
        return False

    def end(self, run_id: str) -> dict[str, int]:
        """Return the numbers of lines left out of a run that has ended, by kind."""
        window = self._windows.pop(run_id, None)
        return {} if window is None else dict(window.left_out)

    def left_out(self, now: float) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the runs whose second is over, with the numbers of lines left out, by kind."""
        if now < self._due:
            return
        self._due = now + _WINDOW
        for run_id in [run_id for run_id, window in self._windows.items() if now - window.began >= _WINDOW]:
            if left_out := self._windows.pop(run_id).left_out:
                yield run_id, dict(left_out)
