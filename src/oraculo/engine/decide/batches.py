"""What the intake takes at once, and what it decides for each run in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeGuard

from oraculo.core.events import BrokerLost, Cancelled, Repeated, RunDue
from oraculo.core.machine import Verdict
from oraculo.core.run import Changes
from oraculo.engine.inbox import AnswerInput, Arrived, Note, OfRun, Rest, Submission, WideInput, Wish
from oraculo.ports.telemetry import AnswerTaken

MOST_TASKS = 5000  # that are created, cancelled or repeated in one commit: all others wait for as long as it takes
_OF_WHOLE_RUN = (Cancelled, Repeated, RunDue, BrokerLost)


def is_of_whole_run(item: OfRun) -> TypeGuard[Wish]:
    """Return whether it may change every task of its run."""
    return type(item) is Wish and isinstance(item.event, _OF_WHOLE_RUN)


@dataclass(slots=True)
class Decision:
    """What was decided for one run, on one version of it."""

    changes: Changes
    was_open: bool
    verdicts: list[tuple[OfRun, Verdict, str]] = field(default_factory=list)

    @property
    def is_of_notes(self) -> bool:
        """And of nothing that came from outside."""
        return all(isinstance(item, Note) for item, _, _ in self.verdicts)

    @property
    def ends_it(self) -> bool:
        return self.was_open and not self.changes.run.is_open

    @property
    def must_be_fresh(self) -> bool:
        """Whether it turned something away without a commit that would have noticed a stale copy."""
        if self.changes.dirty:
            return False
        return any(verdict is not Verdict.APPLIED and not isinstance(item, Note) for item, verdict, _ in self.verdicts)


@dataclass(slots=True)
class Batch:
    submissions: list[Submission] = field(default_factory=list)
    by_run: dict[str, list[OfRun]] = field(default_factory=dict)
    handled: list[Arrived] = field(default_factory=list)
    refused: list[tuple[Arrived, str]] = field(default_factory=list)
    strays: list[AnswerTaken] = field(default_factory=list)  # to no run: told once, however often the rest is tried
    large: list[AnswerInput] = field(default_factory=list)  # which may rest in the object store instead
    unknown: list[Arrived] = field(default_factory=list)  # requests for pipelines that are not known here, or not yet
    resting: dict[str, list[OfRun]] = field(default_factory=dict)  # of `by_run`, what is to wait

    @property
    def arrived(self) -> list[Arrived]:
        """What is to be settled."""
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

    def leave_out(self, resting: Mapping[str, Rest]) -> None:
        """But for the notes, unless a race was lost: they are few, and say what is not to be done again."""
        for run_id, rest in resting.items():
            items = self.by_run.pop(run_id)
            notes = [] if rest.after_loss else [item for item in items if isinstance(item, Note)]
            others = [item for item in items if rest.after_loss or not isinstance(item, Note)]
            self.by_run |= {run_id: list[OfRun](notes)} if notes else {}
            self.resting |= {run_id: others} if others else {}
        if self.resting:
            self.large = [answer for answer in self.large if answer.message.correlation_id not in self.resting]

    def give_up(self, run_ids: Iterable[str]) -> None:
        """For now."""
        for run_id in run_ids:
            self.resting.setdefault(run_id, []).extend(self.by_run.pop(run_id))
