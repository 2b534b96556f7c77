"""The words that a store wrote for a status or a cause, read back. Tables: an enum's own reading takes several times as
long, and is needed for every task of every run that is loaded."""

from collections.abc import Iterable, Sequence
from typing import Any, Never, TypeVar

from oraculo.core.run import Cause, RunStatus, TaskStatus

Meant = TypeVar("Meant")


class _Words(dict[str | None, Meant]):
    """A layout may be the same and have a word more: whoever goes back to the version before is told so. No StoreError,
    which would be waited for: one run has the word, and holds up no other."""

    def __missing__(self, word: str | None) -> Never:
        raise LookupError(f"the store says {word!r} of a run, as a newer ORÁCULO writes it: run that version")


RUN_STATUS = _Words({status.value: status for status in RunStatus})
TASK_STATUS = _Words({status.value: status for status in TaskStatus})
CAUSE: _Words[Cause | None] = _Words({cause.value: cause for cause in Cause} | {None: None})


def census_of(rows: Iterable[Sequence[Any]]) -> dict[RunStatus, int]:
    """Of each status and how many have it; where there are none, there is no row."""
    return dict.fromkeys(RunStatus, 0) | {RUN_STATUS[status]: count for status, count in rows}
