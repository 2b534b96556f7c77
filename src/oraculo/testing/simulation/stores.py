"""The store as a simulated process sees it, with faults."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from oraculo.core.run import Changes
from oraculo.errors import StoreUnavailable
from oraculo.ports.store import Committed, Creation
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.simulation.hosts import SimulatedHost
from oraculo.testing.simulation.trouble import Trouble


class HostStore:
    """The store of one host. The disk behind it outlives every host."""

    name = "simulated"

    def __init__(self, disk: SqliteStore, host: SimulatedHost, trouble: Trouble) -> None:
        self._disk = disk
        self._host = host
        self._trouble = trouble

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return any other call of the disk, which may be slow here, or fail."""
        return partial(self._ask, getattr(self._disk, name))

    async def _ask(self, call: Callable[..., Awaitable[Any]], *args: object, **options: object) -> Any:
        await self._reach()
        if self._trouble.happens("failed_read"):
            raise StoreUnavailable("the store cannot be read in the simulation")
        return await call(*args, **options)

    async def _reach(self) -> None:
        self._trouble.step(self._host)
        if self._trouble.happens("slow_store"):
            await self._trouble.hold_up(self._host, 2.0, in_store=True)
            self._trouble.step(self._host)

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        trouble = self._trouble
        await self._reach()
        if trouble.happens("failed_commit"):
            raise StoreUnavailable("the commit failed in the simulation")
        committed = await self._disk.commit(creations, changes)
        await trouble.world.committed(self._host, creations, changes, committed)
        trouble.step(self._host)
        if trouble.happens("lost_commit"):
            trouble.world.oracle.commit_was_lost(self._host.name)
            raise StoreUnavailable("the commit's answer was lost in the simulation")
        return committed

    async def forget_sent(self) -> int:
        count: int = await self._ask(self._disk.forget_sent)
        await self._trouble.world.reread()
        return count

    async def clock(self) -> float | None:
        return None  # the engines' clocks are correct in this world

    async def start(self) -> None:
        self._trouble.step(self._host)

    async def check(self) -> str:
        self._trouble.step(self._host)
        return "simulated"

    async def close(self) -> None:
        """Leave the disk open for the others."""
