"""The engine as one service: starts its parts in order, keeps its duties going, and stops them in phases.

A stop first takes no new work. Then, within a grace, everything taken is decided and committed, and everything decided
is sent and delivered. At last consumers and connections are closed. Whatever is cut off is in the store, or still in
its queue, and goes on at the next start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from oraculo.engine.after_commit import AfterCommit
from oraculo.engine.bridges import Bridges
from oraculo.engine.cluster.broker_marks import BrokerMarks
from oraculo.engine.cluster.broker_watch import BrokerWatch
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.consumers import EngineConsumers
from oraculo.engine.decide.intake import Intake
from oraculo.engine.deliver.deliveries import Deliveries
from oraculo.engine.deliver.webhooks import HttpPost
from oraculo.engine.health import EngineHealth, Lifecycle
from oraculo.engine.operations import Operations, RunParts
from oraculo.engine.pipelines import PipelineCatalogue
from oraculo.engine.ports import Ports
from oraculo.engine.queues.parts import QueueParts
from oraculo.engine.results.clean_up import claim
from oraculo.engine.send.outbox import Outbox
from oraculo.engine.send.sweep import Sweep
from oraculo.engine.timers import Timers
from oraculo.errors import BrokerUnavailable, StoreUnavailable
from oraculo.ports.telemetry import LoopFailed
from oraculo.settings import Settings

_FIRST_PAUSE, _PAUSE_AFTER_FAILURE = 0.1, 1.0
_SILENCE = 1.0  # seconds after which a start counts as waiting for a silent store
_LAST_NOTES = 2.0  # seconds at the end for notes of what was sent

Duty = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine, wired together. `wiring` makes them."""

    lifecycle: Lifecycle
    health: EngineHealth
    operations: Operations
    peers: Peers
    runs: RunParts
    queues: QueueParts
    catalogue: PipelineCatalogue
    bridges: Bridges
    consumers: EngineConsumers
    intake: Intake
    timers: Timers
    outbox: Outbox
    sweep: Sweep
    after_commit: AfterCommit
    deliveries: Deliveries
    http: HttpPost
    broker_watch: BrokerWatch
    broker_marks: BrokerMarks
    threads: Sequence[Executor]
    duties: Mapping[str, Duty]  # that need nothing but to be kept going


