"""The queues that are known to be there: what is sent to any other has to wait until the broker has made it."""

from collections.abc import Iterable

MOST_KNOWN = 50_000  # the one that was used longest ago is forgotten first, and is looked at as a new one again


class KnownQueues:
    """Physical names. Somebody may have deleted one since: brokers make it again when something is sent there."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __contains__(self, queue: str) -> bool:
        return queue in self._names

    def add(self, queues: Iterable[str]) -> None:
        for queue in dict.fromkeys(queues):
            self._names.pop(queue, None)
            self._names[queue] = None
        while len(self._names) > MOST_KNOWN:
            del self._names[next(iter(self._names))]
