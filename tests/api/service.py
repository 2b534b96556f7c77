"""An embedded engine under the API, and the few verbs that the tests speak with it."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from oraculo.api import create_app
from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.ports import Ports
from oraculo.engine.wiring import make_engine
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.ports.telemetry import Record
from oraculo.settings import RunSettings, Settings
from oraculo.stores.objects import FolderObjects
from oraculo.stores.sqlite import SqliteStore
from oraculo.telemetry.metrics import Metrics
from oraculo.wire import naming
from oraculo.wire.message import Message, decode_message, encode_message

# One attempt, so that a failed answer is final at once.
SETTINGS = Settings(runs=RunSettings(max_attempts=1))


class Records:
    """Telemetry that a test can wait on."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._more = asyncio.Event()

    def emit(self, record: Record) -> None:
        self._records.append(record)
        self._more.set()

    async def of(self, kind: type[Record]) -> Record:
        """The next record of that kind that was not waited for yet."""
        async with asyncio.timeout(10):
            while True:
                for record in self._records:
                    if isinstance(record, kind):
                        self._records.remove(record)
                        return record
                self._more.clear()
                await self._more.wait()


class Service:
    def __init__(self, folder: Path, settings: Settings = SETTINGS) -> None:
        self.records = Records()
        self.file = str(folder / "oraculo.db")
        self.broker = MemoryBroker(clock=SystemClock())
        objects = FolderObjects(folder / "objects")
        self.engine = make_engine(
            settings,
            Ports(
                self.broker, SqliteStore(self.file), SystemClock(), SystemEntropy(), self.records, objects, _accepted
            ),
        )
        self.operations = self.engine.operations
        self.metrics = Metrics()
        self.app = create_app(self.engine, self.operations, settings, self.metrics)
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        # A body is taken only with its type; a test that sends no JSON names another.
        self.client = httpx2.AsyncClient(
            transport=transport, base_url="http://oraculo", headers={"Content-Type": "application/json"}
        )

    async def start_run(self, **request: Any) -> str:
        """The id of a new run."""
        reply = await self.client.post("/orquestracoes", json=request)
        assert reply.status_code == 202, reply.text
        run_id: str = reply.json()["correlation_id"]
        return run_id

    async def answer(self, queue: str, payload: dict[str, Any]) -> Message:
        """Takes the next command off `queue`, as its worker would, answers it, and returns it."""
        consumer = await self.broker.consume(queue, prefetch=1)
        async with asyncio.timeout(10):
            (delivery,) = await consumer.take(1)
        command = decode_message(delivery.body)
        answer = Message(
            correlation_id=command.correlation_id,
            tipo_evento=naming.answer_event(queue),
            payload=msgspec.Raw(msgspec.json.encode(payload)),
            timestamp=command.timestamp,
            tarefa=command.tarefa,
        )
        await publish_all(self.broker, [Outgoing(naming.ANSWERS, encode_message(answer))])
        await consumer.ack([delivery])
        await consumer.close()
        return command

    async def ended(self, run_id: str) -> dict[str, Any]:
        """The aggregate, once there is one."""
        aggregate = await self.operations.wait(run_id, 10)
        assert aggregate is not None, f"run {run_id} did not end"
        decoded: dict[str, Any] = msgspec.json.decode(aggregate)
        return decoded

    async def runs(self) -> list[dict[str, Any]]:
        reply = await self.client.get("/orquestracoes")
        listed: list[dict[str, Any]] = reply.json()["orquestracoes"]
        return listed

    def write_as_newer(self, run_id: str, *, table: str = "runs", column: str = "status") -> None:
        """Commits a word that only a newer version knows, as an engine of that would: our own copies are stale."""
        with closing(sqlite3.connect(self.file)) as connection, connection:
            where = "n = (SELECT n FROM runs WHERE id = ?)"
            connection.execute(f"UPDATE {table} SET {column} = 'novo' WHERE {where}", [run_id])
            connection.execute("UPDATE runs SET version = version + 1 WHERE id = ?", [run_id])

    async def bury(self, queue: str, body: bytes, reason: str = "it was broken") -> None:
        """Puts a dead letter into the quarantine of `queue`."""
        await publish_all(self.broker, [Outgoing(queue, body, reason=reason)])


async def _accepted(_url: str, _body: bytes, _headers: dict[str, str]) -> int:
    """No webhook of a test goes out into the world."""
    return 200


@asynccontextmanager
async def running(folder: Path, settings: Settings = SETTINGS) -> AsyncIterator[Service]:
    service = Service(folder, settings)
    async with service.app.router.lifespan_context(service.app), service.client:
        yield service


def assert_problem(reply: httpx2.Response, status: int, field: str | None = None, *words: str) -> None:
    """It is a problem of that status, names that field, and says those words."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    problem = reply.json()
    assert problem["status"] == status
    assert problem["type"].startswith("urn:oraculo:problem:")
    assert problem["title"]
    assert problem["instance"] == reply.request.url.raw_path.decode().partition("?")[0]
    if field is not None:
        assert [fault["campo"] for fault in problem["erros"]] == [field]
        assert problem["erros"][0]["motivo"]
    for word in words:
        assert word in problem["detail"]