class Engine:
    """The engine: start it, use it through its `operations`, stop it. A second start or stop does no harm."""

    def __init__(self, settings: Settings, ports: Ports, parts: Parts) -> None:
        self.settings = settings
        self.ports = ports
        self.parts = parts
        self.operations = parts.operations
        self._connected = False
        self._pumps: list[asyncio.Task[None]] = []
        self._duties: list[asyncio.Task[None]] = []
        self._deciding: asyncio.Task[None] | None = None
        self.awaits_store = asyncio.Event()  # set when the start waits for the store

    @property
    def accepting(self) -> bool:
        return self.parts.lifecycle.accepting

    # -- start ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        parts, ports = self.parts, self.ports
        if self.accepting:
            return
        await self._open_store()
        parts.lifecycle.not_started = "the store is open, the rest is starting"
        self._connected = await self._connects()
        if self._connected and not ports.broker.capabilities.durable:
            await ports.store.forget_sent()
        self._deciding = asyncio.create_task(self._decide(), name="intake")
        own: dict[str, Duty] = {"brokers": self._watch_brokers, "pipelines": self._watch_pipelines}
        if parts.peers.is_engine:
            own |= {"timers": self._ring_timers, "leases": self._renew_leases}
        self._duties = [self._duty(name, work) for name, work in (own | dict(parts.duties)).items()]
        if self._connected:
            await parts.consumers.subscribe()
        for queue in parts.consumers.names:
            self._pumps.append(self._duty(f"consume {queue}", partial(parts.consumers.pump, queue)))
        await parts.bridges.start()
        parts.lifecycle.not_started = None
        parts.lifecycle.accepting = True

    async def _open_store(self) -> None:
        """Open the store, and wait for a server that is still starting. Log the wait."""
        store, telemetry, lifecycle = self.ports.store, self.ports.telemetry, self.parts.lifecycle
        loop = asyncio.get_running_loop()
        pause, deadline = _FIRST_PAUSE, loop.time() + self.settings.store.patience
        silent = loop.call_later(_SILENCE, self.awaits_store.set)
        lifecycle.not_started = f"waits for the store {store.name}"
        while True:
            try:
                await store.start()
                await self.parts.catalogue.load(store)
                if self.ports.objects is not None:
                    await claim(self.ports.objects, store, telemetry)
                await self.parts.peers.join(self.ports.broker.name if self.ports.must_be_alone else None)
                silent.cancel()
                return
            except StoreUnavailable as error:
                if loop.time() >= deadline:
                    raise
                telemetry.emit(LoopFailed("store", f"waits for it: {error}"))
                lifecycle.not_started = f"waits for the store {store.name}: {error}"
                self.awaits_store.set()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _PAUSE_AFTER_FAILURE)

    async def _connects(self) -> bool:
        """Return whether the broker could be reached.

        An absent broker stops no start: runs are accepted and wait, and readiness shows it. A refusal is a fault of
        settings, and is raised.
        """
        broker = self.ports.broker
        try:
            await broker.start()
            if broker.capabilities.shared:
                await self.parts.broker_marks.begin()  # before waiting commands go out
            await self.parts.queues.of_pipelines.declare_all()
        except BrokerUnavailable as error:
            self.ports.telemetry.emit(LoopFailed("broker", str(error)))
            return False
        return True

    # -- duties -----------------------------------------------------------------------------------------------

    def _duty(self, name: str, work: Duty) -> asyncio.Task[None]:
        return asyncio.create_task(self._keep_going(name, work), name=name)

    async def _keep_going(self, name: str, work: Duty) -> None:
        """Do a duty for ever. Log each failure and begin again, because none may stop in silence."""
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001
                self.ports.telemetry.emit(LoopFailed(name, f"{type(error).__name__}: {error}"))
            await asyncio.sleep(_PAUSE_AFTER_FAILURE)

    async def _decide(self) -> None:
        """Run the intake until it is to stop. Should a bug end it, log that and begin again."""
        while not self.parts.intake.stopped:
            try:
                await self.parts.intake.run()
            except Exception as error:  # noqa: BLE001
                self.ports.telemetry.emit(LoopFailed("intake", f"{type(error).__name__}: {error}"))
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)

    async def _watch_brokers(self) -> None:
        if not self._connected:
            while not await self._connects():  # noqa: ASYNC110 - the broker sets no event
                await asyncio.sleep(self.settings.engine.poll)
            self._connected = True
            if not self.ports.broker.capabilities.durable:  # at a start `forget_sent` does this
                self.parts.broker_watch.memory_was_lost()
        await self.parts.broker_watch.run()

    async def _ring_timers(self) -> None:
        """Ring timers, those that are overdue at the start only after waiting answers were heard.

        The answers may have come in time while no engine ran.
        """
        if self._connected and await self.ports.store.due(self.ports.clock.now(), 1):
            await self.parts.consumers.heard_out(self.parts.queues.names.answers)
        await self.parts.timers.run()

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.settings.engine_lease / 3)
            await self.parts.intake.renew_leases()

    async def _watch_pipelines(self) -> None:
        while True:
            await asyncio.sleep(self.settings.engine.poll)
            await self.parts.catalogue.refresh_stored(self.ports.store)
            await self.parts.catalogue.refresh_folder()
            await self.parts.queues.of_pipelines.declare_missing()

    # -- stop -------------------------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Begin a stop: take no new work, and let go of callers who wait. Work under way goes on."""
        self.parts.lifecycle.accepting = False
        self.parts.runs.watchers.close()

    async def stop(self) -> None:
        parts, ports = self.parts, self.ports
        self.quiesce()
        await parts.bridges.stop()
        await self._end_tasks(self._pumps)
        if self._deciding is not None:  # otherwise it never started, or has stopped
            await self._finish_in_grace()
        await parts.after_commit.abandon()
        await parts.deliveries.abandon()
        await self._end_tasks(self._duties)
        await parts.outbox.abandon()
        await self._stop_deciding()
        await parts.consumers.close()
        await parts.http.close()
        await ports.broker.close()
        await parts.peers.depart()
        await ports.store.close()
        if ports.objects is not None:
            await ports.objects.close()
        for threads in parts.threads:
            threads.shutdown(wait=False)

    async def _finish_in_grace(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.engine.stop_grace):
                await self.parts.intake.drained()
                await self.parts.outbox.flushed()
                await self.parts.after_commit.handed_out()
                await self.parts.deliveries.finished()

    async def _stop_deciding(self) -> None:
        """Commit the last notes, so that what was sent is not sent again at the next start."""
        if self._deciding is None:
            return
        self.parts.intake.stop()
        with suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._deciding, min(_LAST_NOTES, self.settings.engine.stop_grace))
        self._deciding = None

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()
