"""Engine and workers on a real broker: each with a connection of its own, as if they were processes of their own."""

import uuid
from types import TracebackType
from typing import Any, Self

from oraculo.bootstrap import make_broker, make_worker
from oraculo.ports.broker import Consumer, Delivery
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Store
from oraculo.ports.telemetry import Telemetry
from oraculo.settings import BrokerSettings, EngineSettings, RunSettings, Settings
from oraculo.testing.harness import Harness
from oraculo.worker import App, Worker


def settings_for(url: str, **broker: Any) -> Settings:
    """Queues of its own, so that tests may share a server."""
    return Settings(
        broker=BrokerSettings(**{"url": url, "prefix": f"t{uuid.uuid4().hex[:10]}.", **broker}),
        runs=RunSettings(backoff=0.05),
        engine=EngineSettings(poll=0.2),
    )


class Stage(Harness):
    def __init__(
        self, settings: Settings, *apps: App, store: Store | None = None, telemetry: Telemetry | None = None
    ) -> None:
        clock = SystemClock()
        prefix = settings.broker.prefix
        own = (f"{prefix}orquestrador", f"{prefix}resultados")
        broker = make_broker(settings, clock, own_queues=own)
        super().__init__(settings=settings, broker=broker, store=store, telemetry=telemetry)
        self._worker_broker = make_broker(settings, clock)
        self._fleet: list[Worker] = [make_worker(app, self._worker_broker, settings, clock) for app in apps]
        self._listening: Consumer | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self._worker_broker.start()
        for worker in self._fleet:
            await worker.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for worker in self._fleet:
            await worker.stop()
        await self._worker_broker.close()
        await super().__aexit__(kind, error, trace)

    async def listen_on(self, queue: str) -> Consumer:
        """As a worker that takes one message at a time, of which the engine's own connection knows nothing."""
        return await self._worker_broker.consume(self.engine.parts.queues.names.physical(queue), prefetch=1)

    async def next_on(self, queue: str) -> Delivery:
        """The next message on a queue that no worker reads."""
        if self._listening is None:
            name = self.engine.parts.queues.names.physical(queue)
            self._listening = await self._worker_broker.consume(name, prefetch=10)
        [delivery] = await self._listening.take(1)
        await self._listening.ack([delivery])
        return delivery
