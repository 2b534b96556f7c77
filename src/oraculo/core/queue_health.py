"""Queues in trouble, each with its reason: those that fail in some way, and those that cannot be read."""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

_MAX_REMEMBERED = 1000
_PROVEN_AFTER = 10.0  # seconds after which a consumer is proven, though it brought nothing
_LONGER = 2.0  # seconds


class TroubledQueues:
    """Queues that failed lately. Each is forgotten when it works, or `shown_for` seconds after its last failure."""

    def __init__(self, shown_for: float) -> None:
        self._shown_for = shown_for
        self._found: dict[str, tuple[str, float]] = {}  # by queue, the reason and its last moment; the newest last

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, queues: Iterable[str], why: str, now: float) -> None:
        for queue in queues:
            self._found.pop(queue, None)
            self._found[queue] = why, now + self._shown_for
        while len(self._found) > _MAX_REMEMBERED:
            del self._found[next(iter(self._found))]

    def works(self, queues: Iterable[str]) -> None:
        if self._found:
            for queue in queues:
                self._found.pop(queue, None)

    def clear(self) -> None:
        self._found.clear()

    def has(self, queue: str, now: float) -> bool:
        found = self._found.get(queue)
        return found is not None and now < found[1]

    def reasons(self, now: float) -> dict[str, str]:
        return {queue: why for queue, (why, until) in self._found.items() if now < until}


class _Failure(NamedTuple):
    why: str
    trial: float  # seconds that the next consumer is on trial
    is_shown: bool


class UnreadQueues:
    """Queues that cannot be read. Each has one consumer at a time.

    A new consumer proves little, because it may fail at its first message, as the one before did. It is on trial until
    it brings a message, or lives longer than that one. A queue counts as unread when a consumer fails its trial.
    """

    def __init__(self) -> None:
        self._made: dict[str, float] = {}  # by queue, when its present consumer was made
        self._failed: dict[str, _Failure] = {}

    def made(self, queue: str, now: float) -> None:
        """Note that the queue has a new consumer."""
        self._made[queue] = now

    def brought(self, queue: str) -> None:
        """Note that the queue's consumer brought a message, which proves it."""
        self._made[queue] = -inf
        self._failed.pop(queue, None)

    def failed(self, queue: str, why: str, now: float) -> bool:
        """Note that the consumer failed or could not be made. Return whether the queue has a new reason."""
        shown_before = self.reasons(now).get(queue)
        before = self._failed.pop(queue, None)
        made = self._made.pop(queue, None)
        if made is None:
            self._failed[queue] = _Failure(why, 0.0, is_shown=True)
        elif (lasted := now - made) < _PROVEN_AFTER:  # a proven consumer is lost now and then, which says nothing
            was_on_trial = before is not None and lasted < before.trial
            self._failed[queue] = _Failure(why, lasted + _LONGER, is_shown=was_on_trial)
        return self.reasons(now).get(queue) not in (None, shown_before)

    def forget(self, queue: str) -> None:
        """Forget a queue whose consumer was closed on purpose."""
        self._made.pop(queue, None)
        self._failed.pop(queue, None)

    def forgive(self) -> None:
        """Forget every failure, because something else made the consumers fail."""
        self._failed.clear()

    def reasons(self, now: float) -> dict[str, str]:
        return {
            queue: failure.why
            for queue, failure in self._failed.items()
            if failure.is_shown and now < self._made.get(queue, inf) + failure.trial
        }
