"""Queues that cannot be read, and why.

That a consumer could be made proves little: it may fail as soon as it is asked for a message, as the one before it did.
So it is on trial until it has brought something, or has waited for longer than that one lasted.
"""

from math import inf

_PROVEN_AFTER = 10.0  # seconds without a fault, though nothing came: what cannot be read is found out sooner
_LONGER = 2.0  # seconds


class UnreadQueues:
    """Each has one consumer at a time."""

    def __init__(self) -> None:
        self._made: dict[str, float] = {}  # when the consumer that each has now was made
        self._found: dict[str, tuple[str, float]] = {}  # why, and for how many seconds the next consumer is on trial

    def made(self, queue: str, now: float) -> None:
        self._made[queue] = now

    def brought(self, queue: str) -> None:
        self._made[queue] = -inf
        self._found.pop(queue, None)

    def failed(self, queue: str, why: str, now: float) -> bool:
        """It has no consumer any more, or none could be made. Returns whether that is news. One that had proven itself
        is lost now and then and made again: that is told when no other can be made."""
        before = self.told(now).get(queue)
        lasted = now - self._made.pop(queue) if queue in self._made else None
        if lasted is not None and lasted >= _PROVEN_AFTER:
            self._found.pop(queue, None)
            return False
        self._found[queue] = why, 0.0 if lasted is None else lasted + _LONGER
        return why != before

    def forgive(self) -> None:
        """What made them fail was something else."""
        self._found.clear()

    def told(self, now: float) -> dict[str, str]:
        return {queue: why for queue, (why, trial) in self._found.items() if now < self._made.get(queue, inf) + trial}
