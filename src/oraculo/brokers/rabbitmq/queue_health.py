"""Queues that take or give nothing while the server answers, as those of a cluster without its majority."""

import time
from collections.abc import Iterable

from oraculo.core.queue_health import QueueHealth

_SHOWN_FOR = 30.0  # seconds after the last failure


class StuckQueues:
    """The queues that failed lately, and what follows from them for the server.

    `proof_within`: seconds in which some queue works, if any does. None: nobody makes sure that one is tried.
    """

    def __init__(self, proof_within: float | None) -> None:
        self._proof_within = proof_within
        self._found = QueueHealth(_SHOWN_FOR)
        self._failing_since: float | None = None  # the first failure since a queue worked

    def note(self, queue: str, why: str) -> None:
        now = time.monotonic()
        if self._failing_since is None or not self._found.reasons(now):
            self._failing_since = now
        self._found.note([queue], why, now)

    def works(self, queues: Iterable[str] = ()) -> None:
        """Note that queues work; without a name, that some queue does."""
        self._failing_since = None
        self._found.works(queues)

    def has(self, queue: str) -> bool:
        return bool(self._found) and self._found.has(queue, time.monotonic())

    def clear(self) -> None:
        self._failing_since = None
        self._found.clear()

    def reasons(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._found.reasons(time.monotonic()).items()) if self._found else ()

    def reason_of_all(self) -> str | None:
        """Return why the server is of no use although it answers: no queue has worked for too long."""
        if self._proof_within is None or self._failing_since is None:
            return None
        if time.monotonic() - self._failing_since < self._proof_within:
            return None
        reasons = self.reasons()
        return reasons[-1][1] if reasons else None
