"""What the tests of several engines on one store and one broker share.

pytest looks for fixtures in the module of a test, so each of those names the one it uses: `group = stage.group`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.wiring import Role
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Capabilities, Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import BatchCommitted, Record
from oraculo.settings import BrokerSettings, EngineSettings, Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from tests.waiting import until


class OneServer(MemoryBroker):
    """As a server is to several processes: it outlives each of them, with its messages."""

    capabilities = Capabilities(durable=True, shared=True, priorities=True, counts_consumers=True)

    async def close(self) -> None:
        pass


class Unreachable(OneServer):
    """The same server for an engine that cannot publish to it."""

    def __init__(self, server: OneServer) -> None:
        self.__dict__ = server.__dict__

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        raise BrokerUnavailable("cut off")


class Slow(Unreachable):
    """The same server for an engine whose publishes take until the gate opens."""

    def __init__(self, server: OneServer) -> None:
        super().__init__(server)
        self._reached = server
        self.gate = asyncio.Event()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        await self.gate.wait()
        return await self._reached.publish(messages)


class Told:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    @property
    def conflicts(self) -> int:
        return sum(record.conflicts for record in self.records if isinstance(record, BatchCommitted))


class Group:
    def __init__(self, folder: Path) -> None:
        self._file = str(folder / "oraculo.db")
        self.server = OneServer(SystemClock())
        self.told: list[Told] = []

    def member(
        self,
        *apps: object,
        role: Role = Role.WHOLE,
        broker: OneServer | None = None,
        poll: float = 0.05,
        prefix: str = "",
    ) -> Harness:
        self.told.append(Told())
        store = SqliteStore(self._file)
        return Harness(
            *apps,  # type: ignore[arg-type]
            settings=Settings(
                broker=BrokerSettings(prefix=prefix),
                engine=EngineSettings(poll=poll, note_linger=0.005, stop_grace=0.5),
            ),
            broker=broker or self.server,
            store=store,
            telemetry=self.told[-1],
            role=role,
        )

    @property
    def conflicts(self) -> int:
        return sum(told.conflicts for told in self.told)


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


@asynccontextmanager
async def acquainted(*members: Harness) -> AsyncIterator[None]:
    """All are running, and know of each other."""
    for member in members:
        await member.__aenter__()
    whole = [member for member in members if member.engine.parts.peers.is_engine]
    await until(lambda: all(len(member.engine.parts.peers.engines) == len(whole) for member in whole))
    try:
        yield
    finally:
        for member in members:
            await member.stop()


async def die(member: Harness) -> None:
    """As a kill does: nothing is finished, nobody is told."""
    engine = member.engine
    for task in [*engine._pumps, *engine._duties, engine._deciding]:
        assert task is not None
        task.cancel()
        await asyncio.wait([task])
    for consumer in engine.parts.consumers._consumers.values():
        await consumer.close()
