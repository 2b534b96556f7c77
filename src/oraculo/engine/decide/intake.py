"""The batch pipeline: take what has arrived, decode, group by run, load, decide, commit once, settle, hand on.

One batch is decided at a time. More arrives while its commit is on the way to the disk. So the slower the store, the
larger the batches, and throughput holds.

A run is changed in memory before the commit. When the commit fails, the changed copy is thrown away and the stored one
is loaded again: the store is the truth.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TypeGuard

import msgspec

from oraculo.core import machine
from oraculo.core.answers import read_answer
from oraculo.core.events import Answered, RunDue
from oraculo.core.machine import Verdict
from oraculo.core.machine.answers import record_refused
from oraculo.core.run import Changes, Run, RunHead
from oraculo.engine.decide.admission import Admission
from oraculo.engine.decide.batches import MOST_TASKS, Batch, Decision, is_of_whole_run
from oraculo.engine.decide.cache import HotRuns, Plans
from oraculo.engine.decide.conclude import Conclusion
from oraculo.engine.decide.pacing import Pace
from oraculo.engine.decide.requests import RunMaker
from oraculo.engine.decide.settle import Settling
from oraculo.engine.inbox import (
    AnswerInput,
    Arrived,
    BadAnswer,
    Inbox,
    Input,
    Note,
    OfRun,
    Resend,
    Submission,
    WideInput,
    Wish,
    arrived_with,
    is_withdrawn,
)
from oraculo.engine.results.writer import ResultWriter
from oraculo.errors import (
    InvalidInput,
    InvalidJson,
    InvalidMessage,
    OraculoError,
    PayloadTooLarge,
    StoreRefuses,
    StoreUnavailable,
    UnknownPipeline,
)
from oraculo.ports.broker import Consumer, Delivery
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.store import Committed, Creation, Storage
from oraculo.ports.telemetry import BatchCommitted, LoopFailed, Telemetry
from oraculo.wire import naming
from oraculo.wire.json_guard import MAX_DEPTH
from oraculo.wire.message import HIGHEST_PRIORITY, Message, correlation_id_of, decode_message
from oraculo.wire.naming import QueueNames

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_FAILURES_BEFORE_LESS = 2  # of one batch, while the store works otherwise
_ABOUT_A_RUN = naming.ANSWER_EVENTS | {naming.PROGRESS}
_UNKNOWN = Verdict.UNKNOWN  # an enum's member takes long to look up


class Intake:
    """The loop that decides everything, one batch after the other."""

    def __init__(
        self,
        store: Storage,
        inbox: Inbox,
        maker: RunMaker,
        refresh_pipelines: Callable[[], Awaitable[None]],
        plans: Plans,
        hot: HotRuns,
        result_writer: ResultWriter,
        conclusion: Conclusion,
        settling: Settling,
        admission: Admission,
        pace: Pace,
        *,
        names: QueueNames,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
        batch: int,
        tracebacks: bool,
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._maker = maker
        self._refresh_pipelines = refresh_pipelines
        self._plans = plans
        self._hot = hot
        self._result_writer = result_writer
        self._conclusion = conclusion
        self._settling = settling
        self._admission = admission
        self._pace = pace
        self._names = names
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry
        self._limit = batch
        self._tracebacks = tracebacks
        self._idle = asyncio.Event()
        self._stopping = False
        self._at_work: Sequence[Input] = ()
        self.stopped = False
        self.trouble: str | None = None  # why nothing is decided now

    # -- the loop ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decide until `stop` is called and the inbox is empty."""
        while not (self._stopping and not len(self._inbox)):
            self._idle.set()
            inputs, notes = await self._inbox.take(self._limit)
            wide = self._inbox.take_wide(MOST_TASKS)
            self._idle.clear()
            for some_inputs, some_notes in ((inputs, notes), (wide, ())):  # small runs do not wait for wide ones
                if some_inputs or some_notes:
                    self._at_work = (*inputs, *wide) if some_inputs is inputs else wide
                    await self._process_surely(some_inputs, some_notes)
                    self._at_work = ()
                    await asyncio.sleep(0)  # a store that answers at once would leave the event loop to nobody else
        await self._settling.finished()
        self.stopped = True

    def stop(self) -> None:
        """Let `run` finish what is in the inbox, and return."""
        self._stopping = True
        self._admission.stop()
        self._inbox.end_all_rests()
        self._inbox.wake()

    async def renew_leases(self) -> None:
        """Renew the leases of messages that wait here, as while the store is away, so that none is delivered again."""
        held: dict[Consumer, list[Delivery]] = {}
        at_work = filter(None, map(arrived_with, self._at_work))
        for one in (*at_work, *self._inbox.arrived, *self._admission.arrived, *self._settling.arrived):
            held.setdefault(one.consumer, []).append(one.delivery)
        for consumer, deliveries in held.items():
            with suppress(OraculoError):  # its consumer is closed and has given everything back
                await consumer.extend(deliveries)

    async def drained(self) -> None:
        """Let no run rest from now on, and return when nothing waits or is being decided."""
        self._inbox.end_all_rests()
        while len(self._inbox) or not self._idle.is_set():
            await self._idle.wait()
            await asyncio.sleep(0)
        await self._settling.finished()

    async def _process_surely(self, inputs: Sequence[Input], notes: Sequence[Note]) -> None:
        """Decide a batch, however long that takes.

        A store that cannot be reached, or refuses everything, is waited for. An input that breaks the engine or the
        store is set apart.
        """
        pause, failures = _FIRST_PAUSE, 0
        while True:
            try:
                await self._process(inputs, notes)
                self.trouble = None
                return
            except StoreUnavailable as error:
                self.trouble = f"waits for the store: {error}"
                self._telemetry.emit(LoopFailed("intake", self.trouble))
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                self._inbox.forget_withdrawn()
                inputs = _still_wanted(inputs)
                if isinstance(error, StoreRefuses):
                    continue
                failures += 1
                if failures >= _FAILURES_BEFORE_LESS and await self._is_done_with_less(inputs, notes, failures, error):
                    return
            except Exception as error:  # noqa: BLE001 - the other inputs must go on
                self._telemetry.emit(LoopFailed("intake", f"{type(error).__name__}: {error}"))
                await self._set_apart(_still_wanted(inputs), notes, error)
                return

    async def _is_done_with_less(
        self, inputs: Sequence[Input], notes: Sequence[Note], failures: int, error: Exception
    ) -> bool:
        """Decide the batch in halves when the store works otherwise, and return whether it is done.

        A batch may be too much at once. One input that the store cannot write must not hold up all others for ever.
        """
        try:
            await self._store.check()
        except OraculoError:
            return False
        if len(inputs) + len(notes) <= 1:
            if failures < _FAILURES_BEFORE_LESS * 3:
                return False
            await self._set_apart(inputs, notes, error)
            self.trouble = None  # the store answers
            return True
        for some_inputs, some_notes in _parts(inputs, notes):
            await self._process_surely(some_inputs, some_notes)
        return True

    async def _set_apart(self, inputs: Sequence[Input], notes: Sequence[Note], error: Exception) -> None:
        """Decide each input alone, and give up the one that breaks the engine."""
        if len(inputs) + len(notes) > 1:
            for one in inputs:
                await self._process_surely([one], [])
            for note in notes:
                await self._process_surely([], [note])
        elif inputs:
            await self._give_back(inputs[0], error)
        elif notes:
            self._conclusion.give_up(notes[0])

    async def _give_back(self, one: Input, error: Exception) -> None:
        """Have the message of a broken input delivered again later, or raise the error at its caller."""
        if (arrived := arrived_with(one)) is not None:
            await self._settling.give_back(arrived, error)
        elif not isinstance(one, Arrived) and one.done is not None and not one.done.done():
            one.done.set_exception(error)

    # -- one batch --------------------------------------------------------------------------------------------

    async def _process(self, inputs: Sequence[Input], notes: Sequence[Note]) -> None:
        """Decide and commit one batch, and begin to settle it."""
        started = self._clock.now()
        self._hot.drop_idle()
        batch = self._read(inputs, notes)
        batch.leave_out(self._inbox.resting(batch.by_run))
        if batch.unknown:
            await self._refresh_pipelines()
            for arrived in batch.unknown:
                self._read_arrived(arrived, batch, is_last_try=True)
        to_admit = self._admission.take_out(batch)
        wide = await self._leave_wide(batch) if len(inputs) > 1 else ()
        if batch.large:
            await self._result_writer.keep(batch.large)
        submissions, created, conflicts, runs = batch.submissions, 0, 0, 0
        while submissions or batch.by_run:
            by_run = batch.by_run
            try:
                decisions = await self._decide(by_run, batch)
                committed = await self._commit(submissions, decisions)
            except BaseException as error:
                # The copies in memory may hold what was decided and not committed.
                for run_id in by_run:
                    self._hot.drop(run_id)
                if not conflicts or not isinstance(error, Exception):
                    raise
                self._telemetry.emit(LoopFailed("intake", f"{type(error).__name__}: {error}"))
                # The rest is committed, and a second decision would count late answers twice.
                batch.give_up(list(by_run))
                break
            created += await self._conclusion.conclude_creations(submissions, committed, batch)
            self._conclusion.conclude(decisions, committed.conflicts, batch)
            runs += len(decisions) - len(committed.conflicts)
            submissions = []
            batch.by_run = {run_id: items for run_id, items in by_run.items() if run_id in committed.conflicts}
            if conflicts:
                batch.give_up(self._lost_again(decisions, committed.conflicts))
            conflicts += len(committed.conflicts)
        self._admission.admit_soon(to_admit)
        self._inbox.set_aside(wide)
        for run_id, items in batch.resting.items():
            self._inbox.hold(run_id, items)
        for stray in batch.strays:
            self._telemetry.emit(stray)
        await self._settling.settle_soon(batch)
        self._telemetry.emit(
            BatchCommitted(
                inputs=len(inputs),
                runs=runs,
                created=created,
                conflicts=conflicts,
                seconds=self._clock.now() - started,
            )
        )

    async def _leave_wide(self, batch: Batch) -> Sequence[WideInput]:
        """Take out the widest inputs of a batch that has too many tasks for one commit, and return them."""
        wishes = [item for items in batch.by_run.values() for item in items if is_of_whole_run(item)]
        if len(batch.submissions) + len(wishes) <= 1:
            return ()
        heads = await self._heads({wish.run_id for wish in wishes})
        by_head: list[tuple[Submission | Wish, RunHead]] = [(one, one.changes.run.head) for one in batch.submissions]
        by_head += [(wish, heads[wish.run_id]) for wish in wishes if wish.run_id in heads]
        return batch.leave_wide([WideInput(one, head.total, _priority_of(one, head)) for one, head in by_head])

    async def _heads(self, run_ids: Collection[str]) -> dict[str, RunHead]:
        hot = {run_id: run.head for run_id in run_ids if (run := self._hot.get(run_id)) is not None}
        if cold := [run_id for run_id in run_ids if run_id not in hot]:
            return hot | await self._store.heads(cold)
        return hot

    def _lost_again(self, decisions: Iterable[Decision], conflicts: Collection[str]) -> list[str]:
        """Let wide runs rest that lost two races in a row, and return their ids.

        A third try would take long, and everything else would wait for it.
        """
        now, lost = self._clock.now(), [one.changes for one in decisions if one.changes.run.id in conflicts]
        rests = {one.run.id: rest for one in lost if (rest := self._pace.rest_of_one_who_lost(one, now))}
        for run_id, rest in rests.items():
            self._inbox.rest(run_id, rest)
        return list(rests)

    def _read(self, inputs: Sequence[Input], notes: Sequence[Note]) -> Batch:
        batch = Batch()
        for note in notes:  # notes come first, because a sending comes before its answer
            batch.of_run(note.run_id, note)
        for one in inputs:
            if is_withdrawn(one):
                continue
            if isinstance(one, Arrived):
                self._read_arrived(one, batch)
            elif isinstance(one, Submission):
                batch.submissions.append(one)
            else:
                batch.of_run(one.run_id, one)
        return batch

    def _read_arrived(self, arrived: Arrived, batch: Batch, *, is_last_try: bool = False) -> None:
        try:
            if arrived.delivery.queue == self._names.requests:  # a request has its own limit of depth
                batch.submissions.append(self._read_request(arrived))
            else:
                message = decode_message(arrived.delivery.body, MAX_DEPTH)
                _expect_event(message, _ABOUT_A_RUN)
                answer = AnswerInput(message, arrived)
                batch.of_run(message.correlation_id, answer)
                if len(arrived.delivery.body) > self._result_writer.threshold:
                    batch.large.append(answer)
        except UnknownPipeline as error:
            if is_last_try:
                batch.refused.append((arrived, str(error)))
            else:
                batch.unknown.append(arrived)
        except (InvalidJson, InvalidMessage) as error:
            self._refuse(arrived, str(error), batch)
        except (InvalidInput, PayloadTooLarge) as error:
            batch.refused.append((arrived, str(error)))

    def _refuse(self, arrived: Arrived, why: str, batch: Batch) -> None:
        """Refuse a broken message, through its run if it is an answer that names one.

        The run's history then shows the refusal, because the worker believes that it has answered.
        """
        is_answer = arrived.delivery.queue != self._names.requests
        if is_answer and (run_id := correlation_id_of(arrived.delivery.body)) is not None:
            batch.of_run(run_id, BadAnswer(arrived, why))
        else:
            batch.refused.append((arrived, why))

    def _read_request(self, arrived: Arrived) -> Submission:
        message = decode_message(arrived.delivery.body)
        _expect_event(message, {naming.START_RUN})
        submission = self._maker.submission_of(message)
        submission.arrived = arrived
        for delivery in submission.changes.run.head.deliveries:
            delivery.via = arrived.delivery.via
        return submission

    # -- decide -----------------------------------------------------------------------------------------------

    async def _decide(self, by_run: dict[str, list[OfRun]], batch: Batch) -> list[Decision]:
        decisions: list[Decision] = []
        doubtful: list[Decision] = []
        for run_id, items in by_run.items():
            if run := self._hot.get(run_id):
                decision = self._decide_run(run, items)
                (doubtful if decision.must_be_fresh else decisions).append(decision)
        if doubtful:
            decisions += await self._fresh(doubtful)
        decided = {decision.changes.run.id for decision in decisions}
        if cold := [run_id for run_id in by_run if run_id not in decided]:
            decisions += await self._decide_cold(cold, by_run, batch)
        return decisions

    async def _fresh(self, doubtful: Sequence[Decision]) -> list[Decision]:
        """Return the decisions whose runs the store still has in the version that they were made on."""
        unchanged = await self._store.unchanged([decision.changes.run.head for decision in doubtful])
        for decision in doubtful:
            if decision.changes.run.id not in unchanged:
                self._hot.drop(decision.changes.run.id)
        return [decision for decision in doubtful if decision.changes.run.id in unchanged]

    async def _decide_cold(self, run_ids: list[str], by_run: dict[str, list[OfRun]], batch: Batch) -> list[Decision]:
        decisions: list[Decision] = []
        loop = asyncio.get_running_loop()
        began = loop.time()
        snapshots = await self._store.load(run_ids)
        if len(run_ids) == 1:
            self._pace.has_read(sum(len(one.tasks) for one in snapshots.values()), loop.time() - began)
        for run_id in run_ids:
            snapshot = snapshots.get(run_id)
            if snapshot is None:
                self._conclusion.conclude_without_run(run_id, by_run[run_id], batch)
                continue
            run = self._plans.restore(snapshot)
            self._hot.keep(run)
            decisions.append(self._decide_run(run, by_run[run_id]))
        return decisions

    def _decide_run(self, run: Run, items: Iterable[OfRun]) -> Decision:
        now = self._clock.now()
        decision = Decision(Changes(run), run.is_open)
        for item in items:
            verdict, why = self._apply(run, item, now, decision.changes)
            if verdict is _UNKNOWN and _is_recorded(item):
                record_refused(run, item.task_id, why, now, decision.changes)
            decision.verdicts.append((item, verdict, why))
        return decision

    def _apply(self, run: Run, item: OfRun, now: float, changes: Changes) -> tuple[Verdict, str]:
        if isinstance(item, Note):  # checked first, because notes are the most frequent
            return machine.apply(run, item.event, now, changes), ""
        if isinstance(item, AnswerInput):
            return self._apply_answer(run, item, now, changes)
        if isinstance(item, BadAnswer):
            return _UNKNOWN, item.why
        if isinstance(item, Resend):
            return _resend(run, item, changes), ""
        return machine.apply(run, item.event, now, changes), ""

    def _apply_answer(self, run: Run, item: AnswerInput, now: float, changes: Changes) -> tuple[Verdict, str]:
        event = read_answer(
            run,
            item.message,
            self._entropy.jitter(),
            now=now,
            prefix=self._names.prefix,
            redelivered=item.arrived.delivery.redeliveries > 0,
            tracebacks=self._tracebacks,
        )
        if isinstance(event, str):
            return _UNKNOWN, event
        if item.reference is not None and isinstance(event, Answered):
            event = msgspec.structs.replace(event, payload=item.reference)
        verdict = machine.apply(run, event, now, changes)
        return verdict, "its task was not sent yet, so no answer is awaited" if verdict is _UNKNOWN else ""

    async def _commit(self, submissions: Sequence[Submission], decisions: Sequence[Decision]) -> Committed:
        creations = [Creation(one.changes, one.fingerprint, one.idempotency_key) for one in submissions]
        changes = [decision.changes for decision in decisions if decision.changes.dirty]
        if not creations and not changes:
            return Committed((), frozenset())
        return await self._store.commit(creations, changes)


