"""The dice for every fault, and the moment of the last one."""

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
from oraculo.testing.simulation.hosts import SimulatedHost


class Watched(Protocol):
    """The world, as the simulated ports report to it."""

    def offered(self, host: SimulatedHost, server: str, messages: Sequence[Outgoing]) -> None: ...
    def published(self, host: SimulatedHost, server: str, message: Outgoing) -> None: ...
    def repeat_dropped(self, first: Outgoing, message: Outgoing) -> None: ...
    def too_large(self, server: str, message: Outgoing) -> None: ...
    def dropped(self, message: Outgoing) -> None: ...
    def deliver_later(self, broker: MemoryBroker, message: Outgoing, delay: float) -> None: ...
    def confirmed(self, host: SimulatedHost, server: str, messages: Sequence[Outgoing]) -> None: ...
    def took(self, host: SimulatedHost, server: str, consumer: object, deliveries: Sequence[Delivery]) -> None: ...
    def acked(self, host: SimulatedHost, server: str, delivery: Delivery) -> None: ...
    def put_aside(self, consumer: object, delivery: Delivery) -> None: ...
    def released(self, consumer: object) -> None: ...
    def went_wrong(self, host: SimulatedHost, server: str, for_seconds: float) -> None: ...
    def stalled(self) -> None: ...
    def was_busy(self, host: SimulatedHost, since: float, until: float) -> None: ...
    def commit_was_lost(self, host: SimulatedHost) -> None: ...
    async def committed(
        self, host: SimulatedHost, creations: Sequence[Creation], changes: Sequence[Changes], committed: Committed
    ) -> None: ...
    async def reread(self) -> None: ...
    def crash(self, host: SimulatedHost) -> None: ...


# Faults that keep an engine from deciding.
_OF_THE_STORE = frozenset({"failed_commit", "lost_commit", "failed_read", "engine_crash"})


class Trouble:
    """The source of faults."""

    def __init__(self, faults: Faults, dice: random.Random, world: Watched) -> None:
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
        self.last = max(self.last, asyncio.get_running_loop().time())
        if kind in _OF_THE_STORE:
            self.world.stalled()
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
            self.world.was_busy(host, moment, moment + seconds)
        await asyncio.sleep(seconds)

    def choose(self, count: int) -> int:
        return self._dice.randrange(count)
