"""The composition root: the only module that names concrete adapters, and puts the parts together."""

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.vigil import VigilantBroker
from oraculo.core.naming import QueueNames, told_apart
from oraculo.engine.operations import Operations
from oraculo.engine.service import Engine, Role
from oraculo.errors import Fault, InvalidSettings
from oraculo.ports.broker import Broker
from oraculo.ports.clock import Clock, Entropy, SystemClock, SystemEntropy
from oraculo.ports.store import Store
from oraculo.ports.telemetry import Telemetry
from oraculo.settings import BrokerSettings, Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.telemetry.hub import Hub
from oraculo.telemetry.logs import LogSubscriber
from oraculo.telemetry.metrics import Metrics
from oraculo.worker import App, Worker

if TYPE_CHECKING:
    from fastapi import FastAPI

_SQLITE = "sqlite:///"

# The extras that bring each adapter's client.
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


def make_broker(
    settings: Settings, clock: Clock, telemetry: Telemetry | None = None, *, own_queues: Sequence[str] = ()
) -> Broker:
    """One for each URL, watched over, and behind one face when there are several. `own_queues`: those that nobody but
    the caller reads. Raises InvalidSettings."""
    adapters = [broker for _, broker in make_adapters(settings, clock)]
    if not adapters[0].capabilities.shared:
        return adapters[0]
    telemetry = telemetry or Hub(LogSubscriber())
    silence = settings.broker.silence
    watched: list[Broker] = [
        VigilantBroker(adapter, clock, telemetry, own_queues=own_queues, silence=silence) for adapter in adapters
    ]
    return watched[0] if len(watched) == 1 else FailoverBroker(watched)


def make_adapters(settings: Settings, clock: Clock) -> list[tuple[str, Broker]]:
    """Each broker by itself, with its URL, for whoever wants to know how each is doing. Raises InvalidSettings."""
    urls, names = settings.broker.urls, _broker_names(settings.broker.urls)
    if len(urls) > 1 and "memory" in map(_scheme, urls):
        fault = "has memory:// in a list of brokers; it lives in one process, and takes over from no other"
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", fault))
    return [(url, _make_adapter(url, name, settings.broker, clock)) for url, name in zip(urls, names, strict=True)]


def _broker_names(urls: Sequence[str]) -> list[str]:
    """What was sent is noted under them, so they depend on nothing but the order of the URLs."""
    return told_apart([_BROKER_EXTRAS.get(_scheme(url), _scheme(url)) for url in urls])


def _make_adapter(url: str, name: str, settings: BrokerSettings, clock: Clock) -> Broker:
    """The client is imported here, so that nobody needs one that is not used."""
    scheme = _scheme(url)
    options: dict[str, Any] = {
        "name": name,
        "clock": clock,
        "delivery_limit": settings.delivery_limit,
        "connect_timeout": settings.connect_timeout,
        "publish_timeout": settings.publish_timeout,
    }
    leased = {**options, "lease": settings.lease}
    try:
        match _BROKER_EXTRAS.get(scheme):
            case "rabbitmq":
                from oraculo.brokers.rabbitmq import RabbitMQBroker

                return RabbitMQBroker(url, **options)
            case "redis":
                from oraculo.brokers.redis_streams import RedisStreamsBroker

                return RedisStreamsBroker(url, **leased)
            case "nats":
                from oraculo.brokers.nats import NatsBroker

                return NatsBroker(url, **leased)
            case _:
                return MemoryBroker(clock, delivery_limit=settings.delivery_limit)
    except ModuleNotFoundError as error:
        raise _not_installed("ORACULO_BROKER_URL", scheme, _BROKER_EXTRAS[scheme], error) from error


def make_store(settings: Settings, *, exclusive: bool = False) -> Store:
    """`exclusive`: for this process alone, where the store knows such a thing. Raises InvalidSettings."""
    url = settings.store.url
    scheme = _scheme(url)
    try:
        match _STORE_EXTRAS.get(scheme):
            case "postgres":
                from oraculo.stores.postgres import PostgresStore

                return PostgresStore(url)
            case "redis":
                from oraculo.stores.redis import RedisStore

                return RedisStore(url)
            case "mongo":
                from oraculo.stores.mongo import MongoStore

                return MongoStore(url)
            case _:
                return SqliteStore(url.removeprefix(_SQLITE), exclusive=exclusive)
    except ModuleNotFoundError as error:
        raise _not_installed("ORACULO_STORE_URL", scheme, _STORE_EXTRAS[scheme], error) from error


def build(settings: Settings, role: Role = Role.WHOLE) -> System:
    """Raises InvalidSettings."""
    clock, entropy, metrics = SystemClock(), SystemEntropy(), Metrics()
    telemetry = Hub(metrics.observe, LogSubscriber())
    names = QueueNames(settings.broker.prefix)
    own_queues = (names.requests, names.answers) if role is Role.WHOLE else ()
    broker = make_broker(settings, clock, telemetry, own_queues=own_queues)
    store = make_store(settings, exclusive=not broker.capabilities.shared)
    engine = Engine(
        settings,
        broker,
        store,
        clock=clock,
        entropy=entropy,
        telemetry=telemetry,
        name=f"{socket.gethostname()}:{os.getpid()}:{entropy.new_id()[-8:]}",
        role=role,
    )
    return System(settings, engine, Operations(engine), broker, store, metrics, clock, entropy)


def make_app(system: System, *, workers: Sequence[App] = (), only_health: bool = False) -> "FastAPI":
    """The API over `system`, with the engine and the embedded `workers` living as long as it does. `only_health`: for
    an engine that others ask nothing but how it is."""
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

    return create_app(
        system.engine, system.operations, settings, system.metrics, lifespan=lifespan, only_health=only_health
    )


def make_worker(app: App, broker: Broker, settings: Settings, clock: Clock) -> Worker:
    renewal = settings.broker.lease / 3
    return Worker(app, broker, settings.worker, clock, settings.broker.prefix, lease_renewal=renewal)


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _not_installed(variable: str, scheme: str, extra: str, error: ModuleNotFoundError) -> InvalidSettings:
    missing = f"{scheme}:// needs a client that is not installed ({error.name}): pip install 'oraculo[{extra}]'"
    return InvalidSettings(Fault(variable, missing))


def collect_garbage_less_often() -> None:
    """For a process that serves: batches make thousands of short-lived objects and hardly a cycle, and Python's default
    looks for cycles after every 700 of them. Measured: a fifth of the time of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
