"""The composition root: the only module that names concrete adapters and puts the parts together."""

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import structlog

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.liveness import LivenessBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.core.loopback import is_loopback
from oraculo.errors import Fault, InvalidSettings, how_to_add
from oraculo.ports.bridge import ForeignQueues, RunningBridge, RunStarter
from oraculo.ports.broker_admin import FullBroker
from oraculo.ports.clock import Clock, Entropy, SystemClock, SystemEntropy
from oraculo.ports.objects import Objects
from oraculo.ports.store import Storage
from oraculo.ports.telemetry import Telemetry
from oraculo.settings import ApiSettings, Settings
from oraculo.settings.urls import without_secrets
from oraculo.stores.objects import FolderObjects, RemoteObjects
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.telemetry.hub import Hub
from oraculo.telemetry.logs import LogSubscriber
from oraculo.wire.naming import QueueNames, numbered
from oraculo.worker import App, Worker

if TYPE_CHECKING:
    from fastapi import FastAPI

    from oraculo.engine.operations import Operations
    from oraculo.engine.service import Engine
    from oraculo.engine.wiring import Role
    from oraculo.telemetry.metrics import Metrics

_log = structlog.get_logger("oraculo")

_SQLITE = "sqlite:///"

_NO_KEYS = (
    "none are set, and other machines can reach {host}; set some, or let in whoever can reach it with --insecure or "
    "ORACULO_API_INSECURE=true"
)
_CANARY_GRACE = 5.0  # seconds that a canary may be late

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
    """The parts of one process, put together and not yet started."""

    settings: Settings
    engine: "Engine"
    operations: "Operations"
    broker: FullBroker
    store: Storage
    objects: Objects | None
    metrics: "Metrics"
    clock: Clock
    entropy: Entropy


def make_broker(
    settings: Settings, clock: Clock, telemetry: Telemetry | None = None, *, own_queues: Sequence[str] = ()
) -> FullBroker:
    """Return the broker of the settings, with a check of liveness, and fail-over between several URLs.

    `own_queues` are those that only the caller reads. Raises InvalidSettings.
    """
    adapters = [broker for _, broker in make_adapters(settings, clock, sends_canaries=bool(own_queues))]
    if not adapters[0].capabilities.shared:
        return adapters[0]
    telemetry = telemetry or Hub(LogSubscriber())
    silence = settings.broker.silence
    watched: list[FullBroker] = [
        LivenessBroker(adapter, clock, telemetry, own_queues=own_queues, silence=silence) for adapter in adapters
    ]
    return watched[0] if len(watched) == 1 else FailoverBroker(watched)


def make_adapters(settings: Settings, clock: Clock, *, sends_canaries: bool = False) -> list[tuple[str, FullBroker]]:
    """Return each URL with the adapter for it. Raises InvalidSettings."""
    urls, names = settings.broker.urls, _broker_names(settings.broker.urls)
    if len(urls) > 1 and "memory" in map(_scheme, urls):
        fault = "has memory:// in a list of brokers; it lives in one process, and takes over from no other"
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", fault))
    silence = settings.broker.silence + _CANARY_GRACE if sends_canaries else None
    return [(url, _make_adapter(url, name, settings, clock, silence)) for url, name in zip(urls, names, strict=True)]


def _broker_names(urls: Sequence[str]) -> list[str]:
    """Return the brokers' names. The store has them beside sent commands, so only the order of URLs decides."""
    return numbered([_BROKER_EXTRAS.get(_scheme(url), _scheme(url)) for url in urls])


def _make_adapter(url: str, name: str, all_settings: Settings, clock: Clock, silence: float | None) -> FullBroker:
    """Return the adapter for a URL. Its client is imported here, so that unused clients need not be installed.

    `silence` is the longest time without a proof that the connection works; None: there is no limit.
    """
    scheme, settings = _scheme(url), all_settings.broker
    queues = QueueNames(settings.prefix)
    options: dict[str, Any] = {
        "name": name,
        "clock": clock,
        "delivery_limit": settings.delivery_limit,
        "connect_timeout": settings.connect_timeout,
        "publish_timeout": settings.publish_timeout,
    }
    # Engines settle their messages at once, so their queues have a short lease. Workers use the same lease for them,
    # because with NATS it is a property of the queue.
    leases = dict.fromkeys((queues.answers, queues.requests), all_settings.engine_lease)
    leased = {**options, "lease": settings.lease, "leases": leases}
    try:
        match _BROKER_EXTRAS.get(scheme):
            case "rabbitmq":
                from oraculo.brokers.rabbitmq import RabbitMQBroker

                return RabbitMQBroker(url, **options, proof_within=silence)
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