def _priority_of(one: Submission | Wish, head: RunHead) -> int:
    """Return the priority of a wide input: a run whose deadline passed comes before any stream of others."""
    is_due = isinstance(one, Wish) and isinstance(one.event, RunDue)
    return HIGHEST_PRIORITY + 1 if is_due else head.priority


def _is_recorded(item: OfRun) -> TypeGuard[AnswerInput | BadAnswer]:
    """Return whether a refused answer goes into the run's history.

    Only its first delivery does: an answer that cannot become a dead letter comes again and again.
    """
    if not isinstance(item, AnswerInput | BadAnswer) or item.arrived.delivery.redeliveries:
        return False
    return not isinstance(item, AnswerInput) or item.message.tipo_evento != naming.PROGRESS


def _expect_event(message: Message, known: Iterable[str]) -> None:
    if message.tipo_evento not in known:
        right = ", ".join(sorted(known))
        raise InvalidMessage.at(
            "tipo_evento", f"must be one of {right} on this queue; got {naming.shown(message.tipo_evento)}"
        )


def _parts(inputs: Sequence[Input], notes: Sequence[Note]) -> Iterable[tuple[Sequence[Input], Sequence[Note]]]:
    """Return two parts of a batch, notes first, because a sending comes before its answer."""
    if inputs and notes:
        return ([], notes), (inputs, [])
    middle = (len(inputs) + len(notes)) // 2
    return [(inputs[half], notes[half]) for half in (slice(middle), slice(middle, None))]


def _still_wanted(inputs: Iterable[Input]) -> list[Input]:
    """Return the inputs whose callers still wait.

    A submission counts as uncertain from now on, because the failed commit may have been written.
    """
    wanted = [one for one in inputs if not is_withdrawn(one)]
    for one in wanted:
        if isinstance(one, Submission):
            one.uncertain = True
    return wanted


def _resend(run: Run, item: Resend, changes: Changes) -> Verdict:
    task = run.tasks[item.task]
    if not task.unsent or task.attempt != item.attempt:
        return Verdict.NOTHING
    if task.is_open:
        changes.commands.append((item.task, item.attempt))
    else:
        changes.dead_letters.append((item.task, item.attempt))
    return Verdict.APPLIED
