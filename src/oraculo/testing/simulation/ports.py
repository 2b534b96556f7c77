"""The ports as a process in the simulation sees them: the real broker and store, behind whatever goes wrong."""

from collections.abc import Sequence
from typing import Any, TypeVar

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, RunStatus
from oraculo.errors import BrokerUnavailable, StoreUnavailable
from oraculo.ports.broker import Capabilities, Consumer, DeadLetter, Delivery, Link, NotTaken, Outgoing, QueueState
from oraculo.ports.store import Committed, Creation, Due, Page, RunQuery, Snapshot, Unsent
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.simulation.hosts import Host
from oraculo.testing.simulation.trouble import Trouble

T = TypeVar("T")


class HostBroker:
    """The broker of one host."""

    name = "simulated"

    def __init__(self, real: MemoryBroker, host: Host, trouble: Trouble, *, durable: bool) -> None:
        self._real = real
        self._host = host
        self._trouble = trouble
        self._consumers: list[Consumer] = []
        self._losses_before = trouble.world.memory_losses  # a process knows only of those it has seen
        self.capabilities = Capabilities(durable=durable, shared=True, priorities=True, counts_consumers=True)

    async def start(self) -> None:
        self._trouble.step(self._host)

    async def declare(self, queues: Sequence[str]) -> None:
        self._trouble.step(self._host)
        await self._real.declare(queues)

    def links(self) -> Sequence[Link]:
        return [Link(self.name, None, self._trouble.world.memory_losses - self._losses_before)]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        trouble = self._trouble
        trouble.step(self._host)
        if trouble.happens("refuse"):
            raise BrokerUnavailable("refused by the simulation")
        if trouble.happens("hang"):
            await trouble.hold_up(20.0)
            messages = messages[: trouble.choose(len(messages) + 1)]
            await self._deliver(messages)
            raise BrokerUnavailable("hung in the simulation")
        full = self._full(messages) if trouble.happens("not_taken") else ()
        await self._deliver([message for message in messages if message.queue not in full])
        trouble.step(self._host)
        if full:
            vias = [None if message.queue in full else self.name for message in messages]
            raise NotTaken("not taken in the simulation", vias)
        return [self.name] * len(messages)

    def _full(self, messages: Sequence[Outgoing]) -> list[str]:
        queues = dict.fromkeys(message.queue for message in messages)
        return [queue for queue in queues if self._trouble.choose(2)]

    async def _deliver(self, messages: Sequence[Outgoing]) -> None:
        trouble = self._trouble
        now: list[Outgoing] = []
        for message in messages:
            trouble.world.published(self._host, message)
            if message.reason is None and trouble.happens("drop"):
                trouble.world.dropped(message)
                continue
            for _ in range(2 if message.reason is None and trouble.happens("duplicate") else 1):
                if trouble.happens("delay"):
                    trouble.world.deliver_later(message, trouble.up_to(5.0))
                else:
                    now.append(message)
        if now:
            await self._real.publish(now)

    async def consume(self, queue: str, *, prefetch: int) -> "HostConsumer":
        self._trouble.step(self._host)
        consumer = await self._real.consume(queue, prefetch=prefetch)
        self._consumers.append(consumer)
        return HostConsumer(consumer, self._host, self._trouble)

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        self._trouble.step(self._host)
        return await self._real.queues(names)

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        self._trouble.step(self._host)
        return await self._real.dead_letters(queue, limit=limit, after=after)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        self._trouble.step(self._host)
        return await self._real.redrive(queue, ids)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        self._trouble.step(self._host)
        return await self._real.discard(queue, ids)

    async def check(self) -> str:
        self._trouble.step(self._host)
        return "simulated"

    async def close(self) -> None:
        """The connection: what the host had not settled goes back, whether it stopped or died."""
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            await consumer.close()


class HostConsumer:
    def __init__(self, real: Consumer, host: Host, trouble: Trouble) -> None:
        self._real = real
        self._host = host
        self._trouble = trouble

    async def take(self, limit: int) -> Sequence[Delivery]:
        deliveries = await self._real.take(limit)
        self._trouble.step(self._host)
        return deliveries

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._trouble.step(self._host)
        for delivery in deliveries:
            self._trouble.world.acked(self._host, delivery)
        if self._trouble.happens("lost_ack"):
            raise BrokerUnavailable("the ack was lost in the simulation")
        await self._real.ack(deliveries)
        self._trouble.step(self._host)

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        self._trouble.step(self._host)
        await self._real.retry(delivery, delay, reason)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        self._trouble.step(self._host)
        await self._real.dead_letter(delivery, reason)
        self._trouble.step(self._host)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self._trouble.step(self._host)
        await self._real.extend(deliveries)

    async def close(self) -> None:
        await self._real.close()


class HostStore:
    """The store of one host. The disk under it outlives every host."""

    name = "simulated"

    def __init__(self, disk: SqliteStore, host: Host, trouble: Trouble) -> None:
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
            raise StoreUnavailable("the commit's answer was lost in the simulation")
        return committed

    async def _reach(self) -> None:
        self._trouble.step(self._host)
        if self._trouble.happens("slow_store"):
            await self._trouble.hold_up(2.0)
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

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        found: dict[str, Snapshot] = await self._read(self._disk.load(run_ids))
        return found

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        found: dict[str, RunHead] = await self._read(self._disk.heads(run_ids))
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

    async def installation(self) -> str:
        found: str = await self._read(self._disk.installation())
        return found

    async def check(self) -> str:
        self._trouble.step(self._host)
        return "simulated"