def make_store(settings: Settings, *, exclusive: bool | None = None) -> Storage:
    """Return the store of the settings. Raises InvalidSettings.

    `exclusive` locks a SQLite file for this process; None opens it only to look in.
    """
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


def make_objects(settings: Settings) -> Objects | None:
    """Return the place of large results; None: they stay in the store. Raises InvalidSettings."""
    url = settings.objects.url
    if not url:
        beside = _folder_beside(settings.store.url)
        return None if beside is None else FolderObjects(beside, is_own=True)
    if (folder := _folder_of(url)) is not None:
        return FolderObjects(folder)
    scheme = _scheme(url)
    try:
        return RemoteObjects(url)
    except ImportError as error:
        missing = f"{scheme}:// needs a package that is not installed ({error})"
        raise InvalidSettings(Fault("ORACULO_OBJECTS_URL", missing + _how_to_reach(scheme, error))) from error
    except Exception as error:  # each package refuses options and places in its own words
        reason = without_secrets(str(error), url)
        raise InvalidSettings(Fault("ORACULO_OBJECTS_URL", f"{scheme}://… cannot be used: {reason}")) from error


def _how_to_reach(scheme: str, error: ImportError) -> str:
    """Return the advice for a place that fsspec cannot reach yet. fsspec's own errors name the package they need."""
    if scheme in ("s3", "s3a"):
        return f": {how_to_add('s3')}"
    return ": pip install fsspec" if error.name == "fsspec" else ""


def _folder_of(objects_url: str) -> Path | None:
    """Return the folder that the URL names; None: it names a place for fsspec."""
    scheme, mark, path = objects_url.partition("://")
    if mark and scheme.lower() != "file":
        return None
    return Path(unquote(path) if mark else objects_url)


def _folder_beside(store_url: str) -> Path | None:
    """Return the folder beside the SQLite file; None for a store that several machines share."""
    path = store_url.removeprefix(_SQLITE)
    return None if path in (store_url, MEMORY) else Path(f"{path}.objects")


def make_bridges(
    settings: Settings,
    broker: FullBroker,
    store: Storage,
    clock: Clock,
    entropy: Entropy,
    telemetry: Telemetry,
    runs: RunStarter | None = None,
) -> list[RunningBridge]:
    """Return the bridges that the settings name. Without `runs` they start no runs. Raises InvalidSettings."""
    made: list[RunningBridge] = []
    prefix = settings.broker.prefix
    if settings.celery.broker_url:
        try:
            from oraculo.bridges.celery import CeleryBridge
        except ModuleNotFoundError as error:
            raise _not_installed("ORACULO_CELERY_BROKER_URL", "celery", "celery", error) from error
        made.append(CeleryBridge(settings.celery, broker, prefix, clock, entropy, telemetry))
    if settings.bullmq.url:
        try:
            from oraculo.bridges.bullmq import BullmqBridge
        except ModuleNotFoundError as error:
            raise _not_installed("ORACULO_BULLMQ_URL", "bullmq", "bullmq", error) from error
        made.append(BullmqBridge(settings.bullmq, broker, prefix, clock, entropy, telemetry, store, runs))
    return made


def make_foreign_queues(settings: Settings) -> list[ForeignQueues]:
    """Return views of the bridged systems' queues. A missing client is only logged."""
    made: list[ForeignQueues] = []
    if settings.celery.broker_url:
        with _log_if_missing("celery"):
            from oraculo.bridges.celery import CeleryQueues

            made.append(CeleryQueues(settings.celery))
    if settings.bullmq.url:
        with _log_if_missing("bullmq"):
            from oraculo.bridges.bullmq import BullmqQueues

            made.append(BullmqQueues(settings.bullmq))
    return made


