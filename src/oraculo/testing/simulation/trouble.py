"""The dice for every fault, and the moment of the last one."""

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.hosts import SimulatedHost

if TYPE_CHECKING:
    from oraculo.testing.simulation.world import World

# Faults that keep an engine from deciding.
_OF_THE_STORE = frozenset({"failed_commit", "lost_commit", "failed_read", "engine_crash"})


class Trouble:
    """The source of faults."""

    def __init__(self, faults: Faults, dice: random.Random, world: "World") -> None:
        self.faults = faults
        self.world = world
        self.is_calm = False
        self.last = 0.0  # the moment when the last fault is over
        self.counts: Counter[str] = Counter()
        self._dice = dice

    def happens(self, kind: str) -> bool:
        rate = getattr(self.faults, kind)
        if self.is_calm or not rate or self._dice.random() >= rate:
            return False
        self.counts[kind] += 1
        moment = asyncio.get_running_loop().time()
        self.last = max(self.last, moment)
        if kind in _OF_THE_STORE:
            self.world.timeline.stalled(moment, moment)
        return True

    def step(self, host: SimulatedHost) -> None:
        """Stop a host that acts on the world if it is dead, or dies now."""
        if not host.alive:
            raise asyncio.CancelledError
        if self.happens("engine_crash" if host.name.startswith("engine") else "worker_crash"):
            self.world.crash(host)
            raise asyncio.CancelledError

    def up_to(self, seconds: float) -> float:
        return self._dice.random() * seconds

    async def hold_up(self, host: SimulatedHost, at_most: float, *, in_store: bool = False) -> None:
        """Wait for a while. Until then, nothing counts as undisturbed."""
        seconds = self.up_to(at_most)
        moment = asyncio.get_running_loop().time()
        self.last = max(self.last, moment + seconds)
        if in_store:
            self.world.timeline.was_busy(host.name, moment, moment + seconds)
        await asyncio.sleep(seconds)

    def choose(self, count: int) -> int:
        return self._dice.randrange(count)
