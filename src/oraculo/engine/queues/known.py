"""The queues that are known to exist. Messages to any other wait until the broker has made it."""

import asyncio
from collections.abc import Iterable
from math import inf

MOST_KNOWN = 50_000  # the queue that was used longest ago is forgotten first, and counts as new again


class KnownQueues:
    """Physical names of queues.

    Somebody may have deleted one since; brokers make it again when something is sent there. A queue is forgotten when
    it was not used for `lasting` seconds.
    """

    def __init__(self, lasting: float = inf) -> None:
        self._lasting = lasting
        self._until: dict[str, float] = {}  # by the loop's time; the queue that was used longest ago comes first

    def __contains__(self, queue: str) -> bool:
        return asyncio.get_running_loop().time() < self._until.get(queue, -inf)

    def add(self, queues: Iterable[str]) -> None:
        until = asyncio.get_running_loop().time() + self._lasting
        for queue in dict.fromkeys(queues):
            self._until.pop(queue, None)
            self._until[queue] = until
        while len(self._until) > MOST_KNOWN:
            del self._until[next(iter(self._until))]
