"""Reports of the brokers: a message was taken, can never be sent, or was lost with its broker."""

from oraculo.core.events import BrokerLost, Sent, Unsendable, Verdict
from oraculo.core.history import Happened
from oraculo.core.machine import ending, moves, skipping, timers
from oraculo.core.run import Cause, Changes, Run, Task, TaskStatus
from oraculo.core.transitions import Trigger, move

# Python 3.11 finds a global faster than a member of an enum, and every run asks for these.
_APPLIED, _SEND, _PENDING, _TASK_SENT = Verdict.APPLIED, Trigger.SEND, TaskStatus.PENDING, Happened.SENT

_CLOCKS_DIFFER = 1.5  # seconds, at most, between the clocks of two engines


def sent(run: Run, event: Sent, now: float, changes: Changes) -> Verdict:
    """Note which broker took a command or a dead letter."""
    task = run.tasks[event.task]
    if not task.unsent or task.attempt != event.attempt or task.is_open is event.dead_letter:
        return Verdict.NOTHING
    task.unsent = False
    task.via = event.via
    changes.touch(task)
    at = now if event.at is None else event.at
    if event.dead_letter:
        task.sent_at = task.sent_at or at
        return _APPLIED
    task.sent_at = at
    if task.status is _PENDING:
        move(run, task, _SEND)
    changes.record(now, _TASK_SENT, task.number, task.attempt)
    return _APPLIED


def unsendable(run: Run, event: Unsendable, now: float, changes: Changes) -> Verdict:
    """Fail a task whose command no broker takes. It gets no dead letter, which would be as large as the command.

    A running task stays open: a broker took its command once, and a worker may still answer.
    """
    task = run.tasks[event.task]
    is_waiting = task.unsent and task.attempt == event.attempt and task.status is TaskStatus.PENDING
    if not is_waiting or timers.deadline_passed(run, task, now) is not None:  # its timer rings a moment later
        return Verdict.NOTHING
    task.cause, task.reason = Cause.UNSENDABLE, event.reason
    moves.close(run, task, Trigger.GIVE_UP, now, changes)
    changes.record(now, Happened.FAILED, task.number, task.attempt, event.reason)
    skipping.skip_dependents(run, task, now, changes)
    ending.end_if_over(run, now, changes)
    return Verdict.APPLIED


def broker_lost(run: Run, event: BrokerLost, now: float, changes: Changes) -> Verdict:
    """Send again what the broker had, under the same identity, by which a worker knows a repeat."""
    lost = _dead_letters_lost(run, event, now) if event.dead_letters else _commands_lost(run, event, now)
    if not lost:
        return Verdict.NOTHING
    for task in lost:
        task.unsent = True
        if event.dead_letters:
            task.sent_at = None  # the new date keeps a second report of the same loss from sending it once more
        changes.touch(task)
    outgoing = changes.dead_letters if event.dead_letters else changes.commands
    outgoing += [(task.number, task.attempt) for task in lost]
    detail = f"{event.via or 'unknown'}: {len(lost)} of its messages {'is' if len(lost) == 1 else 'are'} sent again"
    changes.record(now, Happened.BROKER_LOST, detail=detail)
    return Verdict.APPLIED


def _commands_lost(run: Run, event: BrokerLost, now: float) -> list[Task]:
    return [
        task
        for task in run.tasks
        if task.status is TaskStatus.RUNNING
        and _was_taken_by(event, task)
        and not _is_sent_after(event.before, task.sent_at or 0.0, now)
    ]


def _dead_letters_lost(run: Run, event: BrokerLost, now: float) -> list[Task]:
    # A dead letter is sent after its task ended, by the clock of an engine that may differ from this one's.
    before = None if event.before is None else event.before + _CLOCKS_DIFFER
    return [
        task
        for task in run.tasks
        if task.dead_letter
        and _was_taken_by(event, task)
        and not _is_sent_after(before, max(task.sent_at or 0.0, task.ended_at or 0.0), now)
    ]


def _was_taken_by(event: BrokerLost, task: Task) -> bool:
    return task.via == event.via and not task.unsent


def _is_sent_after(before: float | None, sent_at: float, now: float) -> bool:
    """Return whether a message was sent after the loss. A time in the future is from before the clock was set back."""
    return before is not None and before < sent_at <= now
