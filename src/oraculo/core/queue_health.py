"""Queues in trouble, each with its reason."""

from collections.abc import Iterable
from math import inf

_MAX_REMEMBERED = 1000
_SHOWN_FOR = 5.0  # seconds, unless the owner says otherwise


class QueueHealth:
    """Queues that failed lately. Each is forgotten when it works, or `shown_for` seconds after its last failure."""

    def __init__(self, shown_for: float | None = None) -> None:
        self._shown_for = _SHOWN_FOR if shown_for is None else shown_for
        self._found: dict[str, tuple[str, float]] = {}  # by queue, the reason and its last moment; the newest last
        self._suspects: dict[str, float] = {}  # by queue, until when another lost consumer means trouble

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, queues: Iterable[str], why: str, now: float) -> None:
        for queue in queues:
            self._found.pop(queue, None)
            self._found[queue] = why, now + self._shown_for
        while len(self._found) > _MAX_REMEMBERED:
            del self._found[next(iter(self._found))]

    def note_unread(self, queue: str, why: str, now: float, *, was_read: bool) -> bool:
        """Note that a consumer of the queue was lost, or could not be made. Return whether the reason is new.

        A consumer that `was_read` is lost now and then, which says nothing. The queue is in trouble when the next one
        is lost soon, too, without a message.
        """
        is_suspect = now < self._suspects.pop(queue, -inf)
        self._suspects[queue] = now + self._shown_for
        if len(self._suspects) > _MAX_REMEMBERED:
            del self._suspects[next(iter(self._suspects))]
        if was_read and not is_suspect:
            return False
        is_new = self.reasons(now).get(queue) != why
        self.note([queue], why, now)
        return is_new

    def works(self, queues: Iterable[str]) -> None:
        if self._found or self._suspects:
            for queue in queues:
                self._found.pop(queue, None)
                self._suspects.pop(queue, None)

    def clear(self) -> None:
        self._found.clear()
        self._suspects.clear()

    def has(self, queue: str, now: float) -> bool:
        found = self._found.get(queue)
        return found is not None and now < found[1]

    def reasons(self, now: float) -> dict[str, str]:
        return {queue: why for queue, (why, until) in self._found.items() if now < until}
