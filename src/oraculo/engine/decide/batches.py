"""The contents of one batch, and the decision for each run in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeGuard

from oraculo.core.events import BrokerLost, Cancelled, Repeated, RunDue
from oraculo.core.machine import Verdict
from oraculo.core.run import Changes
from oraculo.engine.inbox import AnswerInput, Arrived, Note, OfRun, Submission, WideInput, Wish
from oraculo.ports.telemetry import AnswerTaken

MOST_TASKS = 5000  # created, cancelled or repeated in one commit, for which everything else waits
_OF_WHOLE_RUN = (Cancelled, Repeated, RunDue, BrokerLost)


def is_of_whole_run(item: OfRun) -> TypeGuard[Wish]:
    """Return whether an input may change every task of its run."""
    return type(item) is Wish and isinstance(item.event, _OF_WHOLE_RUN)


@dataclass(slots=True)
class Decision:
    """The decision for one run, made on one version of it."""

    changes: Changes
    was_open: bool
    verdicts: list[tuple[OfRun, Verdict, str]] = field(default_factory=list)

    @property
    def ends_it(self) -> bool:
        return self.was_open and not self.changes.run.is_open

    @property
    def must_be_fresh(self) -> bool:
        """Return whether it refused something without a commit.

        A commit would have noticed a stale copy of the run.
        """
        if self.changes.dirty:
            return False
        return any(verdict is not Verdict.APPLIED and not isinstance(item, Note) for item, verdict, _ in self.verdicts)


@dataclass(slots=True)
class Batch:
    """The inputs that are decided and committed together, sorted by what becomes of them."""

    submissions: list[Submission] = field(default_factory=list)
    by_run: dict[str, list[OfRun]] = field(default_factory=dict)
    handled: list[Arrived] = field(default_factory=list)
    refused: list[tuple[Arrived, str]] = field(default_factory=list)
    strays: list[AnswerTaken] = field(default_factory=list)  # of no run; logged once, however often the rest is tried
    large: list[AnswerInput] = field(default_factory=list)  # answers that may go to the object store
    unknown: list[Arrived] = field(default_factory=list)  # requests for pipelines that are not known here yet
    resting: dict[str, list[OfRun]] = field(default_factory=dict)  # what came for runs that rest

    @property
    def arrived(self) -> list[Arrived]:
        """The messages to settle."""
        return [*self.handled, *(arrived for arrived, _ in self.refused)]

    def of_run(self, run_id: str, item: OfRun) -> None:
        self.by_run.setdefault(run_id, []).append(item)

    def leave_wide(self, weighed: Sequence[WideInput]) -> Sequence[WideInput]:
        """Take out the widest, so that what is left is at most MOST_TASKS wide, and return them."""
        if sum(one.width for one in weighed) <= MOST_TASKS:
            return ()
        narrow_first = sorted(weighed, key=lambda one: (one.width, -one.priority))
        left = accumulate(one.width for one in narrow_first)
        wide = narrow_first[sum(width <= MOST_TASKS for width in left) :]
        inputs = {id(one.input) for one in wide}
        self.submissions = [one for one in self.submissions if id(one) not in inputs]
        for one in wide:
            if isinstance(one.input, Wish):
                self._take_out(one.input)
        return wide

    def _take_out(self, wish: Wish) -> None:
        items = self.by_run[wish.run_id]
        items.remove(wish)
        if not items:
            del self.by_run[wish.run_id]

    def leave_out(self, resting: Iterable[str]) -> None:
        """Take out what is for runs that rest."""
        self.give_up(resting)
        if self.resting:
            self.large = [answer for answer in self.large if answer.message.correlation_id not in self.resting]

    def give_up(self, run_ids: Iterable[str]) -> None:
        """Leave runs for a later batch."""
        for run_id in run_ids:
            self.resting.setdefault(run_id, []).extend(self.by_run.pop(run_id))
