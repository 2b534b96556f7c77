"""Concludes a batch after its commit: hands on what changed, answers callers, and sorts messages for settling."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from oraculo.core.events import Event
from oraculo.core.machine import Verdict
from oraculo.core.run import Changes
from oraculo.engine.decide.batches import Batch, Decision
from oraculo.engine.decide.cache import HotRuns
from oraculo.engine.inbox import AnswerInput, Arrived, BadAnswer, Note, OfRun, Submission
from oraculo.errors import StoreUnavailable
from oraculo.ports.store import Committed, Created, CreationOutcome, Storage
from oraculo.ports.telemetry import AnswerTaken, Telemetry
from oraculo.wire import naming

_PAUSE = 0.1
_UNKNOWN, _CREATED = Verdict.UNKNOWN, CreationOutcome.CREATED  # an enum's member takes long to look up


class CommitFollowers(Protocol):
    """The parts that act on what was committed: the outbox, the timers, the deliveries and the watchers."""

    def committed(self, changes: Changes) -> None: ...
    def noted(self, run_id: str, event: Event) -> None: ...


class Conclusion:
    """The steps that follow a commit, for each submission and each input of the batch."""

    def __init__(
        self,
        store: Storage,
        hot: HotRuns,
        followers: CommitFollowers,
        telemetry: Telemetry,
    ) -> None:
        self._store = store
        self._hot = hot
        self._followers = followers
        self._telemetry = telemetry

    async def conclude_creations(self, submissions: Sequence[Submission], committed: Committed, batch: Batch) -> int:
        """Answer for each submission, and return how many of them are new runs."""
        birthdays, count = await self._birthdays(submissions, committed), 0
        for one, created in zip(submissions, committed.created, strict=True):
            if created.outcome is _CREATED:
                self._hot.keep(one.changes.run)
                self._followers.committed(one.changes)
            elif one.uncertain and birthdays.get(created.run_id) == one.changes.run.head.created_at:
                # An earlier attempt was written, although the store reported a failure: the run is this request's.
                self._followers.committed(one.changes)
                created = Created(CreationOutcome.CREATED, created.run_id)
            count += created.outcome is _CREATED
            if one.done is not None and not one.done.done():
                one.done.set_result(created)
            if one.arrived is not None:
                _conclude_arrived_request(one.arrived, created, batch)
        return count

    async def _birthdays(self, submissions: Sequence[Submission], committed: Committed) -> Mapping[str, float]:
        """Return when the runs were created that an earlier attempt of these submissions may have made.

        Another request under the same key may have made the run, and its commands have other deadlines. Only a run
        with the submission's own time of creation is the submission's.
        """
        doubtful = [
            one.changes.run.id
            for one, created in zip(submissions, committed.created, strict=True)
            if one.uncertain and created == Created(CreationOutcome.SAME, one.changes.run.id)
        ]
        while doubtful:
            try:
                heads = await self._store.heads(doubtful)
            except StoreUnavailable:  # the rest of the batch is committed, and must not be decided again
                await asyncio.sleep(_PAUSE)
            else:
                return {run_id: head.created_at for run_id, head in heads.items()}
        return {}

    def conclude(self, decisions: Iterable[Decision], conflicts: frozenset[str], batch: Batch) -> None:
        """Hand on each committed decision, and forget the copies of runs that another engine changed."""
        decided = set[str]()
        for decision in decisions:
            run_id = decision.changes.run.id
            decided.add(run_id)
            if run_id in conflicts:
                self._hot.drop(run_id)
                continue
            if decision.changes.dirty:
                self._hot.grown(decision.changes)
            self._followers.committed(decision.changes)
            for item, verdict, why in decision.verdicts:
                self._conclude_item(run_id, item, verdict, why, batch)
            if decision.ends_it:  # a run that gets messages after its end is kept, because more may come
                self._hot.drop(run_id)
        for run_id in (each for each in batch.by_run if each not in decided):
            self._conclude_without_run(run_id, batch.by_run[run_id], batch)

    def _conclude_item(self, run_id: str, item: OfRun, verdict: Verdict, why: str, batch: Batch) -> None:
        if isinstance(item, Note):
            self._followers.noted(run_id, item.event)
        elif isinstance(item, AnswerInput):
            self._telemetry.emit(AnswerTaken(run_id, verdict, item.message.tipo_evento))
            if verdict is _UNKNOWN:
                batch.refused.append((item.arrived, why))
            else:
                batch.handled.append(item.arrived)
        elif isinstance(item, BadAnswer):
            batch.refused.append((item.arrived, why))
        elif not item.done.done():
            item.done.set_result(verdict)

    def _conclude_without_run(self, run_id: str, items: Iterable[OfRun], batch: Batch) -> None:
        """Answer for inputs that name a run that does not exist."""
        for item in items:
            if isinstance(item, AnswerInput):
                batch.strays.append(AnswerTaken(run_id, _UNKNOWN, item.message.tipo_evento))
                batch.refused.append((item.arrived, f"there is no run with the correlation_id {naming.shown(run_id)}"))
            elif isinstance(item, BadAnswer):
                batch.refused.append((item.arrived, item.why))
            elif isinstance(item, Note):
                self._followers.noted(run_id, item.event)
            elif not item.done.done():
                item.done.set_result(None)

    def give_up(self, note: Note) -> None:
        """Let go of a note that cannot be decided."""
        self._followers.noted(note.run_id, note.event)


def _conclude_arrived_request(arrived: Arrived, created: Created, batch: Batch) -> None:
    if created.outcome in (CreationOutcome.CREATED, CreationOutcome.SAME):
        batch.handled.append(arrived)
    else:
        why = f"the correlation_id {naming.shown(created.run_id)} is another run's already"
        batch.refused.append((arrived, why))
