"""What was skipped because of another task: why, and whether it may hope again when that one is reopened."""

from oraculo.core.run import OPEN, Changes, Run, Task, TaskStatus

_NOT_IN_THE_WAY = OPEN | {TaskStatus.SUCCEEDED}


def why_skipped(run: Run, cause: Task) -> str:
    return f"{_blame(run, cause)}{cause.status}"


def _blame(run: Run, cause: Task) -> str:
    return f"'{run.plan.steps[cause.number].id}' ended as "


def _too_late(run: Run, cause: Task) -> str:
    return f"'{run.plan.steps[cause.number].id}' succeeded too late for it"


def skipped_after(run: Run, task: Task) -> list[Task]:
    """The tasks that were skipped because of `task` alone, and may hope again when it is reopened."""
    hopeful: dict[int, int] = {}  # of each, how many of its hopeless dependencies may hope again
    ready = [task.number]
    found: list[Task] = []
    while ready:
        for number in run.plan.dependents[ready.pop()]:
            dependent = run.tasks[number]
            if dependent.status is not TaskStatus.SKIPPED:
                continue
            hopeful[number] = hopeful.get(number, 0) + 1
            if hopeful[number] == run.hopeless[number]:
                ready.append(number)
                found.append(dependent)
    return found


def blame_others(run: Run, causes: list[Task], changes: Changes) -> None:
    """What stays skipped, and has one of these as its reason, which are no failures any more: it is given another that
    still stands in its way, if there is one. If not, its moment has passed all the same."""
    for cause in causes:
        for number in run.plan.dependents[cause.number]:
            task = run.tasks[number]
            if task.status is TaskStatus.SKIPPED and (task.reason or "").startswith(_blame(run, cause)):
                other = _in_the_way(run, number)
                task.reason = _too_late(run, cause) if other is None else why_skipped(run, other)
                changes.touch(task)


def _in_the_way(run: Run, number: int) -> Task | None:
    """The last one: of many that are reopened one by one, most often in their order, few are looked at again."""
    dependencies = (run.tasks[each] for each in reversed(run.plan.dependencies[number]))
    return next((task for task in dependencies if task.status not in _NOT_IN_THE_WAY), None)
