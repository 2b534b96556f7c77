"""Requests of operators: cancel a run, repeat it, redrive or discard a dead letter."""

from oraculo.core.events import Cancelled, DeadLetterDiscarded, Redriven, Repeated, Verdict
from oraculo.core.history import Happened
from oraculo.core.machine import ending, moves, skipping
from oraculo.core.run import Cause, Changes, Run, RunStatus, Task, TaskStatus
from oraculo.core.transitions import RunTrigger, Trigger, move, move_run


def cancelled(run: Run, event: Cancelled, now: float, changes: Changes) -> Verdict:
    """End the run now. Its open tasks are cancelled."""
    if not run.is_open:
        return Verdict.REFUSED
    run.head.cancelled = True
    ending.cancel_open_tasks(run, Cause.REQUEST, event.reason, now, changes)
    ending.set_end(run, RunTrigger.END, now, changes)
    return Verdict.APPLIED


def repeated(run: Run, event: Repeated, now: float, changes: Changes) -> Verdict:
    """Reopen every task of an ended run that did not succeed."""
    again = [task for task in run.tasks if task.status is not TaskStatus.SUCCEEDED]
    quorum_met = run.plan.needed is not None and run.head.succeeded >= run.plan.needed
    if run.is_open or not again or quorum_met:
        return Verdict.REFUSED
    _reopen(run, again, "repeated", now, changes)
    return Verdict.APPLIED


def redriven(run: Run, event: Redriven, now: float, changes: Changes) -> Verdict:
    """Reopen a task whose dead letter was redriven, and the tasks that were skipped because of it alone."""
    task = run.tasks[event.task]
    if not task.attempt or task.is_open or task.status is TaskStatus.SUCCEEDED:
        return Verdict.REFUSED
    again = [task, *skipping.skipped_after(run, task)]
    _reopen(run, again, "redriven", now, changes)
    skipping.blame_others(run, again, changes)
    return Verdict.APPLIED


def dead_letter_discarded(run: Run, event: DeadLetterDiscarded, now: float, changes: Changes) -> Verdict:
    """Note that the dead letter of a task is gone for good."""
    task = run.tasks[event.task]
    if not task.dead_letter:
        return Verdict.NOTHING
    task.dead_letter = task.unsent = False
    changes.touch(task)
    changes.record(now, Happened.DEAD_LETTER_DISCARDED, task.number, task.attempt)
    return Verdict.APPLIED


def _reopen(run: Run, tasks: list[Task], how: str, now: float, changes: Changes) -> None:
    head = run.head
    if not run.is_open:  # an open run keeps its deadline, because its commands carry it as `prazo`
        move_run(run, RunTrigger.REOPEN, RunStatus.RUNNING)
        changes.record(now, Happened.RUN_REOPENED, detail=how)
        head.ended_at, head.cancelled = None, False
        changes.ended, changes.deliver = False, ()
        head.deadline = head.due_at = now + head.timeout
    for task in tasks:
        move(run, task, Trigger.REOPEN)
        # The attempts go on counting, so that a worker never takes a repeat for a command that it has answered.
        task.last_attempt = task.attempt + run.plan.steps[task.number].retry.max_attempts
        task.cause = task.reason = task.deadline = task.due_at = task.ended_at = None
        task.percent = task.note = None
        task.dead_letter = task.unsent = False
        changes.touch(task)
        changes.record(now, Happened.REOPENED, task.number, task.attempt or None, how)
    for task in tasks:
        if not task.missing:
            moves.dispatch(run, task, now, changes)
