"""Queues that cannot be read, and why.

That a consumer could be made proves little: it may fail as soon as it is asked for a message, as the one before it did.
So it is on trial until it has brought something, or has waited for longer than that one lasted. One that fails once may
have been cut off; that is told when the next does not stand its trial.
"""

from math import inf
from typing import NamedTuple

_PROVEN_AFTER = 10.0  # seconds without a fault, though nothing came: what cannot be read is found out sooner
_LONGER = 2.0  # seconds


class _Failure(NamedTuple):
    why: str
    trial: float  # seconds that the next consumer is on trial
    is_told: bool


class UnreadQueues:
    """Each has one consumer at a time."""

    def __init__(self) -> None:
        self._made: dict[str, float] = {}  # when the consumer that each has now was made
        self._failed: dict[str, _Failure] = {}

    def made(self, queue: str, now: float) -> None:
        self._made[queue] = now

    def brought(self, queue: str) -> None:
        self._made[queue] = -inf
        self._failed.pop(queue, None)

    def failed(self, queue: str, why: str, now: float) -> bool:
        """It has no consumer any more, or none could be made. Returns whether that is news."""
        told_before = self.told(now).get(queue)
        before = self._failed.pop(queue, None)
        made = self._made.pop(queue, None)
        if made is None:
            self._failed[queue] = _Failure(why, 0.0, is_told=True)
        elif (lasted := now - made) < _PROVEN_AFTER:  # else it was lost, as consumers are now and then
            was_on_trial = before is not None and lasted < before.trial
            self._failed[queue] = _Failure(why, lasted + _LONGER, is_told=was_on_trial)
        return self.told(now).get(queue) not in (None, told_before)

    def forget(self, queue: str) -> None:
        """Its consumer was closed on purpose."""
        self._made.pop(queue, None)
        self._failed.pop(queue, None)

    def forgive(self) -> None:
        """What made them fail was something else."""
        self._failed.clear()

    def told(self, now: float) -> dict[str, str]:
        return {
            queue: failure.why
            for queue, failure in self._failed.items()
            if failure.is_told and now < self._made.get(queue, inf) + failure.trial
        }
