"""Decides the inputs of each run: loads it, from memory or the store, and applies them in order."""

from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import TypeGuard

import msgspec

from oraculo.core import machine
from oraculo.core.answers import read_answer
from oraculo.core.events import Answered, RunDue
from oraculo.core.machine import Verdict
from oraculo.core.machine.answers import record_refused
from oraculo.core.run import Changes, Run, RunHead
from oraculo.engine.decide.batches import Batch, Decision, is_of_whole_run
from oraculo.engine.decide.cache import HotRuns, Plans
from oraculo.engine.inbox import AnswerInput, BadAnswer, Note, OfRun, Resend, Submission, WideInput, Wish
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.store import Store
from oraculo.wire import naming
from oraculo.wire.message import HIGHEST_PRIORITY

WIDE = 500  # tasks; a narrower run is read in a few milliseconds
REST_A_TASK = 1e-4  # seconds: some five times what a task takes to read and decide
_LONGEST_REST = 5.0
_UNKNOWN = Verdict.UNKNOWN  # an enum's member takes long to look up


class Decider:
    """The decisions on runs. `prefix` is that of the queues' names, `tracebacks` whether those of failures are kept."""

    def __init__(
        self,
        store: Store,
        hot: HotRuns,
        plans: Plans,
        clock: Clock,
        entropy: Entropy,
        *,
        prefix: str,
        tracebacks: bool,
    ) -> None:
        self._store = store
        self.hot = hot
        self._plans = plans
        self._clock = clock
        self._entropy = entropy
        self._prefix = prefix
        self._tracebacks = tracebacks

    # -- a batch ----------------------------------------------------------------------------------------------

    async def decide(self, batch: Batch) -> list[Decision]:
        """Decide what came for each run. Runs that do not exist are left out."""
        decisions: list[Decision] = []
        doubtful: list[Decision] = []
        for run_id, items in batch.by_run.items():
            if run := self.hot.get(run_id):
                decision = self._decide_run(run, items)
                (doubtful if decision.must_be_fresh else decisions).append(decision)
        if doubtful:
            decisions += await self._fresh(doubtful)
        decided = {decision.changes.run.id for decision in decisions}
        if cold := [run_id for run_id in batch.by_run if run_id not in decided]:
            snapshots = await self._store.load(cold)
            for run_id in cold:
                if (snapshot := snapshots.get(run_id)) is not None:
                    run = self._plans.restore(snapshot)
                    self.hot.keep(run)
                    decisions.append(self._decide_run(run, batch.by_run[run_id]))
        return decisions

    async def _fresh(self, doubtful: Sequence[Decision]) -> list[Decision]:
        """Return the decisions whose runs the store still has in the version that they were made on."""
        unchanged = await self._store.unchanged([decision.changes.run.head for decision in doubtful])
        for decision in doubtful:
            if decision.changes.run.id not in unchanged:
                self.hot.drop(decision.changes.run.id)
        return [decision for decision in doubtful if decision.changes.run.id in unchanged]

    async def leave_wide(self, batch: Batch) -> Sequence[WideInput]:
        """Take out the widest inputs of a batch that has too many tasks for one commit, and return them."""
        wishes = [item for items in batch.by_run.values() for item in items if is_of_whole_run(item)]
        if len(batch.submissions) + len(wishes) <= 1:
            return ()
        heads = await self._heads({wish.run_id for wish in wishes})
        by_head: list[tuple[Submission | Wish, RunHead]] = [(one, one.changes.run.head) for one in batch.submissions]
        by_head += [(wish, heads[wish.run_id]) for wish in wishes if wish.run_id in heads]
        return batch.leave_wide([WideInput(one, head.total, _priority_of(one, head)) for one, head in by_head])

    async def _heads(self, run_ids: Collection[str]) -> dict[str, RunHead]:
        hot = {run_id: run.head for run_id in run_ids if (run := self.hot.get(run_id)) is not None}
        if cold := [run_id for run_id in run_ids if run_id not in hot]:
            return hot | await self._store.heads(cold)
        return hot

    def rest_of_loser(self, changes: Changes) -> float:
        """Return the seconds that a run should rest here whose commit lost two races in a row.

        A third try at a wide run would take long, and everything else would wait for it. The rest is random, because
        other engines try as often as this one. No run rests near a deadline, because an answer that waits came in time.
        """
        run = changes.run
        if len(run.tasks) < WIDE:
            return 0.0
        seconds = min(len(run.tasks) * REST_A_TASK, _LONGEST_REST) * (0.5 + self._entropy.jitter())
        # Also of tasks whose answers have to be decided again.
        open_or_changed = (each for each in run.tasks if each.is_open or each.number in changes.tasks)
        deadline = min((each.deadline for each in open_or_changed if each.deadline), default=inf)
        return seconds if min(run.head.due_at or inf, deadline) - self._clock.now() >= 2 * seconds else 0.0

    # -- a run ------------------------------------------------------------------------------------------------

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
            prefix=self._prefix,
            redelivered=item.arrived.delivery.redeliveries > 0,
            tracebacks=self._tracebacks,
        )
        if isinstance(event, str):
            return _UNKNOWN, event
        if item.reference is not None and isinstance(event, Answered):
            event = msgspec.structs.replace(event, payload=item.reference)
        verdict = machine.apply(run, event, now, changes)
        return verdict, "its task was not sent yet, so no answer is awaited" if verdict is _UNKNOWN else ""


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


def _resend(run: Run, item: Resend, changes: Changes) -> Verdict:
    task = run.tasks[item.task]
    if not task.unsent or task.attempt != item.attempt:
        return Verdict.NOTHING
    if task.is_open:
        changes.commands.append((item.task, item.attempt))
    else:
        changes.dead_letters.append((item.task, item.attempt))
    return Verdict.APPLIED
