"""Virtual time, which passes only when nothing else is left to do, and chance from one seed."""

import asyncio
import heapq
import random
from typing import Any

EPOCH = 1_800_000_000.0
# Turns of the loop at one moment after which it counts as spinning.
MOST_TURNS = 200_000


class Stuck(Exception):
    """Nothing can happen any more, or the loop spins at one moment."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing is ready."""

    _ready: Any
    _scheduled: Any
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self._moment = 0.0
        self._turns = 0

    def time(self) -> float:
        return self._moment

    def _run_once(self) -> None:
        self._drop_cancelled()
        self._turns += 1
        if not self._ready and not self._stopping:  # type: ignore[attr-defined]
            if not self._scheduled:
                raise Stuck("everyone waits, and no timer is set")
            self._moment = max(self._moment, self._scheduled[0].when())
            self._turns = 0
        elif self._turns > MOST_TURNS:
            self._turns = 0  # the loop runs again to end all tasks
            raise Stuck(f"{MOST_TURNS} turns of the loop at the same moment")
        super()._run_once()  # type: ignore[misc]

    def _drop_cancelled(self) -> None:
        """Drop cancelled timers, so that time does not stop at them."""
        while self._scheduled and self._scheduled[0].cancelled():
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._timer_cancelled_count -= 1


class VirtualClock:
    """A wall clock: the loop's time, plus all that it was set forward or back."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.skew = 0.0

    def now(self) -> float:
        return EPOCH + self._loop.time() + self.skew


class SeededEntropy:
    """Ids and jitter from one seed."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def new_id(self) -> str:
        return f"{self._dice.getrandbits(64):016x}"

    def jitter(self) -> float:
        return self._dice.random()
