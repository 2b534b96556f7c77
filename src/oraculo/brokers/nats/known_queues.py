"""The queues that one connection has seen, and whether they work."""

import time
from collections.abc import Iterable

from oraculo.core.queue_health import QueueHealth

MOST_KNOWN = 10_000  # queues; past it all are forgotten, and looked at again when they are next used
STUCK_FOR = 5.0  # seconds until a queue is tried again that did not work while the server did
FULL_FOR = 60.0  # seconds until a full server is tried again to which nothing is sent; canaries are sent more often


class KnownQueues:
    """The queues that are there, the queues that do not work, and whether the server is full."""

    def __init__(self) -> None:
        self._made: set[str] = set()  # the name of a dead-letter queue stands for both
        self._stuck = QueueHealth(STUCK_FOR)
        self._full = "", 0.0  # the server's words, and until when they are believed

    def note_made(self, queues: Iterable[str]) -> None:
        if len(self._made) > MOST_KNOWN:
            self._made.clear()
        self._made.update(queues)

    def forget_made(self, queues: Iterable[str] | None = None) -> None:
        """Look at the queues, or at all, again when they are next used."""
        self._made = set() if queues is None else self._made.difference(queues)

    def missing(self, queues: set[str]) -> set[str]:
        """Return the queues that have to be made, without those that could not be a moment ago."""
        missing = queues - self._made
        return missing - self.stuck().keys() if missing else missing

    def note_stuck(self, queues: Iterable[str], why: str) -> None:
        self._stuck.note(queues, why, time.monotonic())

    def note_working(self, queues: Iterable[str]) -> None:
        self._stuck.works(queues)

    def stuck(self) -> dict[str, str]:
        """Return the queues that do not work, while the server does, each with the evidence."""
        return self._stuck.reasons(time.monotonic()) if self._stuck else {}

    def forget_stuck(self) -> None:
        """Forget the stuck queues, because the server is to blame."""
        self._stuck.clear()

    def full(self) -> str | None:
        """Return why the server stores no message. It does not say when it has room again."""
        why, until = self._full
        return why if time.monotonic() < until else None

    def note_full(self, why: str) -> None:
        self._full = why, time.monotonic() + FULL_FOR

    def note_stored(self) -> None:
        self._full = "", 0.0
