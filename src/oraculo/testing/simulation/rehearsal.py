"""A rehearsal of a user's pipeline under faults, with stand-ins for its workers.

It shows whether runs end, how long they take, and which deadlines are tight.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from oraculo.core.run import Cause, Run, RunStatus, Task, TaskStatus
from oraculo.pipeline.definition import Definition, pipeline_document
from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.running import SeedOutcome, run_seed
from oraculo.testing.simulation.scenario import Action, Scenario, StandIn

# A deadline is tight when this share of runs hit it, or when slow runs took this part of it.
TIGHT_SHARE = 0.01
TIGHT_FRACTION = 0.8
_WELL = (RunStatus.SUCCEEDED, RunStatus.PARTIAL)
_TROUBLED = 300.0  # longest time with faults, in seconds; open runs then go on without faults


class Deadline(msgspec.Struct, frozen=True):
    """A deadline, how long successes took, and how often it was missed."""

    of: str
    seconds: float
    p95: float | None  # None: nothing succeeded
    met: int

    def is_tight(self, runs: int) -> bool:
        return self.met > runs * TIGHT_SHARE or (self.p95 or 0.0) > self.seconds * TIGHT_FRACTION


class Rehearsal(msgspec.Struct):
    """The result of a rehearsal."""

    seeds: int
    judged: int  # seeds that lost no message: no deadline is long enough for what waits for a lost one
    violations: dict[int, str]  # seed -> the law that was broken, and how
    statuses: Counter[str]
    seconds: list[float]  # the time that each run took
    longest_path: list[str]
    longest_path_seconds: float
    deadlines: list[Deadline]
    troubles: Counter[str]

    def percentile(self, percent: int) -> float:
        return _percentile(self.seconds, percent)

    @property
    def tight(self) -> list[Deadline]:
        return [deadline for deadline in self.deadlines if deadline.is_tight(self.judged)]


def rehearse(
    definition: Definition, stand_ins: Mapping[str, StandIn], usual: StandIn, faults: Faults, seeds: Iterable[int]
) -> Rehearsal:
    scenario = _scenario(definition, stand_ins, usual)
    outcomes = [run_seed(seed, faults, scenario) for seed in seeds]
    runs = [run for outcome in outcomes for run in outcome.runs.values()]
    path, expected = longest_path(definition, stand_ins, usual)
    judged = [outcome for outcome in outcomes if not outcome.troubles["drop"]]
    return Rehearsal(
        seeds=len(outcomes),
        judged=len(judged),
        violations={one.seed: _in_words(one) for one in outcomes if not one.is_clean},
        statuses=sum((one.statuses for one in outcomes), Counter()),
        seconds=sorted(_lasted(run) for run in runs),
        longest_path=path,
        longest_path_seconds=expected,
        deadlines=_deadlines(definition, judged),
        troubles=sum((one.troubles for one in outcomes), Counter()),
    )


def _scenario(definition: Definition, stand_ins: Mapping[str, StandIn], usual: StandIn) -> Scenario:
    definition = _without_bridges(definition)
    body = json.dumps({"pipeline": definition.name, "correlation_id": "r0", "payload": {}}).encode()
    source: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(pipeline_document(definition)))
    return Scenario(
        pipelines={definition.name: source},
        actions=(Action(0.5, "submit", body, key="k0"),),
        queues=tuple(sorted({step.queue for step in definition.steps})),
        lasts=min(definition.timeout, _TROUBLED),
        longest=definition.timeout,
        stand_ins=dict(stand_ins),
        latency=usual.latency,
        failure_rate=usual.failure_rate,
    )


def _without_bridges(definition: Definition) -> Definition:
    """Return the definition with a queue in place of each Celery task and BullMQ queue, for stand-ins to serve."""
    places = [(step.bridge.kind, step.bridge.target) if step.bridge else None for step in definition.steps]
    known = dict.fromkeys(place for place in places if place)
    queues = {place: f"{place[0]}-{number}" for number, place in enumerate(known)}
    steps = tuple(
        msgspec.structs.replace(step, queue=queues[place], bridge=None) if place else step
        for step, place in zip(definition.steps, places, strict=True)
    )
    return msgspec.structs.replace(definition, steps=steps)


def longest_path(definition: Definition, stand_ins: Mapping[str, StandIn], usual: StandIn) -> tuple[list[str], float]:
    """Return the chain of steps that takes longest by the stand-ins' mean times, and that time.

    No run is faster for long.
    """
    best: dict[str, tuple[float, list[str]]] = {}
    waiting = {step.id: step for step in definition.steps}
    while waiting:
        for name, step in list(waiting.items()):
            if any(before in waiting for before in step.depends_on):
                continue
            before = max((best[other] for other in step.depends_on), default=(0.0, []))
            best[name] = (before[0] + stand_ins.get(name, usual).latency, [*before[1], name])
            del waiting[name]
    seconds, path = max(best.values())
    return path, seconds


def _deadlines(definition: Definition, outcomes: list[SeedOutcome]) -> list[Deadline]:
    runs = [run for outcome in outcomes for run in outcome.runs.values()]
    found = [_of_the_run(definition.timeout, runs)]
    for number, step in enumerate(definition.steps):
        if step.timeout is not None:
            found.append(_of_a_step(f"step {step.id}", step.timeout, [run.tasks[number] for run in runs]))
    return found


def _of_the_run(seconds: float, runs: list[Run]) -> Deadline:
    cut = [any(task.cause is Cause.RUN_DEADLINE for task in run.tasks) for run in runs]
    took = [_lasted(run) for run, is_cut in zip(runs, cut, strict=True) if run.head.status in _WELL and not is_cut]
    return Deadline("the run", seconds, _p95(took), sum(cut))


def _of_a_step(name: str, seconds: float, tasks: list[Task]) -> Deadline:
    took = [
        (task.ended_at or 0.0) - task.deadline + seconds
        for task in tasks
        if task.deadline is not None and task.status is TaskStatus.SUCCEEDED
    ]
    return Deadline(name, seconds, _p95(took), sum(task.cause is Cause.TASK_DEADLINE for task in tasks))


def _p95(took: list[float]) -> float | None:
    return _percentile(sorted(took), 95) if took else None


def _lasted(run: Run) -> float:
    return (run.head.ended_at or run.head.deadline) - run.head.created_at


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _in_words(outcome: SeedOutcome) -> str:
    violation = outcome.violations[0]
    return f"law {violation.law} ({violation.says}): {violation.how}"
