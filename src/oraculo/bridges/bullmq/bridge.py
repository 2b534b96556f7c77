"""The bridge as one service: it owns the parts, keeps them going while Redis is away, and stops them in order."""

import asyncio
from collections.abc import Awaitable, Callable

from oraculo.bridges.bullmq.bull_v4 import BullEvents, BullLayout
from oraculo.bridges.bullmq.dispatcher import Dispatcher
from oraculo.bridges.bullmq.entry import Entry
from oraculo.bridges.bullmq.events import EventReader, Events
from oraculo.bridges.bullmq.layout import BullmqLayout
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.results import Results
from oraculo.bridges.bullmq.server import BullmqRedis, Refusals
from oraculo.bridges.bullmq.sweep import Sweep
from oraculo.clients.subscription import Backoff, QueueIntake
from oraculo.pipeline.bridges import BULLMQ, QUEUES
from oraculo.ports.bridge import RunStarter
from oraculo.ports.broker import Broker
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.store import Store
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.settings import BullmqSettings
from oraculo.wire.answers import AnswerWriter, describe
from oraculo.wire.naming import QueueNames

PREFETCH = 100

Duty = Callable[[], Awaitable[None]]


class BullmqBridge:
    """The bridge to BullMQ; without `runs` its jobs start none. Raises InvalidSettings.

    It only reads the store, for the progress of runs.
    """

    name = BULLMQ

    def __init__(
        self,
        settings: BullmqSettings,
        broker: Broker,
        prefix: str,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
        store: Store,
        runs: RunStarter | None,
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._names = names = QueueNames(prefix)
        self._entropy = entropy
        self._telemetry = telemetry
        self._server = server = BullmqRedis(settings.url, prefix)
        self._refusals = Refusals()
        make_layout = BullLayout if settings.legacy else BullmqLayout
        layout = make_layout(server.client, settings.prefix, priority=settings.priority)
        ledger = Ledger(server.client, layout, prefix, clock)
        results = Results(broker, ledger, AnswerWriter(clock, names), names.answers, entropy)
        self._events: Events = (
            BullEvents(server, ledger, layout, results)
            if settings.legacy
            else EventReader(server, ledger, layout, results, self._refusals, prefix, clock)
        )
        self._sweep = Sweep(server.client, ledger, layout, results, keep=settings.keep, clock=clock)
        self._dispatcher = Dispatcher(
            server,
            ledger,
            self._events,
            self._sweep,
            results,
            names=names,
            allow=settings.allow,
            clock=clock,
            entropy=entropy,
            telemetry=telemetry,
        )
        self._store = store
        self._runs = runs
        self._entry: Entry | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def trouble(self) -> str | None:
        return self._server.trouble

    @property
    def shortfall(self) -> str | None:
        return self._refusals.text

    async def start(self) -> None:
        if self._tasks:
            return
        self._tasks = [
            asyncio.create_task(self._keep_going(name, duty), name=f"bullmq {name}")
            for name, duty in self._duties().items()
        ]

    def _duties(self) -> dict[str, Duty]:
        duties: dict[str, Duty] = {
            "watch": self._server.watch,
            "events": self._events.run,
            "sweep": self._sweep.run,
        }
        for queue in dict.fromkeys((QUEUES[BULLMQ], *self._settings.queues)):
            duties[queue] = self._intake(queue)
        if self._settings.entry and self._runs is not None:
            self._entry = Entry(
                self._server,
                self._settings,
                self._runs,
                self._store,
                self._refusals,
                self._entropy,
                self._telemetry,
            )
            duties |= {"entry": self._entry.run, "progress": self._entry.watch_progress}
        return duties

    def _intake(self, queue: str) -> Duty:
        intake = QueueIntake(
            self._broker,
            self._names.physical(queue),
            PREFETCH,
            self._dispatcher.take,
            self._entropy,
            self._report_trouble,
        )

        async def take_in() -> None:
            try:
                await intake.run()
            finally:
                await intake.close()

        return take_in

    def _report_trouble(self, queue: str, what: str, error: Exception) -> None:
        self._telemetry.emit(LoopFailed(f"bridge {queue}", f"{what}: {describe(error)}"))

    async def _keep_going(self, name: str, duty: Duty) -> None:
        """Report a duty that fails, and take it up again: none may stop in silence."""
        backoff = Backoff(self._entropy)
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await duty()
            except Exception as error:  # noqa: BLE001
                self._refusals.note(f"the bridge's part '{name}'", error)
                self._telemetry.emit(LoopFailed(f"bridge bullmq {name}", describe(error)))
            if asyncio.get_running_loop().time() - began > 10:
                backoff.reset()
            await backoff.pause()

    async def stop(self) -> None:
        if self._entry is not None:
            await self._entry.close()
            self._entry = None
        await _end(self._tasks)
        self._tasks = []
        await self._server.close()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the tasks until they end: redis-py loses a cancellation now and then, while it takes a connection."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)
