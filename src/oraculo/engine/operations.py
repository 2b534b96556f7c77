"""The operations that the API and the command line may ask of the engine."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from oraculo.core.events import Cancelled, Event, Repeated
from oraculo.core.history import HistoryEntry
from oraculo.core.machine import Verdict
from oraculo.core.plan import Plan
from oraculo.core.run import Run, RunHead, RunStatus, Task
from oraculo.engine.dead_letters import DeadLetters, Redrive
from oraculo.engine.decide.cache import Plans
from oraculo.engine.decide.requests import RunMaker, fingerprint_of
from oraculo.engine.explanation import Explanation
from oraculo.engine.health import EngineHealth, Health, Lifecycle
from oraculo.engine.inbox import Inbox, Submission, Wish, patiently
from oraculo.engine.pipeline_folder import BadFile
from oraculo.engine.pipelines import Origin, PipelineCatalogue
from oraculo.engine.ports import Ports
from oraculo.engine.queues.parts import QueueParts
from oraculo.engine.results.get import ResultReader
from oraculo.engine.watchers import Watch, Watchers
from oraculo.errors import (
    BrokerError,
    Conflict,
    Fault,
    IdempotencyKeyReused,
    InvalidInput,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StoreUnavailable,
    TooManyNewQueues,
    UnknownPipeline,
    WrittenByNewer,
)
from oraculo.pipeline.advice import mistyped_types, unserved_queues
from oraculo.pipeline.definition import Definition, text_fault
from oraculo.ports.broker import BrokerStatus
from oraculo.ports.broker_admin import DeadLetter, QueueState
from oraculo.ports.browse import Page, RunQuery
from oraculo.ports.store import Created, CreationOutcome
from oraculo.ports.threads import handed_over, handed_over_if_wide
from oraculo.wire import naming

MAX_KEY = 255
MAX_OUTSTANDING = 20_000
MAX_OUTSTANDING_BYTES = 256 * 1024 * 1024
LARGE_REQUEST = 64 * 1024
_HISTORY_PAGE = 500
_WARNINGS_PATIENCE = 2.0  # seconds for the broker to count consumers; without its answer fewer warnings are given
_MOST_QUEUES_COUNTED = 100


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submitted run. The aggregate is there when the caller waited and the run ended in time."""

    run_id: str
    status: RunStatus
    aggregate: bytes | None = None  # when the caller waited and the run ended in time


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of an engine that know about runs."""

    inbox: Inbox
    plans: Plans
    watchers: Watchers
    results: ResultReader
    maker: RunMaker
    threads: Executor


class Operations:
    """The operations of users and operators on one engine."""

    def __init__(
        self,
        ports: Ports,
        lifecycle: Lifecycle,
        health: EngineHealth,
        runs: RunParts,
        queues: QueueParts,
        catalogue: PipelineCatalogue,
        dead_letters: DeadLetters,
        explanation: Explanation,
    ) -> None:
        self._store = ports.store
        self._broker = ports.broker
        self._clock = ports.clock
        self._lifecycle = lifecycle
        self._health = health
        self._runs = runs
        self._queues = queues
        self._catalogue = catalogue
        self._dead_letters = dead_letters
        self._explanation = explanation
        self._waiting = 0
        self._waiting_bytes = 0

    # -- runs -------------------------------------------------------------------------------------------------

    async def submit(
        self,
        body: bytes,
        *,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        wait: float = 0,
    ) -> Submitted:
        """Create a run, and return when it is committed.

        With `wait`, return up to that many seconds later with the aggregate. Raise InvalidInput, PayloadTooLarge,
        TooManyNewQueues, Conflict or IdempotencyKeyReused.
        """
        if idempotency_key is not None and (fault := text_fault(idempotency_key, MAX_KEY)):
            raise InvalidRequest(Fault("Idempotency-Key", fault))
        try:
            submission = await self._submission(body, traceparent)
            await self._queues.limits.admit_run(submission)
        except (InvalidInput, PayloadTooLarge, TooManyNewQueues, WrittenByNewer):
            if (run_id := await self._created_before(body, idempotency_key)) is None:
                raise
            return await self._submitted_before(run_id, wait)
        submission.idempotency_key = idempotency_key
        with self._runs.watchers.watching(submission.changes.run.id) as watch:
            created = await self._create(submission)
            del body, submission  # they are in the store, and many callers may wait
            if created.outcome is CreationOutcome.CREATED:
                return await self._outcome(watch, wait)
        return await self._submitted_before(created.run_id, wait)

    async def _created_before(self, body: bytes, key: str | None) -> str | None:
        """Return the run that was accepted under a key.

        It stays accepted even when its pipeline is gone or a limit is smaller now.
        """
        if key is None:
            return None
        self._lifecycle.expect_accepting()
        return await self._store.created_with(key, fingerprint_of(body))

    async def _submission(self, body: bytes, traceparent: str | None) -> Submission:
        try:
            return await self._make_submission(body, traceparent)
        except (UnknownPipeline, WrittenByNewer):
            await self._catalogue.refresh_stored(self._store)
            return await self._make_submission(body, traceparent)

    async def _make_submission(self, body: bytes, traceparent: str | None) -> Submission:
        """Make a submission, in a thread when thousands of destinations may take a while."""
        make = partial(self._runs.maker.submission, body, traceparent=traceparent)
        if len(body) <= LARGE_REQUEST:
            return make()
        self._lifecycle.expect_accepting()
        return await handed_over(self._runs.threads, make)

    async def _create(self, submission: Submission) -> Created:
        self._lifecycle.expect_accepting()
        submission.done = asyncio.get_running_loop().create_future()
        self._count(submission, submission.done)
        self._runs.inbox.put([submission])
        created = await patiently(submission.done, has_key=submission.idempotency_key is not None)
        if created.outcome is CreationOutcome.CREATED:
            return created
        if created.outcome is CreationOutcome.KEY_REUSED:
            raise IdempotencyKeyReused(
                f"this Idempotency-Key was used for run {created.run_id} with another body; use a new key"
            )
        if created.outcome is not CreationOutcome.SAME or not await self._is_repetition(submission, created.run_id):
            raise Conflict(f"the correlation_id {naming.shown(created.run_id)} is in use; choose another, or none")
        return created

    async def _is_repetition(self, submission: Submission, run_id: str) -> bool:
        """Return whether this repeats the request that made the run.

        Another request may have the same id and body. Its key is recorded nowhere, and would not be known again.
        """
        key = submission.idempotency_key
        if key is None:
            return False
        was_found_by_key = run_id != submission.changes.run.id
        return was_found_by_key or await self._store.created_with(key, submission.fingerprint) == run_id

    def _count(self, submission: Submission, done: "asyncio.Future[Created]") -> None:
        """Limit what waits to be committed while the store is slow or away, even when nobody waits for it any more."""
        run = submission.changes.run
        size = len(run.definition) + len(run.payload)
        if self._waiting >= MAX_OUTSTANDING or self._waiting_bytes + size > MAX_OUTSTANDING_BYTES:
            raise StoreUnavailable("too many requests wait to be committed; try again in a moment")
        self._waiting += 1
        self._waiting_bytes += size
        done.add_done_callback(partial(self._count_no_more, size))

    def _count_no_more(self, size: int, _: object) -> None:
        self._waiting -= 1
        self._waiting_bytes -= size

    async def _outcome(self, watch: Watch, wait: float) -> Submitted:
        return Submitted(watch.run_id, RunStatus.RUNNING, await watch.aggregate(wait) if wait > 0 else None)

    async def _submitted_before(self, run_id: str, wait: float) -> Submitted:
        aggregate = await self.wait(run_id, wait) if wait > 0 else None
        run = await self.run(run_id)
        return Submitted(run_id, run.head.status, aggregate)

    async def wait(self, run_id: str, seconds: float) -> bytes | None:
        """Return the aggregate if the run has ended, or ends within so many seconds."""
        with self._runs.watchers.watching(run_id) as watch:
            run = await self.run(run_id)
            if not run.is_open:
                return await self._runs.results.aggregate(run)
            return await watch.aggregate(max(0.0, seconds))

    async def run(self, run_id: str) -> Run:
        """Return a run as it was last committed. Raise NotFound."""
        snapshot = (await self._store.load([run_id])).get(run_id)
        if snapshot is None:
            raise _no_such_run(run_id)
        restore = partial(self._runs.plans.restore, snapshot)
        return await handed_over_if_wide(self._runs.threads, len(snapshot.tasks), restore)

    async def head(self, run_id: str) -> RunHead:
        """Return a run without its tasks and results. Raise NotFound."""
        if (head := (await self._store.heads([run_id])).get(run_id)) is None:
            raise _no_such_run(run_id)
        return head

    async def plan(self, run_id: str) -> Plan:
        """Return the plan of a run, which is read as a whole only when the plan is not in memory. Raise NotFound."""
        plan = self._runs.plans.known((await self.head(run_id)).definition_hash)
        return plan or (await self.run(run_id)).plan

    async def view(self, run: Run) -> dict[str, Any]:
        """Return a run as the API shows it, with large results as an aggregate brings them."""
        return await self._runs.results.view(run, await self._queues.looks.at_queues_of(run))

    async def result(self, run_id: str, task_id: str) -> bytes:
        """Return one task's result as it came, of any size. Raise NotFound or ObjectsUnavailable."""
        return await self._runs.results.one(run_id, task_id, await self._task(run_id, task_id))

    async def _task(self, run_id: str, task_id: str) -> Task | None:
        """Return a task, or None when the run has none of that name.

        A caller may ask for the results of a wide run one by one. So the whole run is read only when the number of the
        task is not known.
        """
        number = (await self.plan(run_id)).by_id.get(task_id)
        return None if number is None else await self._store.task(run_id, number)

    async def runs(self, query: RunQuery) -> Page:
        return await self._store.runs(query)

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        return await self._store.history(run_id, after=after, limit=limit)

    async def follow(self, run_id: str, after: int = 0) -> AsyncGenerator[HistoryEntry, None]:
        """Yield a run's history behind `after`, and its additions until the run ends or the engine stops."""
        with self._runs.watchers.watching(run_id) as watch:
            while True:
                watch.changed.clear()
                head = (await self._store.heads([run_id])).get(run_id)
                ended = head is None or head.status is not RunStatus.RUNNING
                while entries := await self.history(run_id, after=after, limit=_HISTORY_PAGE):
                    for entry in entries:
                        yield entry
                    after = entries[-1].seq
                if ended or self._runs.watchers.closed:
                    return
                await watch.changed.wait()

    async def explain(self, run_id: str) -> str:
        return await self.explained(await self.run(run_id))

    async def explained(self, run: Run) -> str:
        return await self._explanation.of(run)

    async def cancel(self, run_id: str) -> Run:
        if await self._wish(run_id, Cancelled()) is Verdict.REFUSED:
            status = (await self.run(run_id)).head.status
            raise Conflict(f"run {run_id} has ended as {status}; only a run in em_execucao can be cancelled")
        return await self.run(run_id)

    async def repeat(self, run_id: str) -> Run:
        """Run again only what failed. Raise Conflict while the run is open, or when nothing failed."""
        if await self._wish(run_id, Repeated()) is Verdict.REFUSED:
            run = await self.run(run_id)
            raise Conflict(f"run {run_id} {_why_not_repeated(run)}")
        return await self.run(run_id)

    async def _wish(self, run_id: str, event: Event) -> Verdict:
        self._lifecycle.expect_accepting()
        wish = Wish(run_id, event, asyncio.get_running_loop().create_future())
        self._runs.inbox.put([wish])
        verdict = await patiently(wish.done)
        if verdict is None:
            raise _no_such_run(run_id)
        return verdict

    # -- pipelines --------------------------------------------------------------------------------------------

    def pipelines(self) -> list[tuple[Definition, Origin]]:
        return [(found, self._catalogue.origin(name)) for name, found in sorted(self._catalogue.pipelines.items())]

    def pipeline(self, name: str) -> tuple[Definition, Origin]:
        return self._catalogue.get(name), self._catalogue.origin(name)

    def bad_pipeline_files(self) -> Sequence[BadFile]:
        return self._catalogue.bad_files

    async def pipeline_warnings(self, definition: Definition) -> list[Fault]:
        """Return what the author may not mean: near misses of job types, and queues that nobody serves now."""
        consumers = await self._consumers({step.queue for step in definition.steps if step.bridge is None})
        known = self._catalogue.destinations()
        return mistyped_types(definition) + unserved_queues(definition, consumers, known)

    async def _consumers(self, queues: set[str]) -> dict[str, int | None]:
        """Count the consumers of each queue, as far as the broker answers in time."""
        names, broker = self._queues.names, self._broker
        try:
            async with asyncio.timeout(_WARNINGS_PATIENCE):
                states = await broker.queues(list(map(names.physical, sorted(queues)[:_MOST_QUEUES_COUNTED])))
        except (BrokerError, TimeoutError):
            return {}
        return {names.logical(state.queue): state.consumers for state in states}

    async def read_pipeline(self, name: str, text: bytes) -> Definition:
        """Return what a text defines, and keep nothing. Raise InvalidPipeline."""
        return await self._catalogue.read(name, text)

    async def put_pipeline(self, name: str, text: bytes) -> tuple[Definition, bool]:
        self._lifecycle.expect_accepting()
        definition, is_new = await self._catalogue.put(name, text, self._store, self._clock, self._admit_steps)
        # The pipeline is stored. Missing queues are declared when the broker is back; each run reports a refused one.
        with suppress(BrokerError):
            await self._queues.of_pipelines.declare({step.queue for step in definition.steps})
        return definition, is_new

    async def _admit_steps(self, definition: Definition) -> None:
        await self._queues.limits.admit({step.queue for step in definition.steps}, "steps")

    async def delete_pipeline(self, name: str) -> None:
        await self._catalogue.delete(name, self._store)

    # -- queues -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[QueueState]:
        """Return the queues by their physical names (see `queue_name`).

        Queues of another prefix, and the marks that engines leave on brokers, are not shown.
        """
        names, states = self._queues.names, await self._broker.queues()
        states = [*states, *await self._queues.remembered.unlisted(states, names)]
        may_show = self._queues.rules.call_fault
        ours = [state for state in states if state.queue.startswith(names.prefix)]
        return [state for state in ours if may_show(names.logical(state.queue)) is None]

    def own_queues(self) -> set[str]:
        """Return the names, without the prefix, of queues that engines, known pipelines and routes use."""
        return {naming.REQUESTS, naming.ANSWERS} | self._catalogue.destinations()

    def queue_name(self, state: QueueState | DeadLetter) -> str:
        return self._queues.names.logical(state.queue)

    async def dead_letters(self, queue: str, *, limit: int = 100, after: str | None = None) -> Sequence[DeadLetter]:
        self._expect_allowed(queue)
        return await self._dead_letters.letters(queue, limit, after)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> Redrive:
        self._lifecycle.expect_accepting()
        self._expect_allowed(queue)
        return await self._dead_letters.redrive(queue, ids)

    async def discard(self, queue: str, letter_id: str) -> None:
        self._lifecycle.expect_accepting()
        self._expect_allowed(queue)
        await self._dead_letters.discard(queue, letter_id)

    def _expect_allowed(self, queue: str) -> None:
        """Raise InvalidRequest for a queue that no call may look at."""
        if fault := self._queues.rules.call_fault(queue):
            raise InvalidRequest(Fault("fila", fault))

    # -- health -----------------------------------------------------------------------------------------------

    async def health(self) -> Health:
        return await self._health.look()

    def brokers(self) -> Sequence[BrokerStatus]:
        """Return the brokers, with the names of queues as callers know them."""
        logical = self._queues.names.logical
        statuses = self._broker.statuses()
        return [msgspec.structs.replace(status, deaf=tuple(map(logical, status.deaf))) for status in statuses]

    async def census(self) -> dict[RunStatus, int]:
        return await self._store.census()

    async def engines(self) -> Sequence[str]:
        """Return the living engines that share the store."""
        return await self._health.engines()

    async def expect_started(self) -> None:
        """Raise StoreUnavailable until the start has ended, because nothing can be read before."""
        self._lifecycle.expect_started()


def _no_such_run(run_id: str) -> NotFound:
    hint = "; is the slash at its end one too many?" if run_id.endswith("/") else ""
    return NotFound(f"there is no run with the correlation_id {naming.shown(run_id)}{hint}")


def _why_not_repeated(run: Run) -> str:
    if run.is_open:
        return "is still em_execucao; only an ended run with failures can be repeated"
    if run.head.succeeded < run.head.total:
        return f"has met its quorum of {run.plan.needed}; a task that failed can be redriven from its dead-letter queue"
    return "has nothing to repeat; only an ended run with failures can be repeated"
