"""The enum values that stores write (status, cause, event, channel), read back through dicts.

An enum's own lookup takes several times as long, and each task of each loaded run needs it. A change of a word needs a
new layout number in every store: see tests/stores/test_stored_words.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never, TypeVar

import msgspec

from oraculo.core.history import Happened
from oraculo.core.run import Cause, Channel, DeliveryStatus, RunDelivery, RunStatus, TaskStatus
from oraculo.errors import WrittenByNewer

Meant = TypeVar("Meant")


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


def deliveries_of(stored: Sequence[Mapping[str, Any]]) -> list[RunDelivery]:
    """Read deliveries field by field, because msgspec's error would not name an unknown word."""
    for delivery in stored:
        _ = CHANNEL[delivery["channel"]], DELIVERY_STATUS[delivery["status"]]
    return msgspec.convert(stored, list[RunDelivery])


def census_of(rows: Iterable[Sequence[Any]]) -> dict[RunStatus, int]:
    """Return the number of runs in each status. A status that only a newer version knows is left out."""
    known = {RUN_STATUS[status]: count for status, count in rows if status in RUN_STATUS}
    return dict.fromkeys(RunStatus, 0) | known
