"""The composition root: the only module that names concrete adapters, and puts the parts together."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.operations import Operations
from oraculo.engine.service import Engine
from oraculo.errors import Fault, InvalidSettings
from oraculo.ports.broker import Broker
from oraculo.ports.clock import Clock, Entropy, SystemClock, SystemEntropy
from oraculo.ports.store import Store
from oraculo.settings import Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.telemetry.hub import Hub
from oraculo.telemetry.logs import LogSubscriber
from oraculo.telemetry.metrics import Metrics
from oraculo.worker import App, Worker

if TYPE_CHECKING:
    from fastapi import FastAPI

_SQLITE = "sqlite:///"

# The extra that will bring each adapter which this version has not got.
_BROKER_EXTRAS = {
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "redis": "redis",
    "rediss": "redis",
    "nats": "nats",
    "tls": "nats",
}
_STORE_EXTRAS = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "mongodb": "mongo",
    "mongodb+srv": "mongo",
}


@dataclass(frozen=True, slots=True)
class System:
    """Everything that one process runs, put together and not yet started."""

    settings: Settings
    engine: Engine
    operations: Operations
    broker: Broker
    store: Store
    metrics: Metrics
    clock: Clock
    entropy: Entropy


def make_broker(settings: Settings, clock: Clock) -> Broker:
    """Raises InvalidSettings for a broker that this version has no adapter for."""
    urls = settings.broker.urls
    if len(urls) > 1:
        raise InvalidSettings(
            Fault(
                "ORACULO_BROKER_URL",
                f"lists {len(urls)} brokers; this version takes one, memory://, and fail-over comes later",
            )
        )
    scheme = _scheme(urls[0])
    if scheme != "memory":
        raise _not_yet("ORACULO_BROKER_URL", scheme, "memory://", _BROKER_EXTRAS)
    return MemoryBroker(clock, delivery_limit=settings.broker.delivery_limit)


def make_store(settings: Settings, *, exclusive: bool = False) -> Store:
    """Raises InvalidSettings for a store that this version has no adapter for. `exclusive`: for this process alone."""
    url = settings.store.url
    if not url.startswith(_SQLITE):
        raise _not_yet("ORACULO_STORE_URL", _scheme(url), "sqlite:///path", _STORE_EXTRAS)
    return SqliteStore(url.removeprefix(_SQLITE), exclusive=exclusive)


def build(settings: Settings) -> System:
    """Raises InvalidSettings."""
    clock, entropy, metrics = SystemClock(), SystemEntropy(), Metrics()
    broker = make_broker(settings, clock)
    store = make_store(settings, exclusive=not broker.capabilities.shared)
    telemetry = Hub(metrics.observe, LogSubscriber())
    engine = Engine(settings, broker, store, clock=clock, entropy=entropy, telemetry=telemetry)
    return System(settings, engine, Operations(engine), broker, store, metrics, clock, entropy)


def make_app(system: System, *, workers: Sequence[App] = ()) -> "FastAPI":
    """The API over `system`, with the engine and the embedded `workers` living as long as it does."""
    from oraculo.api.app import create_app  # here, so that a worker process and `doctor` load without FastAPI

    settings = system.settings
    embedded = [make_worker(app, system.broker, settings, system.clock) for app in workers]

    @asynccontextmanager
    async def lifespan(_app: "FastAPI") -> AsyncIterator[None]:
        """Workers stop first: what they still answer has an engine to go to."""
        try:
            await system.engine.start()
            try:
                for worker in embedded:
                    await worker.start()
                yield
            finally:
                await asyncio.gather(*(worker.stop() for worker in embedded))
        finally:
            await system.engine.stop()

    return create_app(system.engine, system.operations, settings, system.metrics, lifespan=lifespan)


def make_worker(app: App, broker: Broker, settings: Settings, clock: Clock) -> Worker:
    return Worker(app, broker, settings.worker, clock, settings.broker.prefix)


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _not_yet(variable: str, scheme: str, right: str, extras: dict[str, str]) -> InvalidSettings:
    extra = f" (it will come with oraculo[{extras[scheme]}])" if scheme in extras else ""
    return InvalidSettings(Fault(variable, f"this version has {right} only, no {scheme}://{extra}"))


def collect_garbage_less_often() -> None:
    """For a process that serves: batches make thousands of short-lived objects and hardly a cycle, and Python's default
    looks for cycles after every 700 of them. Measured: a fifth of the time of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
