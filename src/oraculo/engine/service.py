"""The engine as one service: it owns the loops, starts them in order and stops them in phases.

A stop first takes no new work. Then, within a grace, everything taken is decided and committed, and everything decided
is sent and delivered. At last consumers and connections are closed. Whatever is cut off is in the store, or still in
its queue, and goes on at the next start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from functools import partial
from math import inf

from oraculo.core.events import Event, RunDue, TaskDue, Untaken
from oraculo.engine.after_commit import AfterCommit
from oraculo.engine.cluster.broker_marks import BrokerMarks
from oraculo.engine.cluster.broker_watch import BrokerWatch
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.consumers import EngineConsumers
from oraculo.engine.decide.admission import Admission
from oraculo.engine.decide.cache import HotRuns, Plans
from oraculo.engine.decide.conclude import Conclusion
from oraculo.engine.decide.intake import Intake
from oraculo.engine.decide.pacing import Pace
from oraculo.engine.decide.requests import RunMaker
from oraculo.engine.decide.settle import Settling
from oraculo.engine.deliver.deliveries import Deliveries
from oraculo.engine.deliver.webhooks import HttpPost, Post
from oraculo.engine.health import Health, broker_health, fault_of, reading_trouble, unheard_queue
from oraculo.engine.inbox import Inbox
from oraculo.engine.pipelines import PipelineCatalogue, PipelineQueues
from oraculo.engine.queues.known import KnownQueues
from oraculo.engine.queues.last_looks import LastLooks
from oraculo.engine.queues.limits import NewQueueLimits
from oraculo.engine.queues.looks import QueueLooks
from oraculo.engine.queues.remembered import RememberedQueues
from oraculo.engine.queues.removal import NotedQueues
from oraculo.engine.queues.served import ServedQueues
from oraculo.engine.queues.unheard_answers import UnheardAnswers
from oraculo.engine.results.earlier import EarlierResults
from oraculo.engine.results.reader import ResultReader
from oraculo.engine.results.writer import ResultWriter
from oraculo.engine.retention.objects import ObjectRetention, claim, claim_fault
from oraculo.engine.retention.runs import RunRetention
from oraculo.engine.send.backlog import Backlog
from oraculo.engine.send.outbox import Outbox
from oraculo.engine.send.sweep import RefusedCommands, Sweep
from oraculo.engine.timers import Timers
from oraculo.engine.watchers import Lookout, Watchers
from oraculo.errors import BrokerUnavailable, StoreError, StoreUnavailable
from oraculo.pipeline.queue_rules import QueueRules
from oraculo.ports.bridge import ForeignQueues, RunningBridge
from oraculo.ports.broker_admin import FullBroker
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.objects import Objects
from oraculo.ports.store import Due, Storage
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.settings import Settings
from oraculo.wire.naming import QueueNames

_FIRST_PAUSE, _PAUSE_AFTER_FAILURE = 0.1, 1.0
_SILENCE = 1.0  # seconds after which a start counts as waiting for a silent store
_THREADS = 4
_LAST_NOTES = 2.0  # seconds at the end for notes of what was sent


class Role(Enum):
    """The part of an engine's work that a process does.

    A FRONT creates runs, sends their first commands and does what people ask. It leaves answers and timers to the
    engines that share its store and broker.
    """

    WHOLE = "whole"
    FRONT = "front"


class Engine:
    """The engine: start it, use it through `Operations`, stop it. A second start or stop does no harm.

    `must_be_alone`: nobody else may use its store, because its queues live inside this process. `earlier_objects`: the
    place of large results from before. `foreign_queues`: for explanations.
    """

    def __init__(
        self,
        settings: Settings,
        broker: FullBroker,
        store: Storage,
        *,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
        objects: Objects | None = None,
        earlier_objects: Objects | None = None,
        post: Post | None = None,
        name: str = "",
        role: Role = Role.WHOLE,
        bridges: Sequence[RunningBridge] = (),
        must_be_alone: bool = False,
    ) -> None:
        runs, engine = settings.runs, settings.engine
        self.settings = settings
        self.broker = broker
        self.store = store
        self.objects = objects
        self._earlier_objects = earlier_objects
        self.clock = clock
        self.telemetry = telemetry
        self.role = role
        self.bridges = bridges
        self.foreign_queues: Sequence[ForeignQueues] = ()  # for explanations
        self._must_be_alone = must_be_alone

        # What many parts share.
        self.names = QueueNames(settings.broker.prefix)
        self.peers = Peers(store, clock, telemetry, name or entropy.new_id(), engine.poll, self._decides)
        # The event loop's own threads may all wait for silent name servers.
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="oraculo-engine")
        # Pipelines have a thread of their own, because each large text takes seconds to read.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="oraculo-pipelines")
        self.plans = Plans()
        self.inbox = Inbox(engine.note_linger, (engine.prefetch + 1) // 2, crowded_at=engine.batch)
        self.watchers = Watchers()
        self._earlier = self._earlier_results()
        self.results = ResultReader(objects, self._earlier, self._claim_fault, settings, telemetry, self.threads)

        # What comes in.
        self.queue_rules = QueueRules(settings.queues.allow, settings.bridges_allow)
        self.catalogue = PipelineCatalogue(
            settings.routes,
            settings.pipelines,
            runs.retry,
            runs.timeout,
            self.threads,
            telemetry,
            self._reader,
            self.queue_rules,
            settings.limits,
        )
        fresh = settings.queues.remove_after / 2 or inf  # seconds, after which an unused queue may have been removed
        self.known_queues, admitted = KnownQueues(fresh), KnownQueues(fresh)
        planned = self.catalogue.destinations
        self.new_queues = NewQueueLimits(broker, self.known_queues, self.names, settings.queues, planned, admitted)
        self.made_queues = NotedQueues(
            broker,
            self.known_queues,
            planned,
            self.names,
            self.peers,
            clock,
            telemetry,
            settings.queues.remove_after,
        )
        self.pipeline_queues = PipelineQueues(broker, self.catalogue, self.names, telemetry, self.known_queues)
        own_queues = (self.names.answers, self.names.requests) if role is Role.WHOLE else ()
        self.own_queues = EngineConsumers(broker, self.inbox, own_queues, engine)
        self.maker = RunMaker(self.catalogue, self.plans, self.queue_rules, self.names, clock, entropy, settings)
        self.queue_looks = QueueLooks(broker, self.names, clock, self.threads, settings.bullmq.queues)
        self.remembered = RememberedQueues(broker, store)
        self.served_queues = ServedQueues(broker, self.remembered, self.names, self.queue_rules)
        self._last_looks = LastLooks(store, self.plans, clock, self.threads, self.queue_looks, self.served_queues)
        self._timers = Timers(store, self.inbox, clock, self.peers, engine.poll, self._due_event_maker)

        # What goes out.
        is_front = role is Role.FRONT
        self._backlog, refused = Backlog(store), RefusedCommands()
        self._outbox = Outbox(
            broker,
            store,
            self.inbox,
            self.results,
            self.names,
            clock,
            telemetry,
            self.made_queues,
            self._backlog,
            refused.note,
            others_answer=is_front,
        )
        self._sweep = Sweep(self._outbox, self._backlog, refused, store, self.inbox, self.peers, engine.poll)
        self._http = HttpPost(settings.webhook)
        post = post or self._http
        self._deliveries = Deliveries(
            self.made_queues, self.inbox, self.results, settings.webhook, post, self.names, clock, entropy, telemetry
        )

        # What decides, between the two.
        self._result_writer = ResultWriter(
            objects, self._claim_fault, settings.objects.threshold_bytes, telemetry, self.threads
        )
        self._after_commit = AfterCommit(
            self._outbox, self._timers, self._deliveries, self.watchers, self.results, telemetry
        )
        hot, pace = HotRuns(engine.cached_tasks, self._decides_alone), Pace(self._count_deciders, entropy)
        settling = Settling(self.names, telemetry)
        self._intake = Intake(
            store,
            self.inbox,
            self.maker,
            self.refresh_pipelines,
            self.plans,
            hot,
            self._result_writer,
            Conclusion(store, self.inbox, hot, self._after_commit, pace, clock, telemetry),
            settling,
            Admission(self.new_queues, self.inbox, settling),
            pace,
            names=self.names,
            clock=clock,
            entropy=entropy,
            telemetry=telemetry,
            batch=engine.batch,
            tracebacks=settings.worker.tracebacks,
        )

        # What looks around now and then.
        self._retention = RunRetention(store, clock, telemetry, settings.store.retention_days)
        self._lookout = Lookout(self.watchers, store, self.plans, self.results, self.is_sole, engine.poll)
        self._broker_watch = BrokerWatch(
            broker, store, self.inbox, self.peers, clock, telemetry, engine.poll, acts=role is Role.WHOLE
        )
        self._broker_marks = BrokerMarks(broker, self._broker_watch, self.names, telemetry, engine.poll)
        self.unheard_answers = UnheardAnswers(broker, self.names.answers)

        # What is there once it is started.
        self._connected = False
        self._pumps: list[asyncio.Task[None]] = []
        self._duties: list[asyncio.Task[None]] = []
        self._deciding: asyncio.Task[None] | None = None
        self.accepting = False
        self.not_started: str | None = "the start has not begun"  # why nothing can be asked yet
        self.awaits_store = asyncio.Event()  # set when the start waits for the store

    # -- start ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self.accepting:
            return
        self.not_started = f"waits for the store {self.store.name}"
        await self._open_store()
        self.not_started = "the store is open, the rest is starting"
        if self._earlier is not None:
            await self._earlier.look()
        self._connected = await self._connects()
        if self._connected and not self.broker.capabilities.durable:
            await self.store.forget_sent()
        if self.role is Role.WHOLE and await self._may_have_unsent():
            self._backlog.begin(self.clock.now())
        self._deciding = asyncio.create_task(self._decide(), name="intake")
        self._duties = [self._duty(name, work) for name, work in self._works().items()]
        if self._connected:
            await self.own_queues.subscribe()
        for queue in self.own_queues.names:
            self._pumps.append(self._duty(f"consume {queue}", partial(self.own_queues.pump, queue)))
        for bridge in self.bridges:
            await bridge.start()
        self.not_started = None
        self.accepting = True

    async def _may_have_unsent(self) -> bool:
        try:
            return bool(await self.store.unsent(1))
        except StoreError:  # the first sweep will show it
            return True

    def _works(self) -> dict[str, Callable[[], Awaitable[None]]]:
        of_all: dict[str, Callable[[], Awaitable[None]]] = {
            "brokers": self._watch_brokers,
            "outbox": self._outbox.run,
            "lookout": self._lookout.run,
            "pipelines": self._watch_pipelines,
        }
        if not self.broker.capabilities.lists_queues:
            of_all["remembered queues"] = self.remembered.run
        if self.role is Role.FRONT:
            return of_all | {"answers": self.unheard_answers.run}
        for duty, place in (("janitor", self.objects), ("janitor of earlier results", self._earlier_objects)):
            if place is not None:
                of_all[duty] = ObjectRetention(place, self.store, self.peers, self.clock).run
        if self.broker.capabilities.shared:
            of_all["broker marks"] = self._broker_marks.run
        return of_all | {
            "engines": self.peers.run,
            "sweep": self._sweep.run,
            "timers": self._ring_timers,
            "last looks": self._last_looks.run,
            "leases": self._renew_leases,
            "retention": self._retention.run,
            "unused queues": self.made_queues.run,
        }

    @property
    def sending_trouble(self) -> str | None:
        """The reason why no queue takes commands now."""
        return self._outbox.trouble

    @property
    def refusing_queues(self) -> Mapping[str, str]:
        """The queues that do not take commands now, and why."""
        return self._outbox.refusing

    def _untaken(self) -> Untaken:
        found: dict[str | None, str] = {self.names.logical(queue): why for queue, why in self.refusing_queues.items()}
        return found if self.sending_trouble is None else found | {None: self.sending_trouble}

    @property
    def unheard(self) -> str | None:
        """The reason why this engine hears no answers. An API beside engines awaits none."""
        answers = self.names.answers
        if answers not in self.own_queues.names:
            return None
        return unheard_queue(answers, self.broker.statuses(), self.own_queues.unread.get(answers))

    def _due_event_maker(self) -> Callable[[Due], Event]:
        known = self._untaken(), self._last_looks.looks(), self.unheard
        return lambda due: RunDue(*known) if due.task is None else TaskDue(due.task, *known)

    def _decides(self) -> bool:
        return self._intake.trouble is None

    async def standstill(self) -> str | None:
        """Return why nothing is decided now. A FRONT counts on the engines for timers and answers."""
        if self.role is Role.WHOLE or not self._decides():
            return self._intake.trouble
        return await fault_of(self._expect_engines)

    async def living_engines(self) -> Sequence[str]:
        return await self.peers.living()

    def is_sole(self) -> bool:
        """Return whether nobody else changes runs, as far as is known."""
        return self.role is Role.WHOLE and self.peers.is_alone

    def _decides_alone(self) -> bool:
        """Return whether no other process decides, not even an API that was started beside this engine."""
        return self.is_sole() and not self.peers.has_apis_beside

    def _count_deciders(self) -> int:
        return 1 if self._decides_alone() else max(2, len(self.peers.engines))

    async def _open_store(self) -> None:
        """Open the store, and wait for a server that is still starting. Log the wait."""
        loop = asyncio.get_running_loop()
        pause, deadline = _FIRST_PAUSE, loop.time() + self.settings.store.patience
        silent = loop.call_later(_SILENCE, self.awaits_store.set)
        while True:
            try:
                await self.store.start()
                await self.catalogue.load(self.store)
                if self.objects is not None:
                    await claim(self.objects, self.store, self.telemetry)
                if self.role is Role.WHOLE:
                    await self.peers.join(self.broker.name if self._must_be_alone else None)
                silent.cancel()
                return
            except StoreUnavailable as error:
                if loop.time() >= deadline:
                    raise
                self.telemetry.emit(LoopFailed("store", f"waits for it: {error}"))
                self.not_started = f"waits for the store {self.store.name}: {error}"
                self.awaits_store.set()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _PAUSE_AFTER_FAILURE)

    async def _claim_fault(self) -> str | None:
        return None if self.objects is None else await claim_fault(self.objects, self.store)

    def _earlier_results(self) -> EarlierResults | None:
        if self.objects is None or self._earlier_objects is None:
            return None
        return EarlierResults(self._earlier_objects, self.objects, self._claim_fault, self.threads)

    async def _connects(self) -> bool:
        """Return whether the broker could be reached.

        An absent broker stops no start: runs are accepted and wait, and readiness shows it. A refusal is a fault of
        settings, and is raised.
        """
        try:
            await self.broker.start()
            if self.broker.capabilities.shared:
                await self._broker_marks.begin()  # before waiting commands go out
            await self.pipeline_queues.declare_all()
        except BrokerUnavailable as error:
            self.telemetry.emit(LoopFailed("broker", str(error)))
            return False
        return True

    async def _watch_brokers(self) -> None:
        if not self._connected:
            while not await self._connects():  # noqa: ASYNC110 - the broker sets no event
                await asyncio.sleep(self.settings.engine.poll)
            self._connected = True
            if not self.broker.capabilities.durable:  # at a start `forget_sent` does this, but now work is under way
                self._broker_watch.memory_was_lost()
        await self._broker_watch.run()

    def _duty(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return asyncio.create_task(self._keep_going(name, work), name=name)

    async def _keep_going(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do a duty for ever. Log each failure and begin again, because none may stop in silence."""
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001
                self.telemetry.emit(LoopFailed(name, f"{type(error).__name__}: {error}"))
            await asyncio.sleep(_PAUSE_AFTER_FAILURE)

    async def _decide(self) -> None:
        """Run the intake until it is told to stop. Should a bug end it, log that and begin again."""
        while not self._intake.stopped:
            try:
                await self._intake.run()
            except Exception as error:  # noqa: BLE001
                self.telemetry.emit(LoopFailed("intake", f"{type(error).__name__}: {error}"))
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)

    async def _ring_timers(self) -> None:
        """Ring timers, those that are overdue at the start only after waiting answers were heard.

        The answers may have come in time while no engine ran.
        """
        if self._connected and await self.store.due(self.clock.now(), 1):
            await self.own_queues.heard_out(self.names.answers)
        await self._timers.run()

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.settings.engine_lease / 3)
            await self._intake.renew_leases()

    async def refresh_pipelines(self) -> None:
        """Read stored pipelines again, because another process may have put one just now."""
        await self.catalogue.refresh_stored(self.store)

    async def _watch_pipelines(self) -> None:
        while True:
            await asyncio.sleep(self.settings.engine.poll)
            await self.refresh_pipelines()
            await self.catalogue.refresh_folder()
            await self.pipeline_queues.declare_missing()

    # -- stop -------------------------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Begin a stop: take no new work, and let go of callers who wait.

        Work under way goes on.
        """
        self.accepting = False
        self.watchers.close()

    async def stop(self) -> None:
        self.quiesce()
        stops = (*(bridge.stop() for bridge in self.bridges), *(queues.stop() for queues in self.foreign_queues))
        for fault in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(fault, Exception):  # the rest must be stopped all the same
                self.telemetry.emit(LoopFailed("bridges", f"{type(fault).__name__}: {fault}"))
        await self._end_tasks(self._pumps)
        if self._deciding is not None:  # otherwise it never started, or has stopped
            await self._finish_in_grace()
        await self._after_commit.abandon()
        await self._deliveries.abandon()
        await self._end_tasks(self._duties)
        await self._outbox.abandon()
        await self._stop_deciding()
        await self.own_queues.close()
        await self._http.close()
        await self.broker.close()
        if self.role is Role.WHOLE:
            await self.peers.depart()
        await self.store.close()
        for place in (self.objects, self._earlier_objects):
            if place is not None:
                await place.close()
        self.threads.shutdown(wait=False)
        self._reader.shutdown(wait=False)

    async def _finish_in_grace(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.engine.stop_grace):
                await self._intake.drained()
                await self._outbox.flushed()
                await self._after_commit.handed_out()
                await self._deliveries.finished()

    async def _stop_deciding(self) -> None:
        """Commit the last notes, so that what was sent is not sent again at the next start."""
        if self._deciding is None:
            return
        self._intake.stop()
        with suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._deciding, min(_LAST_NOTES, self.settings.engine.stop_grace))
        self._deciding = None

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()

    # -- health -----------------------------------------------------------------------------------------------

    async def _expect_engines(self) -> None:
        if not await self.living_engines():
            raise StoreError(
                "no engine gives a sign of life: runs are accepted, and wait; start one, or see by its own "
                "/health/ready whether the store takes its writes"
            )

    async def health(self) -> Health:
        """Return the health of all parts, which are asked at once."""
        if self.not_started is not None:
            return Health({"engine": self.not_started}, is_ready=False)
        own = {"engine": self._intake.trouble if self.accepting else "not taking work: it is starting or stopping"}
        broker, store, behind = await asyncio.gather(
            broker_health(self.broker), fault_of(self.store.check), self._health_behind()
        )
        if self.role is Role.WHOLE:
            own["consumers"] = reading_trouble(self.own_queues)
        own[f"store {self.store.name}"] = store
        is_ready = broker.is_ready and not any(own.values())
        return Health(broker.parts | own | behind, is_ready)

    async def _health_behind(self) -> dict[str, str | None]:
        """Return the health of parts that an engine can do without."""
        objects, engines = await asyncio.gather(self._objects_trouble(), self._engines_trouble())
        # A broken bridge stops only its own steps.
        bridges = {f"ponte {bridge.name}": bridge.trouble or bridge.shortfall for bridge in self.bridges}
        clock = {"clock": self.peers.clock_fault} if self.peers.clock_fault else {}
        pipelines = {"pipelines": self.catalogue.folder_trouble} if self.catalogue.folder_trouble else {}
        return objects | bridges | engines | clock | pipelines

    async def _objects_trouble(self) -> dict[str, str | None]:
        if self.objects is not None:  # a failing one leaves large results in the store
            trouble = self._result_writer.trouble or (self._earlier and self._earlier.trouble)
            return {f"objects {self.objects.name}": trouble or await fault_of(self.objects.check)}
        return {} if self.results.trouble is None else {"objects": self.results.trouble}

    async def _engines_trouble(self) -> dict[str, str | None]:
        if self.role is Role.WHOLE:
            return {}
        return {"engines": await fault_of(self._expect_engines) or self.unheard_answers.trouble}
