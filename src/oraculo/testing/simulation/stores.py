"""The store as a simulated process sees it, with faults."""

from collections.abc import Sequence
from typing import Any

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, RunStatus, Task
from oraculo.errors import StoreUnavailable
from oraculo.ports.browse import Page, RunQuery
from oraculo.ports.store import Committed, Creation, Due, Snapshot, Unsent
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

    async def start(self) -> None:
        self._trouble.step(self._host)

    async def close(self) -> None:
        pass

    async def migrate(self) -> Sequence[str]:
        return await self._disk.migrate()

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        trouble = self._trouble
        await self._reach()
        if trouble.happens("failed_commit"):
            raise StoreUnavailable("the commit failed in the simulation")
        committed = await self._disk.commit(creations, changes)
        await trouble.world.committed(self._host, creations, changes, committed)
        trouble.step(self._host)
        if trouble.happens("lost_commit"):
            trouble.world.commit_was_lost(self._host)
            raise StoreUnavailable("the commit's answer was lost in the simulation")
        return committed

    async def _reach(self) -> None:
        self._trouble.step(self._host)
        if self._trouble.happens("slow_store"):
            await self._trouble.hold_up(self._host, 2.0, in_store=True)
            self._trouble.step(self._host)

    async def _read(self, reading: Any) -> Any:
        try:
            await self._reach()
            if self._trouble.happens("failed_read"):
                raise StoreUnavailable("the store cannot be read in the simulation")
        except BaseException:
            reading.close()
            raise
        return await reading

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        found: str | None = await self._read(self._disk.created_with(idempotency_key, fingerprint))
        return found

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        found: dict[str, Snapshot] = await self._read(self._disk.load(run_ids))
        return found

    async def task(self, run_id: str, number: int) -> Task | None:
        found: Task | None = await self._read(self._disk.task(run_id, number))
        return found

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        found: dict[str, RunHead] = await self._read(self._disk.heads(run_ids))
        return found

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        found: frozenset[str] = await self._read(self._disk.unchanged(copies))
        return found

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        found: Sequence[Due] = await self._read(self._disk.due(now, limit))
        return found

    async def next_due(self) -> float | None:
        found: float | None = await self._read(self._disk.next_due())
        return found

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        found: Sequence[Unsent] = await self._read(self._disk.unsent(limit, after))
        return found

    async def brokers_in_use(self) -> Sequence[str | None]:
        found: Sequence[str | None] = await self._read(self._disk.brokers_in_use())
        return found

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        found: Sequence[str] = await self._read(self._disk.held_by(via, limit, after, dead_letters=dead_letters))
        return found

    async def forget_sent(self) -> int:
        count: int = await self._read(self._disk.forget_sent())
        await self._trouble.world.reread()
        return count

    async def runs(self, query: RunQuery) -> Page:
        page: Page = await self._read(self._disk.runs(query))
        return page

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        entries: Sequence[HistoryEntry] = await self._read(self._disk.history(run_id, after=after, limit=limit))
        return entries

    async def census(self) -> dict[RunStatus, int]:
        counted: dict[RunStatus, int] = await self._read(self._disk.census())
        return counted

    async def prune(self, ended_before: float, limit: int) -> int:
        pruned: int = await self._read(self._disk.prune(ended_before, limit))
        return pruned

    async def pipelines(self) -> dict[str, bytes]:
        found: dict[str, bytes] = await self._read(self._disk.pipelines())
        return found

    async def pipelines_mark(self) -> str:
        found: str = await self._read(self._disk.pipelines_mark())
        return found

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        await self._read(self._disk.put_pipeline(name, definition, now))

    async def delete_pipeline(self, name: str) -> bool:
        deleted: bool = await self._read(self._disk.delete_pipeline(name))
        return deleted

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        found: Sequence[str] = await self._read(self._disk.attend(engine, now, ttl))
        return found

    async def depart(self, engine: str) -> None:
        await self._read(self._disk.depart(engine))

    async def engines(self, since: float) -> Sequence[str]:
        found: Sequence[str] = await self._read(self._disk.engines(since))
        return found

    async def clock(self) -> float | None:
        return None  # the engines' clocks are correct in this world

    async def installation(self) -> str:
        found: str = await self._read(self._disk.installation())
        return found

    async def note(self, fact: str) -> None:
        await self._read(self._disk.note(fact))

    async def noted(self, fact: str) -> bool:
        found: bool = await self._read(self._disk.noted(fact))
        return found

    async def check(self) -> str:
        self._trouble.step(self._host)
        return "simulated"
