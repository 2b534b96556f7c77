"""The words that a store wrote for a status or a cause, read back. Tables: an enum's own reading takes several times as
long, and is needed for every task of every run that is loaded."""

from collections.abc import Iterable, Sequence
from typing import Any

from oraculo.core.run import Cause, RunStatus, TaskStatus

RUN_STATUS = {status.value: status for status in RunStatus}
TASK_STATUS = {status.value: status for status in TaskStatus}
CAUSE: dict[str | None, Cause | None] = {cause.value: cause for cause in Cause} | {None: None}


def census_of(rows: Iterable[Sequence[Any]]) -> dict[RunStatus, int]:
    """Of each status and how many have it; where there are none, there is no row."""
    return dict.fromkeys(RunStatus, 0) | {RUN_STATUS[status]: count for status, count in rows}
