"""The bridge as one service: it owns the duties, keeps them going while Redis is away, and stops them in order."""

import asyncio
import functools
from collections.abc import Awaitable, Callable

from oraculo.bridges.bullmq.bull_v4 import BullEvents, BullLayout
from oraculo.bridges.bullmq.entry import Entry
from oraculo.bridges.bullmq.events import EventReader
from oraculo.bridges.bullmq.handover import Handover
from oraculo.bridges.bullmq.layout import BullmqLayout, Layout
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.looking import look_at
from oraculo.bridges.bullmq.refusals import Refusals
from oraculo.bridges.bullmq.reports import Reporter
from oraculo.bridges.bullmq.runs import Runs
from oraculo.bridges.bullmq.server import BullmqRedis
from oraculo.bridges.bullmq.sweep import Sweep
from oraculo.bridges.ended_runs import EndedRuns
from oraculo.clients.subscription import Backoff, QueueIntake, Receive
from oraculo.pipeline.bridges import BULLMQ, QUEUES, Beyond, Bridge
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
    """`store` is only read: it tells how far a run is that a job of BullMQ started, and which runs ended while Redis
    was away. Raises InvalidSettings."""

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
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._names = names = QueueNames(prefix)
        self._entropy = entropy
        self._telemetry = telemetry
        self._server = BullmqRedis(settings.url, prefix)
        client = self._server.client
        make_layout, make_events = _dialect(settings, prefix, clock)
        self._layout = make_layout(client, settings.prefix, priority=settings.priority)
        ledger = Ledger(client, self._layout, settings.prefix, prefix, clock)
        reporter = Reporter(broker, ledger, AnswerWriter(clock, names), names.answers, entropy)
        self._sweep = Sweep(
            client,
            ledger,
            self._layout,
            reporter,
            bull_prefix=settings.prefix,
            keep=settings.keep,
            clock=clock,
        )
        self._events = make_events(self._server, ledger, reporter, settings.prefix)
        self._handover = Handover(
            self._server,
            ledger,
            self._sweep,
            reporter,
            EndedRuns(store, clock),
            names=names,
            clock=clock,
            entropy=entropy,
            telemetry=telemetry,
            heed=self._events.heed,
            allow=settings.allow,
        )
        self._runs = Runs(
            client,
            broker,
            store,
            names=names,
            keep=settings.keep,
            clock=clock,
            entropy=entropy,
            telemetry=telemetry,
        )
        self._entry: Entry | None = None
        self._refusals = Refusals()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def trouble(self) -> str | None:
        return self._server.trouble

    @property
    def shortfall(self) -> str | None:
        return self._refusals.told

    async def beyond(self, destination: Bridge) -> Beyond | None:
        return await look_at(self._server.client, self._settings.prefix, destination.target)

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
            duties[queue] = self._intake(self._names.physical(queue), self._handover.take)
        if self._settings.entry:
            self._entry = Entry(
                self._server, self._settings, self._runs, self._refusals, self._entropy, self._telemetry
            )
            duties["entry"] = self._entry.run
            duties["runs"] = self._runs.watch
            duties["aggregates"] = self._intake(self._runs.replies, self._runs.take)
        return duties

    def _intake(self, queue: str, receive: Receive) -> Duty:
        intake = QueueIntake(self._broker, queue, PREFETCH, receive, self._entropy, self._tell_trouble)

        async def take_in() -> None:
            try:
                await intake.run()
            finally:
                await intake.close()

        return take_in

    def _tell_trouble(self, queue: str, what: str, error: Exception) -> None:
        self._telemetry.emit(LoopFailed(f"bridge {queue}", f"{what}: {describe(error)}"))

    async def _keep_going(self, name: str, duty: Duty) -> None:
        """A duty that fails is told of and taken up again: none may stop in silence."""
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
        await self._layout.close()
        await self._server.close()


def _dialect(
    settings: BullmqSettings, prefix: str, clock: Clock
) -> tuple[Callable[..., Layout], Callable[[BullmqRedis, Ledger, Reporter, str], EventReader | BullEvents]]:
    """How jobs lie in Redis, and who hears of them: BullMQ's, or old Bull's."""
    if settings.legacy:
        return BullLayout, BullEvents
    return BullmqLayout, functools.partial(EventReader, prefix=prefix, clock=clock)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Asks again: redis-py loses a cancellation now and then, when it comes while a connection is being taken."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)
