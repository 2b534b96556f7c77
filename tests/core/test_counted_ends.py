"""The counts of unsuccessful tasks give the same results as a look at every task."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oraculo.core import machine
from oraculo.core.aggregate import end_status
from oraculo.core.events import Answered, Cancelled, Event, Redriven, Repeated, RunDue, TaskDue
from oraculo.core.machine.skipping import skipped_after
from oraculo.core.run import Cause, Changes, Run, RunStatus, Task, TaskStatus
from oraculo.pipeline.definition import Kind

from .building import OK, START, Driver, flow, pipeline, run_of
from .stories import Stage, story_of

# -- what is counted is what is there ---------------------------------------------------------------------------


def looked_up_end(run: Run) -> RunStatus:
    """Return the end status by a plain look at all tasks."""
    statuses = [task.status for task in run.tasks]
    succeeded = statuses.count(TaskStatus.SUCCEEDED)
    if succeeded == len(statuses):
        return RunStatus.SUCCEEDED
    if run.head.cancelled:
        return RunStatus.CANCELLED
    quorum_met = run.plan.needed is not None and succeeded >= run.plan.needed
    if run.plan.kind is Kind.PIPELINE and not quorum_met and (status := looked_up_required(run)):
        return status
    if succeeded:
        return RunStatus.PARTIAL
    if TaskStatus.FAILED in statuses:
        return RunStatus.FAILED
    is_late = TaskStatus.TIMED_OUT in statuses or any(task.is_open for task in run.tasks)
    return RunStatus.TIMED_OUT if is_late else RunStatus.CANCELLED


def looked_up_required(run: Run) -> RunStatus | None:
    status = None
    for task in run.tasks:
        if run.plan.steps[task.number].optional:
            continue
        cause = deadline_ahead(run, task) if task.is_open else task.cause
        if task.status is TaskStatus.FAILED or cause is Cause.TASK_DEADLINE:
            return RunStatus.FAILED
        if cause is Cause.RUN_DEADLINE:
            status = RunStatus.TIMED_OUT
    return status


def deadline_ahead(run: Run, task: Task) -> Cause | None:
    if any(run.tasks[number].status is not TaskStatus.SUCCEEDED for number in run.plan.dependencies[task.number]):
        return None
    is_own = task.deadline is not None and task.deadline <= run.head.deadline
    return Cause.TASK_DEADLINE if is_own else Cause.RUN_DEADLINE


def looked_up_skipped_after(run: Run, task: Task) -> list[Task]:
    """Return the tasks to reopen by a plain look at all dependencies of each skipped task."""
    hopeless: dict[int, int] = {}
    ready = [task.number]
    found: list[Task] = []
    while ready:
        for number in run.plan.dependents[ready.pop()]:
            if run.tasks[number].status is not TaskStatus.SKIPPED:
                continue
            if number not in hopeless:
                hopeless[number] = len(hopeless_dependencies(run, number))
            hopeless[number] -= 1
            if not hopeless[number]:
                ready.append(number)
                found.append(run.tasks[number])
    return found


def hopeless_dependencies(run: Run, number: int) -> list[Task]:
    before = [run.tasks[dependency] for dependency in run.plan.dependencies[number]]
    return [task for task in before if is_unsuccessful(task)]


def is_unsuccessful(task: Task) -> bool:
    return not task.is_open and task.status is not TaskStatus.SUCCEEDED


def check_counts(run: Run) -> None:
    assert end_status(run) is looked_up_end(run)
    for task in run.tasks:
        assert run.hopeless[task.number] == len(hopeless_dependencies(run, task.number))
        if is_unsuccessful(task):
            assert skipped_after(run, task) == looked_up_skipped_after(run, task)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_the_story_the_counts_say_what_a_look_at_all_tasks_says(seed: int) -> None:
    story = story_of(seed)
    stage = Stage(story.asked)
    for wait, act in story.steps:
        stage.now += wait
        act.play(stage)
        check_counts(stage.run)


def random_steps(chance: Random) -> Iterator[dict[str, Any]]:
    """More that join others, and more that is optional, than most pipelines have."""
    for number in range(chance.randint(2, 8)):
        step: dict[str, Any] = {"id": f"s{number}", "type": "x", "optional": chance.random() < 0.3}
        step |= {"dependsOn": [f"s{n}" for n in range(number) if chance.random() < 0.3]}
        step |= {"timeout": chance.choice([5, 30, 60])} if chance.random() < 0.5 else {}
        yield step


def random_event(chance: Random, run: Run) -> Event:
    """Ends that are not a success, and what takes them back."""
    number = chance.randrange(len(run.tasks))
    return chance.choice(
        [
            Answered(number, None, OK),
            Answered(number, None, b"{}", failed=True, retryable=False, reason="boom"),
            TaskDue(number),
            RunDue(),
            Redriven(number),
            Redriven(number),
            chance.choice([Repeated(), Cancelled()]),
        ]
    )


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_they_do_too_when_tasks_end_and_are_opened_again_and_again(seed: int) -> None:
    chance = Random(seed)
    quorum = {"quorum": chance.randint(1, 2)} if chance.random() < 0.2 else {}
    driver = flow(*random_steps(chance), timeout=30, onLate=chance.choice(["record", "amend"]), **quorum)
    for _ in range(60):
        driver.now += chance.choice([0, 0, 1, 10])
        driver.apply(random_event(chance, driver.run))
        check_counts(driver.run)


def test_a_run_is_failed_timed_out_and_partial_as_its_required_tasks_are_amended() -> None:
    own, other = {"type": "own", "timeout": 5}, {"type": "other", "optional": True}
    driver = flow(own, "runs", other, timeout=30, onLate="amend").sent()
    driver.at(5).due("own")
    driver.at(30).run_due()
    assert driver.status == "erro"
    driver.ok("own")
    assert driver.status == "timeout"
    driver.ok("runs")
    assert driver.status == "parcial"
    driver.ok("other")
    assert driver.status == "concluida"


# -- and it costs no look at all of them ------------------------------------------------------------------------


class Tasks(list[Task]):
    """Counts how often one of them is looked at."""

    looks = 0

    def __getitem__(self, number: Any) -> Any:
        self.looks += 1
        return super().__getitem__(number)

    def __iter__(self) -> Iterator[Task]:
        for task in super().__iter__():
            self.looks += 1
            yield task


def failure(number: int) -> Answered:
    return Answered(number, None, b"{}", failed=True, retryable=False, reason="boom")


def joined(width: int) -> list[str | dict[str, Any]]:
    names = [f"t{number}" for number in range(width)]
    return [*names, {"type": "join", "dependsOn": names}]


def late_answers(width: int) -> tuple[Run, Sequence[Event]]:
    """Return a run that timed out, and late answers that amend it."""
    driver = wide([f"t{number}" for number in range(width)], onLate="amend")
    driver.at(1000).run_due()
    return driver.run, [Answered(number, 1, OK) for number in range(width)]


def late_answers_before_a_join(width: int) -> tuple[Run, Sequence[Event]]:
    driver = wide(joined(width), onLate="amend")
    driver.at(1000).run_due()
    return driver.run, [Answered(number, 1, OK) for number in range(width)]


def redrives(width: int) -> tuple[Run, Sequence[Event]]:
    """Return a run in which all dependencies of one step failed, and a redrive of each."""
    driver = wide(joined(width))
    for number in range(width):
        driver.apply(failure(number))
    return driver.run, [Redriven(number) for number in range(width)]


def redrives_that_fail_again(width: int) -> tuple[Run, Sequence[Event]]:
    """One after the other, so that each opens the run and each ends it."""
    run, events = redrives(width)
    return run, [event for number, redrive in enumerate(events) for event in (redrive, failure(number))]


def wide(steps: Sequence[str | dict[str, Any]], **options: Any) -> Driver:
    return Driver(run_of({"pipeline": "p"}, pipeline(*steps, **options)), checked=False)


def looks(stage: Callable[[int], tuple[Run, Sequence[Event]]], width: int) -> int:
    run, events = stage(width)
    tasks = run.tasks = Tasks(run.tasks)
    changes = Changes(run)
    for event in events:
        assert machine.apply(run, event, START + 1000, changes) is machine.Verdict.APPLIED
    return tasks.looks


@pytest.mark.parametrize("stage", [late_answers, late_answers_before_a_join, redrives, redrives_that_fail_again])
def test_twice_as_wide_costs_twice_as_many_looks(stage: Callable[[int], tuple[Run, Sequence[Event]]]) -> None:
    once, twice = looks(stage, 100), looks(stage, 200)
    assert twice <= 2 * once, f"{once} looks at a width of 100, {twice} at 200"
