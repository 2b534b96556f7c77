"""The careful start of commands that were delivered often: one of them may kill the process each time.

A dying process gives back every command that it holds, and the broker counts their deliveries. A poisonous command
would take its neighbours along to the dead letters. So such commands begin one by one, in random order, and each is
settled before the next. On average half of the harmless ones are done before the poisonous one begins.

Mostly none is poisonous: processes are killed for other reasons too. So that slow commands do not wait for each other
until their deadlines, each slow turn doubles the number of the next.
"""

import asyncio
from collections.abc import Callable, Sequence

from oraculo.ports.clock import Entropy
from oraculo.worker.jobs import Job

MOST_TRUSTED = 3  # redeliveries of a command that may still begin beside others
ALONE = 5.0  # seconds until the next one begins beside it, because one may hang
_GATHERING, _LONGEST_GATHERING = 0.1, 1.0  # seconds without another one, and in all, before the first begins
_SLOW = 0.5  # seconds of a slow turn
_FIRST_LOOK, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks at the settlement


def trusted(delivery_limit: int) -> int:
    """Return the number of redeliveries up to which a command is trusted."""
    return min(MOST_TRUSTED, delivery_limit // 4)


class Suspects:
    def __init__(self, trusted: int, entropy: Entropy, begin: Callable[[Job], None]) -> None:
        self._trusted = trusted
        self._entropy = entropy
        self._begin = begin
        self._waiting: list[Job] = []
        self._duty: asyncio.Task[None] | None = None

    def takes(self, job: Job) -> bool:
        """Take a suspect, and begin it in its turn. Return False for a trusted job."""
        if job.received[0].delivery.redeliveries <= self._trusted:
            return False
        self._waiting.append(job)
        if self._duty is None or self._duty.done():
            self._duty = asyncio.create_task(self._begin_in_turns(), name="oraculo-suspects")
        return True

    def dismiss(self) -> list[Job]:
        """Stop, and return the jobs that have not begun."""
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
        """Wait for further suspects: the order is random only among those that are present."""
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
