"""An engine with the bridge to BullMQ on real servers, and Node workers beside it."""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from redis.asyncio import Redis

from oraculo.bridges.bullmq import BullmqBridge, BullmqQueues
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.ports.store import Store
from oraculo.ports.telemetry import LoopFailed, Record
from oraculo.settings import BullmqSettings, Settings
from oraculo.worker import App
from tests.bridges.node.processes import HubProgram, NodeProcess, installed
from tests.end_to_end.stage import Stage, settings_for

WORKER_OPTIONS = {"lockDuration": 2000, "stalledInterval": 1000, "maxStalledCount": 3}


def bull_settings(broker_url: str, redis_url: str, **bullmq: Any) -> Settings:
    """Return settings with queues and keys of their own, so that tests may share the servers."""
    own = {"prefix": f"b{uuid.uuid4().hex[:10]}", "queues_allow": ("*",), "entry": "", "lock": 2.0}
    given = {"url": redis_url, **own, **bullmq}
    return msgspec.structs.replace(settings_for(broker_url), bullmq=BullmqSettings(**given))


class Aloud:
    """Telemetry that prints each failed duty of a bridge with the test that fails for it."""

    def __init__(self) -> None:
        self.failures: list[LoopFailed] = []

    def emit(self, record: Record) -> None:
        if isinstance(record, LoopFailed):
            print(record)
            self.failures.append(record)


class BullStage(Stage):
    def __init__(self, settings: Settings, *apps: App, store: Store | None = None) -> None:
        super().__init__(settings, *apps, store=store)
        self.aloud = Aloud()
        self.bridge = self.new_bridge()
        self.queues = BullmqQueues(settings.bullmq)
        self.engine.parts.bridges.foreign_queues = [self.queues]
        self.redis: Any = Redis.from_url(settings.bullmq.url, decode_responses=True)

    def new_bridge(self) -> BullmqBridge:
        prefix, settings = self.settings.broker.prefix, self.settings.bullmq
        clock, entropy = SystemClock(), SystemEntropy()
        return BullmqBridge(settings, self.broker, prefix, clock, entropy, self.aloud, self.store, self.operations)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.bridge.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.bridge.stop()
        await self.redis.aclose()
        await super().__aexit__(kind, error, trace)

    def key(self, queue: str, name: str) -> str:
        return f"{self.settings.bullmq.prefix}:{queue}:{name}"

    async def job_ids(self, queue: str) -> list[str]:
        """Return the ids of all jobs in the queue, whatever their state."""
        found: list[str] = []
        for state in ("wait", "active", "paused"):
            found += await self.redis.lrange(self.key(queue, state), 0, -1)
        for state in ("completed", "failed", "delayed", "prioritized"):
            found += await self.redis.zrange(self.key(queue, state), 0, -1)
        return found

    async def task(self, run_id: str, task: str) -> dict[str, Any]:
        view = await self.operations.view(await self.operations.run(run_id))
        found: dict[str, Any] = next(one for one in map(msgspec.json.decode, view["tarefas"]) if one["id"] == task)
        return found


def node_worker(
    settings: Settings,
    folder: Path,
    *queues: str,
    options: dict[str, Any] | None = None,
    script: str = "",
) -> NodeProcess:
    """Return an unmodified worker of those queues, not yet started. Its journal is in the folder.

    With a `script` it is a process of its own, which can be killed.
    """
    bullmq = settings.bullmq
    environment = {
        "OPTIONS": json.dumps({**WORKER_OPTIONS, **(options or {})}),
        "JOURNAL": str(folder / "journal"),
    }
    log = folder / f"worker-{uuid.uuid4().hex[:6]}.log"
    if not script:
        return HubProgram("worker.mjs", bullmq.url, bullmq.prefix, *queues, log=log, environment=environment)
    return NodeProcess(installed() / script, bullmq.url, bullmq.prefix, *queues, log=log, environment=environment)


@contextlib.asynccontextmanager
async def working(*workers: NodeProcess) -> AsyncIterator[Sequence[NodeProcess]]:
    """Run workers until the block ends."""
    try:
        for worker in workers:
            await worker.ready()
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def journal(folder: Path) -> list[dict[str, Any]]:
    """Return every start of a job by a worker."""
    path = folder / "journal"
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def node_client(
    settings: Settings, folder: Path, queue: str, data: object, options: dict[str, Any] | None = None
) -> NodeProcess:
    """Return an application, not yet started, that adds a job and waits for its end. Data in bytes are JSON already."""
    text = data.decode() if isinstance(data, bytes) else json.dumps(data)
    arguments = (settings.bullmq.url, settings.bullmq.prefix, queue, text, json.dumps(options or {}))
    log = folder / f"client-{uuid.uuid4().hex[:6]}.log"
    return HubProgram("client.mjs", *arguments, log=log)
