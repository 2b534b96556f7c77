"""Throws the dice for every fault, and keeps account of when the last one happened."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.run import Changes
from oraculo.ports.broker import Delivery, Outgoing
from oraculo.ports.store import Committed, Creation
from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.hosts import Host


class Watched(Protocol):
    """The world, as the ports tell it what happens."""

    def published(self, host: Host, server: str, message: Outgoing) -> None: ...
    def repeat_dropped(self, first: Outgoing, message: Outgoing) -> None: ...
    def too_large(self, server: str, message: Outgoing) -> None: ...
    def dropped(self, message: Outgoing) -> None: ...
    def deliver_later(self, broker: MemoryBroker, message: Outgoing, delay: float) -> None: ...
    def acked(self, host: Host, delivery: Delivery) -> None: ...
    async def committed(
        self, host: Host, creations: Sequence[Creation], changes: Sequence[Changes], committed: Committed
    ) -> None: ...
    async def reread(self) -> None: ...
    def crash(self, host: Host) -> None: ...


class Trouble:
    def __init__(self, faults: Faults, dice: random.Random, world: Watched) -> None:
        self.faults = faults
        self.world = world
        self.is_calm = False
        self.last = 0.0  # the loop's time at which the last fault is over
        self.counts: Counter[str] = Counter()
        self._dice = dice

    def happens(self, kind: str) -> bool:
        rate = getattr(self.faults, kind)
        if self.is_calm or not rate or self._dice.random() >= rate:
            return False
        self.counts[kind] += 1
        self.last = max(self.last, asyncio.get_running_loop().time())
        return True

    def step(self, host: Host) -> None:
        """A host is about to act, or has just acted, on the world. The dead do neither."""
        if not host.alive:
            raise asyncio.CancelledError
        if self.happens("engine_crash" if host.name.startswith("engine") else "worker_crash"):
            self.world.crash(host)
            raise asyncio.CancelledError

    def up_to(self, seconds: float) -> float:
        return self._dice.random() * seconds

    async def hold_up(self, at_most: float) -> None:
        """Something takes its time; until it is over, nothing counts as undisturbed."""
        seconds = self.up_to(at_most)
        self.last = max(self.last, asyncio.get_running_loop().time() + seconds)
        await asyncio.sleep(seconds)

    def choose(self, count: int) -> int:
        return self._dice.randrange(count)
