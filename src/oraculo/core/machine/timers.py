"""Timers: the retry of a task is due, the deadline of a task or of the run has come, or a delivery is due."""

from oraculo.core.events import RunDue, TaskDue, Verdict
from oraculo.core.history import Happened
from oraculo.core.machine import delivery, ending, moves, skipping, timeout_reason
from oraculo.core.run import Cause, Changes, Run, Task
from oraculo.core.transitions import Trigger


def task_due(run: Run, event: TaskDue, now: float, changes: Changes) -> Verdict:
    """Send the next attempt of the task, or close it when its deadline has come."""
    task = run.tasks[event.task]
    if not task.is_open or task.due_at is None or task.due_at > now:
        return Verdict.NOTHING
    passed = deadline_passed(run, task, now)
    if passed is None:
        moves.dispatch(run, task, now, changes, retry=True)
    else:
        expire(run, task, passed, timeout_reason.why_timed_out(run, task, passed, event), now, changes)
        ending.end_if_over(run, now, changes)
    return Verdict.APPLIED


def run_due(run: Run, event: RunDue, now: float, changes: Changes) -> Verdict:
    """Close every open task at the run's deadline. When the run has ended, a delivery is due instead."""
    head = run.head
    if head.due_at is None or head.due_at > now:
        return Verdict.NOTHING
    if not run.is_open:
        return delivery.lease_due(run, now, changes)
    for task in run.tasks:
        if task.is_open and not task.missing:
            passed = deadline_passed(run, task, now) or Cause.RUN_DEADLINE
            expire(run, task, passed, timeout_reason.why_timed_out(run, task, passed, event), now, changes)
    ending.end_if_over(run, now, changes)
    return Verdict.APPLIED


def deadline_passed(run: Run, task: Task, now: float) -> Cause | None:
    """Return which deadline of the task has passed, or None.

    The earlier one counts, and the task's if both are the same, whichever timer rings first.
    """
    if task.deadline is not None and task.deadline <= min(now, run.head.deadline):
        return Cause.TASK_DEADLINE
    return Cause.RUN_DEADLINE if run.head.deadline <= now else None


def expire(run: Run, task: Task, cause: Cause, why: str, now: float, changes: Changes) -> None:
    """Close a task that timed out, and skip what depends on it."""
    task.cause = cause
    task.reason = why
    moves.close(run, task, Trigger.EXPIRE, now, changes)
    changes.record(now, Happened.TIMED_OUT, task.number, task.attempt, task.reason)
    skipping.skip_dependents(run, task, now, changes)
