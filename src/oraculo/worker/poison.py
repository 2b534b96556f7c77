"""Commands that came back again and again: one of them may be what ends the process each time.

Whatever a process holds when it dies is delivered once more, and once too often in the end: the command that kills it
would take its neighbours along to the dead letters. So these begin one by one, in no order, and each is answered and
settled before the next: half of the innocent, on average, are done before the guilty one has its turn.

Most often none of them is guilty: processes are killed, and brokers restarted, for other reasons. Those that take long
would wait for each other until their deadlines, so after each turn that took long the next is for twice as many.
"""

import asyncio
from collections.abc import Callable, Sequence

from oraculo.ports.clock import Entropy
from oraculo.worker.jobs import Job

MOST_TRUSTED = 3  # redeliveries, at most, of a command that begins beside others
ALONE = 5.0  # seconds; then the next begins beside it: one that hangs must not hold up the others
_GATHERING, _LONGEST_GATHERING = 0.1, 1.0  # seconds without another, and in all, before the first begins
_SLOW = 0.5  # seconds, of a turn
_FIRST_LOOK, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks whether one is settled


def trusted(delivery_limit: int) -> int:
    """How many redeliveries are no reason for doubt: a part of those that there may be."""
    return min(MOST_TRUSTED, delivery_limit // 4)


class Suspects:
    def __init__(self, trusted: int, entropy: Entropy, begin: Callable[[Job], None]) -> None:
        self._trusted = trusted
        self._entropy = entropy
        self._begin = begin
        self._waiting: list[Job] = []
        self._duty: asyncio.Task[None] | None = None

    def takes(self, job: Job) -> bool:
        """Whether it is one; then it begins when its turn has come."""
        if job.received[0].delivery.redeliveries <= self._trusted:
            return False
        self._waiting.append(job)
        if self._duty is None or self._duty.done():
            self._duty = asyncio.create_task(self._begin_in_turns(), name="oraculo-suspects")
        return True

    def dismiss(self) -> list[Job]:
        """Those that have not begun, and will not."""
        if self._duty is not None:
            self._duty.cancel()
        waiting, self._waiting = self._waiting, []
        return waiting

    async def _begin_in_turns(self) -> None:
        await self._gather()
        loop, together = asyncio.get_running_loop(), 1
        while self._waiting:
            jobs = [self._pick() for _ in range(min(together, len(self._waiting)))]
            began = loop.time()
            for job in jobs:
                self._begin(job)
            await _settled(jobs)
            if loop.time() - began > _SLOW:
                together *= 2

    def _pick(self) -> Job:
        return self._waiting.pop(int(self._entropy.jitter() * len(self._waiting)))

    async def _gather(self) -> None:
        """Large messages arrive one by one: the first, if it began at once, would be first in every life."""
        loop = asyncio.get_running_loop()
        until, seen = loop.time() + _LONGEST_GATHERING, 0
        while len(self._waiting) > seen and loop.time() < until:
            seen = len(self._waiting)
            await asyncio.sleep(_GATHERING)


async def _settled(jobs: Sequence[Job]) -> None:
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + ALONE, _FIRST_LOOK
    while not all(job.is_settled for job in jobs) and loop.time() < until:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
