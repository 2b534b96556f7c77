"""The queues that are known to exist. Messages to any other wait until the broker has made it."""

from collections.abc import Iterable

MOST_KNOWN = 50_000  # the queue that was used longest ago is forgotten first, and counts as new again


class KnownQueues:
    """Physical names of queues.

    Somebody may have deleted one since; brokers make it again when something is sent there.
    """

    def __init__(self) -> None:
        self._queues: dict[str, None] = {}  # the queue that was used longest ago comes first

    def __contains__(self, queue: str) -> bool:
        return queue in self._queues

    def add(self, queues: Iterable[str]) -> None:
        for queue in dict.fromkeys(queues):
            self._queues.pop(queue, None)
            self._queues[queue] = None
        while len(self._queues) > MOST_KNOWN:
            del self._queues[next(iter(self._queues))]
