"""The end of a run: by its last task, by its quorum, or by an amendment of an earlier end."""

from oraculo.core.aggregate import end_status
from oraculo.core.history import Happened
from oraculo.core.machine import delivery, moves
from oraculo.core.run import Cause, Changes, Run
from oraculo.core.transitions import RunTrigger, Trigger, move_run


def end_by_quorum(run: Run, now: float, changes: Changes) -> None:
    """Cancel the open tasks when this very success meets the quorum.

    A task that is redriven after the quorum was met stays open: an operator asked for it.
    """
    needed = run.plan.needed
    if run.open_tasks and run.head.succeeded == needed:
        cancel_open_tasks(run, Cause.QUORUM, f"the quorum of {needed} was met without it", now, changes)


def cancel_open_tasks(run: Run, cause: Cause, reason: str, now: float, changes: Changes) -> None:
    for task in run.tasks:
        if task.is_open:
            task.cause, task.reason = cause, reason
            moves.close(run, task, Trigger.CANCEL, now, changes)
            changes.record(now, Happened.CANCELLED, task.number, task.attempt or None, reason)


def end_if_over(run: Run, now: float, changes: Changes) -> None:
    """End the run when no task is open."""
    if not run.open_tasks and run.is_open:
        set_end(run, RunTrigger.END, now, changes)


def set_end(run: Run, trigger: RunTrigger, now: float, changes: Changes) -> None:
    """Give the run its end status and a new edition of its aggregate."""
    head = run.head
    move_run(run, trigger, end_status(run))
    if trigger is RunTrigger.END:
        head.ended_at = now
    head.edition += 1
    changes.ended = True
    delivery.begin(run, now, changes)
    changes.record(now, Happened.RUN_ENDED, detail=f"{head.status}, versao {head.edition}")