@contextmanager
def _log_if_missing(bridge: str) -> Iterator[None]:
    try:
        yield
    except (ModuleNotFoundError, InvalidSettings) as error:
        _log.warning("explanations will not say what waits behind a bridge", bridge=bridge, reason=str(error))


def build(settings: Settings, role: "Role | None" = None) -> System:
    """Put together the parts for a role, by default the whole. Raises InvalidSettings."""
    # Imported here, because a worker process does without them: they would be a third of what it loads.
    from oraculo.engine.ports import Ports
    from oraculo.engine.wiring import Role, make_engine
    from oraculo.telemetry.metrics import Metrics

    role = role or Role.WHOLE
    clock, entropy, metrics = SystemClock(), SystemEntropy(), Metrics()
    telemetry = Hub(metrics.observe, LogSubscriber())
    names = QueueNames(settings.broker.prefix)
    own_queues = (names.requests, names.answers) if role is Role.WHOLE else ()
    broker = make_broker(settings, clock, telemetry, own_queues=own_queues)
    store = make_store(settings, exclusive=not broker.capabilities.shared)
    objects = make_objects(settings)
    must_be_alone = not broker.capabilities.shared and not isinstance(store, SqliteStore)  # whose file has a lock
    ports = Ports(broker, store, clock, entropy, telemetry, objects, must_be_alone=must_be_alone)
    name = f"{socket.gethostname()}:{os.getpid()}:{entropy.new_id()[-8:]}"
    engine = make_engine(settings, ports, name=name, role=role)
    if role is Role.WHOLE:
        bridges = make_bridges(settings, broker, store, clock, entropy, telemetry, engine.operations)
        engine.parts.bridges.running = bridges
    engine.parts.bridges.foreign_queues = make_foreign_queues(settings)
    return System(settings, engine, engine.operations, broker, store, objects, metrics, clock, entropy)


def expect_keys(api: ApiSettings, host: str) -> None:
    """Raise InvalidSettings when other machines could call a server without keys, unless it is `insecure`."""
    if not (api.keys or api.insecure or is_loopback(host)):
        raise InvalidSettings(Fault("ORACULO_API_KEYS", _NO_KEYS.format(host=host)))


def make_app(system: System, *, workers: Sequence[App] = (), only_health: bool = False) -> "FastAPI":
    """Make the API, which starts and stops the engine and the embedded `workers`; `state.starting` has their start.

    With `only_health` it serves health checks and metrics only.
    """
    from oraculo.api.app import create_app  # here, so that a worker process and `doctor` load without FastAPI
    from oraculo.engine.starting import Starting

    settings = system.settings
    embedded = [make_worker(app, system.broker, settings, system.clock, system.objects) for app in workers]
    starting = Starting(system.engine, [worker.start for worker in embedded])

    @asynccontextmanager
    async def lifespan(_app: "FastAPI") -> AsyncIterator[None]:
        """Stop the workers before the engine, which takes their last answers."""
        try:
            await starting.begin()
            yield
        finally:
            await starting.abandon()
            await asyncio.gather(*(worker.stop() for worker in embedded))
            await system.engine.stop()

    app = create_app(
        system.engine, system.operations, settings, system.metrics, lifespan=lifespan, only_health=only_health
    )
    app.state.starting = starting
    return app


def make_worker(
    app: App, broker: FullBroker, settings: Settings, clock: Clock, objects: Objects | None = None
) -> Worker:
    """Return a worker. It uses `objects` only when their URL is set, as the engine expects."""
    return Worker(
        app,
        broker,
        settings.worker,
        clock,
        settings.broker.prefix,
        lease=settings.broker.lease,
        delivery_limit=settings.broker.delivery_limit,
        objects=objects if settings.objects.url else None,
        threshold=settings.objects.threshold_bytes,
    )


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _not_installed(variable: str, scheme: str, extra: str, error: ModuleNotFoundError) -> InvalidSettings:
    missing = f"{scheme}:// needs a client that is not installed ({error.name}): {how_to_add(extra)}"
    return InvalidSettings(Fault(variable, missing))


def collect_garbage_less_often() -> None:
    """Raise the thresholds of the garbage collector, which took a fifth of a run's time.

    Batches make thousands of short-lived objects and hardly a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
