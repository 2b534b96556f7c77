"""The batch pipeline: take what has arrived, read, load, decide, commit once, settle, hand on.

One batch is decided at a time. More arrives while its commit is on the way to the disk. So the slower the store, the
larger the batches, and throughput holds.

A run is changed in memory before the commit. When the commit fails, the changed copy is thrown away and the stored one
is loaded again: the store is the truth.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from oraculo.engine.decide.admission import Admission
from oraculo.engine.decide.batches import MOST_TASKS, Batch, Decision
from oraculo.engine.decide.conclude import Conclusion
from oraculo.engine.decide.decider import Decider
from oraculo.engine.decide.reader import BatchReader
from oraculo.engine.decide.settle import Settling
from oraculo.engine.inbox import Arrived, Inbox, Input, Note, Submission, arrived_with, is_withdrawn
from oraculo.errors import OraculoError, StoreRefuses, StoreUnavailable
from oraculo.ports.broker import Consumer, Delivery
from oraculo.ports.store import Committed, Creation, Storage
from oraculo.ports.telemetry import BatchCommitted, LoopFailed, Telemetry

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_FAILURES_BEFORE_LESS = 2  # of one batch, while the store works otherwise


class Intake:
    """The loop that decides everything, one batch of up to `limit` inputs after the other."""

    def __init__(
        self,
        store: Storage,
        inbox: Inbox,
        reader: BatchReader,
        decider: Decider,
        conclusion: Conclusion,
        settling: Settling,
        admission: Admission,
        telemetry: Telemetry,
        limit: int,
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._reader = reader
        self._decider = decider
        self._conclusion = conclusion
        self._settling = settling
        self._admission = admission
        self._telemetry = telemetry
        self._limit = limit
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
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._decider.hot.drop_idle()
        batch = self._reader.read(inputs, notes)
        batch.leave_out(self._inbox.resting(batch.by_run))
        await self._reader.read_again(batch)
        to_admit = self._admission.take_out(batch)
        wide = await self._decider.leave_wide(batch) if len(inputs) > 1 else ()
        await self._reader.put_aside(batch)
        submissions, created, conflicts, runs = batch.submissions, 0, 0, 0
        while submissions or batch.by_run:
            try:
                decisions = await self._decider.decide(batch)
                committed = await self._commit(submissions, decisions)
            except BaseException as error:
                # The copies in memory may hold what was decided and not committed.
                for run_id in batch.by_run:
                    self._decider.hot.drop(run_id)
                if not conflicts or not isinstance(error, Exception):
                    raise
                self._telemetry.emit(LoopFailed("intake", f"{type(error).__name__}: {error}"))
                # The rest is committed, and a second decision would count late answers twice.
                batch.give_up(list(batch.by_run))
                break
            created += await self._conclusion.conclude_creations(submissions, committed, batch)
            self._conclusion.conclude(decisions, committed.conflicts, batch)
            runs += len(decisions) - len(committed.conflicts)
            submissions = []
            batch.by_run = {run_id: batch.by_run[run_id] for run_id in batch.by_run if run_id in committed.conflicts}
            if conflicts:
                self._let_losers_rest(decisions, batch)
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
                inputs=len(inputs), runs=runs, created=created, conflicts=conflicts, seconds=loop.time() - started
            )
        )

    def _let_losers_rest(self, decisions: Iterable[Decision], batch: Batch) -> None:
        """Leave wide runs for a later batch that lost two races in a row."""
        for changes in (decision.changes for decision in decisions if decision.changes.run.id in batch.by_run):
            if seconds := self._decider.rest_of_loser(changes):
                self._inbox.rest(changes.run.id, seconds)
                batch.give_up([changes.run.id])

    async def _commit(self, submissions: Sequence[Submission], decisions: Sequence[Decision]) -> Committed:
        creations = [Creation(one.changes, one.fingerprint, one.idempotency_key) for one in submissions]
        changes = [decision.changes for decision in decisions if decision.changes.dirty]
        if not creations and not changes:
            return Committed((), frozenset())
        return await self._store.commit(creations, changes)


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
