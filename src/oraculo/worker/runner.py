"""`Worker`: an app on a broker, from the start to an orderly stop."""

import asyncio
import functools
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from oraculo.clients.subscription import QueueIntake
from oraculo.errors import InvalidInput, OraculoError
from oraculo.ports.broker import Broker
from oraculo.ports.clock import Clock, Entropy, SystemClock, SystemEntropy
from oraculo.ports.objects import Objects
from oraculo.settings import BrokerSettings, ObjectSettings, WorkerSettings
from oraculo.wire.naming import QueueNames
from oraculo.worker.answer_memory import RememberedAnswers
from oraculo.worker.answers import AnswerWriter, describe
from oraculo.worker.app import App
from oraculo.worker.dispatch import OVERDUE_PER_PLACE, Dispatcher
from oraculo.worker.handlers import Handler
from oraculo.worker.jobs import Lane
from oraculo.worker.large_results import LargeAnswers
from oraculo.worker.logs import TroubleLog, WorkerLog
from oraculo.worker.outbox import AnswerOutbox
from oraculo.worker.threads import DaemonThreads

RENEWALS = 3  # of a lease before it ends, because one or two may fail
CANCEL_GRACE = 5.0  # seconds for cancelled handlers to clean up
PUBLISH_GRACE = 5.0  # seconds for the confirms of the last answers

_log = WorkerLog()


class Worker:
    """A running app: one consumer for each queue, one limit on what runs at once, one outbox of answers.

    The worker starts the broker, which is idempotent, and does not close it. It retries a broker that it cannot reach,
    at the start or later. It renews the leases of what it holds, however long the work takes. A command that was
    delivered often begins by itself, because it may kill the process.

    Args:
        lease: The lease that the broker was made with.
        delivery_limit: The delivery limit that the broker was made with.
        objects: The object store that engine and workers share. The worker does not close it.
        threshold: The size in bytes above which a result goes to the object store.
    """

    def __init__(
        self,
        app: App,
        broker: Broker,
        settings: WorkerSettings | None = None,
        clock: Clock | None = None,
        prefix: str = "",
        *,
        entropy: Entropy | None = None,
        lease: float = BrokerSettings().lease,
        delivery_limit: int = BrokerSettings().delivery_limit,
        objects: Objects | None = None,
        threshold: int = ObjectSettings().threshold_bytes,
    ) -> None:
        self._app = app
        self._broker = broker
        self._settings = settings or WorkerSettings()
        self._clock = clock or SystemClock()
        self._entropy = entropy or SystemEntropy()
        self._names = QueueNames(prefix)
        self._lease_renewal = lease / RENEWALS
        self._delivery_limit = delivery_limit
        self._objects = objects
        self._threshold = threshold
        self._intakes: list[QueueIntake] = []
        self._duties: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._fault: BaseException | None = None
        self._started = False

    async def run(self) -> None:
        """Work until `stop` is called or the task is cancelled. Raises OraculoError when a part of it failed."""
        try:
            await self.start()
            await self._stopped.wait()
        finally:
            await self.stop()
        if self._fault is not None:
            reason = f"worker '{self._app.name}' stopped, for a part of it failed: {describe(self._fault)}"
            raise OraculoError(f"{reason}; its commands were given back") from self._fault

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin to take commands. Idempotent; a stopped worker does not start again."""
        if self._started or self._stopping is not None:
            return
        if not self._app.handlers:
            raise InvalidInput.at(
                "app", f"'{self._app.name}' has no handlers: decorate a function with its queue first"
            )
        self._started = True
        self._assemble()
        self._outbox_duty = self._begin(self._outbox.run(), "oraculo-outbox")
        self._duties = [self._begin(intake.run(), "oraculo-intake") for intake in self._intakes]
        self._lease_duty = self._begin(self._renew_leases(), "oraculo-leases")
        _log.info("worker started", app=self._app.name, queues=sorted(self._app.handlers))

    def _begin(self, duty: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(duty, name=name)
        task.add_done_callback(self._duty_ended)
        return task

    def _duty_ended(self, duty: asyncio.Task[None]) -> None:
        """Stop the worker when a part of it fails: it would take commands and never answer them."""
        if duty.cancelled() or (error := duty.exception()) is None:
            return
        self._fault = error
        _log.critical("a part of the worker failed; the worker stops", part=duty.get_name(), exc_info=error)
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="oraculo-stop")

    def _assemble(self) -> None:
        most_threads = self._settings.concurrency * (1 + OVERDUE_PER_PLACE)
        self._threads = DaemonThreads(most_threads, f"oraculo-{self._app.name}")
        writer = AnswerWriter(self._clock, self._names)
        remembered = RememberedAnswers(self._settings.remembered)
        lanes = [Lane(handler, self._limit_of(handler)) for handler in self._app.handlers.values()]
        self._outbox = AnswerOutbox(self._broker, writer, remembered, self._names, self._entropy)
        self._dispatcher = Dispatcher(
            lanes,
            limit=self._settings.concurrency,
            outbox=self._outbox,
            writer=writer,
            remembered=remembered,
            large=LargeAnswers(self._objects, self._threshold),
            threads=self._threads,
            clock=self._clock,
            entropy=self._entropy,
            delivery_limit=self._delivery_limit,
            tracebacks=self._settings.tracebacks,
        )
        self._intakes = [self._intake_of(lane) for lane in lanes]

    def _limit_of(self, handler: Handler) -> int:
        return min(handler.concurrency or self._settings.concurrency, self._settings.concurrency)

    def _intake_of(self, lane: Lane) -> QueueIntake:
        # More than may run, so that the next commands are here when the present ones end.
        prefetch = lane.limit * (1 + self._settings.ahead)
        receive = functools.partial(self._dispatcher.receive, lane)
        queue = self._names.physical(lane.queue)
        return QueueIntake(self._broker, queue, prefetch, receive, self._entropy, TroubleLog().of_queue)

    async def _renew_leases(self) -> None:
        """Renew the leases of everything that is held, waiting or in work."""
        while True:
            await asyncio.sleep(self._lease_renewal)
            for intake in self._intakes:
                await intake.extend()

    async def stop(self) -> None:
        """Stop in phases. Idempotent; each caller waits for the end.

        First no new commands are taken, then those in work have a grace, then the rest is cancelled, then answers are
        published. At last the consumers close, which gives back every command without an answer.

        A plain handler in its thread cannot be cancelled. It runs on, its answer is dropped, and its thread does not
        keep the process.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="oraculo-stop")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            if self._started:
                await self._stop_in_phases()
                _log.info("worker stopped", app=self._app.name)
        finally:
            self._stopped.set()

    async def _stop_in_phases(self) -> None:
        await _cancel(self._duties)
        await self._dispatcher.give_back_waiting()
        await self._dispatcher.wait(self._settings.stop_grace)
        await self._dispatcher.abort(CANCEL_GRACE)
        self._outbox.close()
        await asyncio.wait([self._outbox_duty], timeout=PUBLISH_GRACE)
        await _cancel([self._outbox_duty, self._lease_duty])
        await asyncio.gather(*(intake.close() for intake in self._intakes))
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
