"""Skipped tasks: which task is to blame, and which ones a redrive may reopen."""

from oraculo.core.history import Happened
from oraculo.core.machine import moves
from oraculo.core.run import OPEN, Cause, Changes, Run, Task, TaskStatus
from oraculo.core.transitions import Trigger

_NOT_IN_THE_WAY = OPEN | {TaskStatus.SUCCEEDED}


def skip_dependents(run: Run, failed: Task, now: float, changes: Changes) -> None:
    """Skip every pending task that depends on a failed one, directly or through others."""
    causes = [failed.number]
    while causes:
        cause = causes.pop()
        for number in run.plan.dependents[cause]:
            task = run.tasks[number]
            if task.status is not TaskStatus.PENDING:
                continue
            task.cause = Cause.DEPENDENCY
            task.reason = _why_skipped(run, run.tasks[cause])
            moves.close(run, task, Trigger.SKIP, now, changes)
            changes.record(now, Happened.SKIPPED, number, detail=task.reason)
            causes.append(number)


def skipped_after(run: Run, task: Task) -> list[Task]:
    """Return the tasks that were skipped because of `task` alone, and can run when it is reopened."""
    hopeful: dict[int, int] = {}  # by task, how many of its failed dependencies can run again
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
    """Give tasks that stay skipped a new reason when `causes`, which no longer failed, are their reason.

    The new reason is another dependency that failed. Without one, the task was skipped before its success came.
    """
    for cause in causes:
        for number in run.plan.dependents[cause.number]:
            task = run.tasks[number]
            if task.status is TaskStatus.SKIPPED and (task.reason or "").startswith(_blame(run, cause)):
                other = _in_the_way(run, number)
                task.reason = _too_late(run, cause) if other is None else _why_skipped(run, other)
                changes.touch(task)


def _why_skipped(run: Run, cause: Task) -> str:
    return f"{_blame(run, cause)}{cause.status}"


def _blame(run: Run, cause: Task) -> str:
    return f"'{run.plan.steps[cause.number].id}' ended as "


def _too_late(run: Run, cause: Task) -> str:
    return f"'{run.plan.steps[cause.number].id}' succeeded too late for it"


def _in_the_way(run: Run, number: int) -> Task | None:
    """Return the last dependency that failed. Tasks are mostly reopened in order, so the last one stays longest."""
    dependencies = (run.tasks[each] for each in reversed(run.plan.dependencies[number]))
    return next((task for task in dependencies if task.status not in _NOT_IN_THE_WAY), None)
