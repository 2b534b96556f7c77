"""The two moves of a task that every kind of event shares: it is sent, and it is closed."""

from oraculo.core.run import Changes, Run, Task
from oraculo.core.transitions import Trigger, move


def dispatch(run: Run, task: Task, now: float, changes: Changes, *, retry: bool = False) -> None:
    """Decide that the next attempt of the task is sent. Nothing is sent before this decision is committed."""
    if not retry:
        run.expect_answer(task.number)
    task.attempt += 1
    task.unsent = True
    if task.deadline is None:
        timeout = run.plan.steps[task.number].timeout
        task.deadline = None if timeout is None else now + timeout
    task.due_at = task.deadline
    changes.touch(task)
    changes.commands.append((task.number, task.attempt))


def close(run: Run, task: Task, trigger: Trigger, now: float, changes: Changes) -> None:
    """End an open task. Its cause is set before, because the task is counted by it."""
    if task.attempt and not task.missing:
        run.expect_no_answer(task.number)
    move(run, task, trigger)
    task.unsent = False
    task.due_at = None
    task.ended_at = now
    changes.touch(task)
