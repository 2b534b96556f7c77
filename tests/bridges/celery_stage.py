"""Real `celery worker` processes, and an engine with a bridge to their broker."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kombu

from oraculo.bridges.celery import CeleryBridge, CeleryQueues
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.ports.telemetry import Silent, Telemetry
from oraculo.settings import BrokerSettings, CelerySettings, EngineSettings, RunSettings, Settings
from oraculo.testing.harness import Harness
from tests.servers.process import Server
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CELERY = [sys.executable, "-m", "celery"]
# In any folder, `celery` is the one of this Python, and imports find this checkout.
ANYWHERE = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


def command_in(document: Path, beginning: str) -> str:
    """Return the first line of a document that begins so."""
    return next(line for line in document.read_text("utf-8").splitlines() if line.startswith(beginning))


class CeleryWorker:
    """A process of `celery -A tests.bridges.celery_tasks worker`, on a queue of its own."""

    def __init__(
        self,
        broker: str,
        log: Path,
        *options: str,
        app: str = "tests.bridges.celery_tasks",
        cwd: Path = ROOT,
        queue: str | None = None,
        command: str | None = None,
        **environment: str,
    ) -> None:
        """`command` replaces the whole command line."""
        self.broker = broker
        self.queue = queue or f"loja-{uuid.uuid4().hex[:10]}"
        self._log = log
        self._cwd = cwd
        ours = [*CELERY, "-A", app, "worker", "-l", "INFO", "-n", f"{self.queue}@%h", *options]
        self._command = shlex.split(command, comments=True) if command else ours
        own = {"CELERY_BROKER": broker, "CELERY_QUEUE": self.queue}
        self._environment = os.environ | ANYWHERE | own | environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._begin = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._cwd, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    async def is_ready(self) -> None:
        def ready() -> bool:
            self.expect_running()
            return b" ready." in self._log.read_bytes()[self._begin :]

        await until(ready, within=30, saying="the celery worker to be ready")

    def expect_running(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended:\n{self.tail()}"

    def kill(self) -> None:
        """Kill all its processes at once with SIGKILL, as a dying machine does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the process has ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        code, self._process = self._process.wait(30), None
        return code

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def tail(self, size: int = 4000) -> str:
        return self.log()[-size:]


class Bridged(Harness):
    """An engine in this process, by default on `memory://`, with a bridge to a worker's broker."""

    def __init__(
        self,
        worker_broker: str,
        queue: str,
        *,
        broker: Any = None,
        prefix: str = "",
        telemetry: Telemetry | None = None,
        **celery: Any,
    ) -> None:
        settings = Settings(
            broker=BrokerSettings(prefix=prefix or f"t{uuid.uuid4().hex[:10]}."),
            runs=RunSettings(backoff=0.05, max_attempts=1),
            engine=EngineSettings(poll=0.2),
            celery=CelerySettings(
                broker_url=worker_broker, queue=queue, **{"tasks_allow": ("*",), "queues_allow": ("*",), **celery}
            ),
        )
        super().__init__(settings=settings, broker=broker)
        prefix = settings.broker.prefix
        self.bridge = CeleryBridge(
            settings.celery, self.broker, prefix, SystemClock(), SystemEntropy(), telemetry or Silent()
        )
        self.queues = CeleryQueues(settings.celery)
        bridges = self.engine.parts.bridges
        bridges.running, bridges.foreign_queues = [self.bridge], [self.queues]

    async def task(self, url: str, payload: dict[str, Any] | None = None, *, wait: float = 30, **more: Any) -> Any:
        """Run one Celery task as the only destination, and return the aggregate."""
        destination = {"id": "t", "fila": url, "payload": payload or {}}
        return await self.run({"destinos": [destination], "timeout": wait, **more}, wait=wait + 5)

    async def reads_events(self) -> None:
        def are_ready() -> bool:
            return [listener.trouble for listener in self.bridge._listeners] == [None, None]

        await until(are_ready, saying="the bridge to read replies and events")

    async def is_connected(self) -> None:
        await until(lambda: self.bridge.trouble is None, saying="the bridge to reach Celery's broker")


def replies_of(stage: Bridged) -> Callable[[], int]:
    """Return a function that counts the replies that wait on Celery's broker."""
    name = f"{stage.settings.broker.prefix}oraculo-respostas"

    def count() -> int:
        with kombu.Connection(stage.settings.celery.broker_url) as connection:
            channel: Any = connection.default_channel
            try:
                return int(channel.queue_declare(name, passive=True).message_count)
            except connection.channel_errors:  # Redis keeps no empty queue
                return 0

    return count


async def are_kept(server: Server, *queues: str) -> None:
    """Wait until a server can be killed without losing these queues.

    RabbitMQ writes the name of a quorum queue a moment after it made the queue. A queue whose name is not written when
    the server is killed never works again.
    """
    if not isinstance(server, RabbitMQ):
        return

    def are_written() -> bool:
        written = b"".join(file.read_bytes() for file in (server.folder / "data").rglob("names.dets"))
        return all(queue.encode() in written for queue in queues)

    await until(are_written, within=30, saying=f"RabbitMQ to write the names of {queues}")
