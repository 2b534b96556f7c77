"""The events of a run and the verdicts on them. An event is frozen and valid, so the state machine trusts it.

An event names its task by number. `core.answers` finds the number for a worker's answer.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from oraculo.core.phase import Looks

Untaken = Mapping[str | None, str]  # by queue, why its commands are not taken now; None stands for every queue
_NOTHING: Untaken = MappingProxyType({})
_UNSEEN: Looks = MappingProxyType({})


class Verdict(StrEnum):
    """The outcome of one event."""

    APPLIED = "applied"
    LATE = "late"  # the task, the run or, for progress, the attempt had ended
    DUPLICATE = "duplicate"  # it was said before
    UNKNOWN = "unknown"  # its task was never sent
    REFUSED = "refused"  # an operator's request that this state does not allow
    NOTHING = "nothing"  # a timer or a note that no longer matters


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to a run."""


class Sent(Event, frozen=True, gc=False):
    """A broker confirmed the command of this attempt or, with `dead_letter`, the dead letter of a failed task."""

    task: int
    attempt: int
    dead_letter: bool = False
    via: str | None = None  # the broker that took it
    at: float | None = None  # the moment it did


class Unsendable(Event, frozen=True, gc=False):
    """No broker takes the command of this attempt, now or later."""

    task: int
    attempt: int
    reason: str


class BrokerLost(Event, frozen=True, gc=False):
    """A broker was lost, so its commands are sent again. With `dead_letters` it lost its memory, and they are, too."""

    via: str | None
    dead_letters: bool = False
    before: float | None = None  # only what it took until this moment; the rest has been sent again


class Answered(Event, frozen=True, gc=False):
    """A worker answered. `attempt` is None when the answer does not name it.

    Then `mark` identifies the failure that was counted last, should the broker deliver it again.
    """

    task: int
    attempt: int | None
    payload: bytes
    failed: bool = False
    retryable: bool = True
    reason: str = ""
    mark: int = 0
    jitter: float = 0.0
    redelivered: bool = False
    traceback: str | None = None


class Progressed(Event, frozen=True, gc=False):
    """A worker reported progress. `attempt` is None when the report does not name it."""

    task: int
    percent: float | None
    note: str | None = None
    attempt: int | None = None


class TaskDue(Event, frozen=True, gc=False):
    """The task's timer rang: its retry is due, or its deadline has come.

    `looks` holds the state of its queue a moment ago, `unheard` why the engine itself hears no answers.
    """

    task: int
    untaken: Untaken = _NOTHING
    looks: Looks = _UNSEEN
    unheard: str | None = None


class RunDue(Event, frozen=True, gc=False):
    """The run's timer rang: its deadline has come, or a delivery is due. Its fields are those of TaskDue."""

    untaken: Untaken = _NOTHING
    looks: Looks = _UNSEEN
    unheard: str | None = None


class Cancelled(Event, frozen=True, gc=False):
    """An operator cancelled the run."""

    reason: str = "cancelled on request"


class Repeated(Event, frozen=True, gc=False):
    """An operator asked to run again every task that did not succeed (`repetir`)."""


class Redriven(Event, frozen=True, gc=False):
    """An operator took the command of this task out of the dead letters, to try it again."""

    task: int


class DeadLetterDiscarded(Event, frozen=True, gc=False):
    """An operator discarded the dead letter of this task."""

    task: int


class Delivered(Event, frozen=True, gc=False):
    """The aggregate of `edition` reached channel number `channel`."""

    channel: int
    edition: int


class DeliveryFailed(Event, frozen=True, gc=False):
    """An attempt to deliver the aggregate failed."""

    channel: int
    edition: int
    reason: str
    retry_at: float | None = None  # None when no attempt is left


class DeliveryMoved(Event, frozen=True, gc=False):
    """The engine that leases a delivery until `due_at` extends the lease to `until`."""

    channel: int
    edition: int
    due_at: float | None
    until: float
