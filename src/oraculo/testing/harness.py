"""`Harness`: ORÁCULO in one process, for tests of workers."""

from types import TracebackType
from typing import Any, Self

import msgspec

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.deliver.webhooks import Post
from oraculo.engine.ports import Ports
from oraculo.engine.wiring import Role, make_engine
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import FullBroker
from oraculo.ports.clock import Clock, Entropy, SystemClock, SystemEntropy
from oraculo.ports.objects import Objects
from oraculo.ports.store import Storage
from oraculo.ports.telemetry import Silent, Telemetry
from oraculo.settings import Settings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.worker import App, Worker


class Harness:
    """An engine, a broker in memory, a store and your workers in one process, with nothing to start.

        async with Harness(app) as oraculo:
            aggregate = await oraculo.run({"destinos": ["escavador_youtube"], "payload": {}})
            assert aggregate["status"] == "concluida"

    Every part may be replaced by name, such as `settings=` for shorter pauses or `clock=` for a clock of your own.
    `broker`, `store`, `engine`, `operations` and `workers` are attributes, for tests that look inside.
    """

    def __init__(
        self,
        *apps: App,
        settings: Settings | None = None,
        broker: FullBroker | None = None,
        store: Storage | None = None,
        objects: Objects | None = None,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        telemetry: Telemetry | None = None,
        post: Post | None = None,
        role: Role = Role.WHOLE,
    ) -> None:
        self.settings = settings or Settings()
        self.clock = clock or SystemClock()
        self.broker = broker or MemoryBroker(clock=self.clock, delivery_limit=self.settings.broker.delivery_limit)
        self.store = store or SqliteStore(MEMORY)
        entropy, telemetry = entropy or SystemEntropy(), telemetry or Silent()
        ports = Ports(self.broker, self.store, self.clock, entropy, telemetry, objects, post)
        self.engine = make_engine(self.settings, ports, role=role)
        self.operations = self.engine.operations
        # As in production, workers use the result store only when its URL is set.
        shared = objects if self.settings.objects.url else None
        self.workers = [
            Worker(
                app,
                self.broker,
                self.settings.worker,
                self.clock,
                self.settings.broker.prefix,
                lease=self.settings.broker.lease,
                delivery_limit=self.settings.broker.delivery_limit,
                objects=shared,
                threshold=self.settings.objects.threshold_bytes,
            )
            for app in apps
        ]

    async def __aenter__(self) -> Self:
        try:
            await self.engine.start()
            for worker in self.workers:
                await worker.start()
        except BaseException as error:
            try:
                await self.stop()
            except Exception as second:  # noqa: BLE001 - the first is what the test is to see
                error.add_note(f"and it could not be stopped: {second!r}")
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop the workers, then the engine. Leaving the `async with` block does this."""
        for worker in self.workers:
            await worker.stop()
        await self.engine.stop()

    async def submit(self, request: dict[str, Any], *, idempotency_key: str | None = None) -> str:
        """Start a run and return its id, without waiting."""
        submitted = await self.operations.submit(msgspec.json.encode(request), idempotency_key=idempotency_key)
        return submitted.run_id

    async def run(self, request: dict[str, Any], *, wait: float = 30.0) -> dict[str, Any]:
        """Start a run, wait for its end and return its aggregate.

        Raises:
            TimeoutError: if the run has not ended in `wait` seconds. The message says what it waits for.
        """
        submitted = await self.operations.submit(msgspec.json.encode(request), wait=wait)
        if submitted.aggregate is None:
            raise TimeoutError(await self.operations.explain(submitted.run_id))
        return _decoded(submitted.aggregate)

    async def ended(self, run_id: str, *, wait: float = 30.0) -> dict[str, Any]:
        """Wait for the end of a run that was started before, and return its aggregate.

        Raises:
            TimeoutError: if the run has not ended in `wait` seconds. The message says what it waits for.
        """
        aggregate = await self.operations.wait(run_id, wait)
        if aggregate is None:
            raise TimeoutError(await self.operations.explain(run_id))
        return _decoded(aggregate)

    async def publish(self, queue: str, message: dict[str, Any] | bytes) -> None:
        """Put a message on a queue, as a program without the SDK does."""
        body = message if isinstance(message, bytes) else msgspec.json.encode(message)
        await publish_all(self.broker, [Outgoing(self.engine.parts.queues.names.physical(queue), body)])


def _decoded(aggregate: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(aggregate)
    return decoded
