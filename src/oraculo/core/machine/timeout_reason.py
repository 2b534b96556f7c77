"""The reason of a timeout, from what was known about the task's queue shortly before the deadline."""

from oraculo.core.events import RunDue, TaskDue
from oraculo.core.phase import Looks
from oraculo.core.run import Cause, Run, Task, TaskStatus
from oraculo.wire.naming import ANSWERS
from oraculo.wire.timestamps import in_words


def why_timed_out(run: Run, task: Task, cause: Cause, timer: TaskDue | RunDue | None = None) -> str:
    """Return the reason of a timeout. There is no `timer` when a failure came between the deadline and its timer."""
    step = run.plan.steps[task.number]
    limit = step.timeout if cause is Cause.TASK_DEADLINE else run.head.timeout
    waited = in_words(limit or run.head.timeout)
    if timer is None or task.awaits_retry:
        return f"no success in {waited}; attempt {task.attempt} failed: {task.reason}"
    # The failure of the attempt before is the only thing that a worker said about this task.
    before = f"; attempt {task.attempt - 1} failed: {task.reason}" if task.reason else ""
    again = f" to attempt {task.attempt}" if before else ""
    why = timer.untaken.get(step.queue) or timer.untaken.get(None)
    if task.unsent and task.status is TaskStatus.PENDING:
        blame = f": the broker did not take the command ({why})" if why else ""
        return f"{f'attempt {task.attempt} ' if before else ''}not sent in {waited}{blame}{before}"
    if task.unsent:
        blame = f" ({why})" if why else ""
        seen = f"; the broker that had the command was lost, and it was not sent again{blame}"
    else:
        seen = _why_unanswered(task, step.queue, timer.looks, timer.unheard)
    return f"no answer{again} in {waited}{seen}{before}"


def _why_unanswered(task: Task, queue: str, looks: Looks, unheard: str | None) -> str:
    deaf = "" if unheard is None else f"; ORÁCULO itself heard nothing on queue {ANSWERS} ({unheard})"
    return deaf + _what_was_seen(task, queue, looks)


def _what_was_seen(task: Task, queue: str, looks: Looks) -> str:
    """Return nothing when nobody looked since the command was sent, or when the look explains nothing."""
    of_all = looks.get((queue, None))  # there is a single broker
    look = of_all or looks.get((queue, task.via))
    if look is None or task.sent_at is None or look.at < task.sent_at:
        return ""
    place = queue if of_all else f"{queue} at broker {task.via}"
    meant = "" if look.meant is None else f": did you mean '{look.meant}'?"
    if look.paused:
        return f"; nobody was given what is in queue {place} ({look.paused})"
    if look.consumers == 0:
        return "" if look.held else f"; nobody listened on queue {place}{meant}"
    is_taken = task.percent is not None or task.note is not None
    if is_taken or not look.ready:
        return ""
    waited = f"; {look.ready} message{'' if look.ready == 1 else 's'} waited in queue {place}"
    if look.consumers:
        return f"{waited}, where {look.consumers} listened"
    if look.held == 0 and look.ready > look.delayed:
        return f"{waited}, and nobody seemed to take {'it' if look.ready == 1 else 'them'}{meant}"
    return waited
