"""What the intake takes at once, and what it decides for each run in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from oraculo.core.machine import Verdict
from oraculo.core.run import Changes
from oraculo.engine.inputs import Answer, Arrived, Note, OfRun, Rest, Submission
from oraculo.ports.telemetry import AnswerTaken


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
    large: list[Answer] = field(default_factory=list)  # which may rest in the object store instead
    unknown: list[Arrived] = field(default_factory=list)  # requests for pipelines that are not known here, or not yet
    resting: dict[str, list[OfRun]] = field(default_factory=dict)  # of `by_run`, what is to wait

    @property
    def arrived(self) -> list[Arrived]:
        """What is to be settled."""
        return [*self.handled, *(arrived for arrived, _ in self.refused)]

    def of_run(self, run_id: str, item: OfRun) -> None:
        self.by_run.setdefault(run_id, []).append(item)

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
