"""What the tests of large results share.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses: `url = stage.url`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from oraculo.errors import ObjectsUnavailable
from oraculo.ports.objects import RunFolder
from oraculo.settings import CelerySettings, EngineSettings, ObjectSettings, RunSettings, Settings
from oraculo.stores.objects import FolderObjects
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from oraculo.wire.message import decode_message
from oraculo.worker import App
from tests.engine.workers import answer

LARGE = "x" * 300_000


QUICK = EngineSettings(poll=0.05, note_linger=0.005)


KEPT = Settings(engine=QUICK, runs=RunSettings(backoff=0.01), celery=CelerySettings(tasks_allow=("t",)))


TWO_STEPS = b"""
name: dois-passos
steps:
  - {type: escavador_a}
  - {type: executador_b, dependsOn: [escavador_a]}
"""


def shared(folder: Path, **more: Any) -> Settings:
    return msgspec.structs.replace(KEPT, objects=ObjectSettings(url=str(folder), **more))


class Faulty(FolderObjects):
    """A folder that can be away, forget, or keep its callers waiting."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.puts = self.gets = 0
        self.away = False
        self.gate: asyncio.Event | None = None

    async def put(self, run_id: str, key: str, body: bytes) -> None:
        self.puts += 1
        if self.away:
            raise ObjectsUnavailable("nobody home")
        await super().put(run_id, key, body)

    async def get(self, key: str) -> bytes:
        self.gets += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise ObjectsUnavailable("nobody home")
        return await super().get(key)

    async def folders(self, shard: str) -> Sequence[RunFolder]:
        if self.away:
            raise ObjectsUnavailable("nobody home")
        return await super().folders(shard)


def two_steps_app(seen: list[Any]) -> App:
    app = App("large")

    @app.queue("escavador_a")
    async def collect(payload: dict[str, Any]) -> str:
        return LARGE

    @app.queue("executador_b")
    async def process(payload: dict[str, Any]) -> int:
        seen.append(payload["resultados"])
        return len(payload["resultados"]["escavador_a"]["dados"])

    return app


class PlainWorker:
    """Takes commands off a queue and answers them without the SDK, by `tarefa` alone."""

    def __init__(self, oraculo: Harness, queue: str) -> None:
        self.oraculo, self.queue = oraculo, queue

    async def takes(self) -> dict[str, Any]:
        consumer = await self.oraculo.broker.consume(self.queue, prefetch=1)
        async with asyncio.timeout(10):
            (delivery,) = await consumer.take(1)
        await consumer.ack([delivery])
        await consumer.close()
        message = decode_message(delivery.body)
        return {"id": message.correlation_id, "tarefa": message.tarefa, **msgspec.json.decode(message.payload)}

    async def answers(self, run_id: str, payload: dict[str, Any], **fields: Any) -> None:
        event = "resultado_coleta" if self.queue.startswith("escavador") else "resultado_execucao"
        await self.oraculo.publish(
            "resultados", answer(run_id, **{"tarefa": self.queue, "tipo_evento": event, "payload": payload, **fields})
        )


def store_at(folder: Path) -> SqliteStore:
    return SqliteStore(str(folder / "oraculo.db"))
