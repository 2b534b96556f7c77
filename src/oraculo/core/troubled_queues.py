"""Queues that do not take or give what they should, and why: each is told of for a while, unless it works."""

from collections.abc import Iterable

_MOST = 1000  # that are remembered


class TroubledQueues:
    """`told_for`: seconds since the last that was seen of it. It may never be tried again."""

    def __init__(self, told_for: float) -> None:
        self._told_for = told_for
        self._found: dict[str, tuple[str, float]] = {}  # what was seen, and until when it is told; the latest last

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, queues: Iterable[str], why: str, now: float) -> None:
        for queue in queues:
            self._found.pop(queue, None)
            self._found[queue] = why, now + self._told_for
        while len(self._found) > _MOST:
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

    def told(self, now: float) -> dict[str, str]:
        return {queue: why for queue, (why, until) in self._found.items() if now < until}
