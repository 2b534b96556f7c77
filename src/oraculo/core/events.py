"""What can happen to a run. Frozen, and valid once built: the machine trusts them.

An event names its task by number; `core.answer` finds the number of a worker's answer.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from oraculo.core.phase import Looks

Untaken = Mapping[str | None, str]  # by queue, why its commands are not taken now; under None, why those of any are not
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
    """The broker confirmed the command of this attempt or, with `dead_letter`, the dead letter of a failed task."""

    task: int
    attempt: int
    dead_letter: bool = False
    via: str | None = None  # the broker that took it
    at: float | None = None  # when it did


class Unsendable(Event, frozen=True, gc=False):
    """No broker will ever take the command of this attempt: the same bytes would be refused again."""

    task: int
    attempt: int
    reason: str


class BrokerLost(Event, frozen=True, gc=False):
    """What this broker took may never arrive: commands in work are sent again or, with `dead_letters`, those, because
    it lost its memory and not just its connection."""

    via: str | None
    dead_letters: bool = False
    before: float | None = None  # only what it took until then: what came later was sent anew already


class Answered(Event, frozen=True, gc=False):
    """A worker answered. `attempt` is None when it did not say which; then, when the broker delivers again, `mark`
    tells whether this is the failure that was counted last."""

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
    """A worker told how far it is. `attempt` is None when it did not say at which."""

    task: int
    percent: float | None
    note: str | None = None
    attempt: int | None = None


class TaskDue(Event, frozen=True, gc=False):
    """The task's timer rang: its retry is due, or its deadline has come. `looks`: its queue, as it was a moment ago.
    `unheard`: why the engine itself hears no answers."""

    task: int
    untaken: Untaken = _NOTHING
    looks: Looks = _UNSEEN
    unheard: str | None = None


class RunDue(Event, frozen=True, gc=False):
    """The run's timer rang: its deadline has come, or a delivery is due. `looks`: as a task's timer has them."""

    untaken: Untaken = _NOTHING
    looks: Looks = _UNSEEN
    unheard: str | None = None


class Cancelled(Event, frozen=True, gc=False):
    reason: str = "cancelled on request"


class Repeated(Event, frozen=True, gc=False):
    """Run again what did not succeed, keeping what did."""


class Redriven(Event, frozen=True, gc=False):
    """The command of this task was taken out of the dead letters to be tried again."""

    task: int


class DeadLetterDiscarded(Event, frozen=True, gc=False):
    task: int


class Delivered(Event, frozen=True, gc=False):
    """The aggregate of `edition` reached channel number `channel`."""

    channel: int
    edition: int


class DeliveryFailed(Event, frozen=True, gc=False):
    channel: int
    edition: int
    reason: str
    retry_at: float | None = None  # None: given up


class DeliveryMoved(Event, frozen=True, gc=False):
    """Whoever had the delivery until `due_at` keeps it until `until`: it is attempted now, or waits for its turn."""

    channel: int
    edition: int
    due_at: float | None
    until: float
