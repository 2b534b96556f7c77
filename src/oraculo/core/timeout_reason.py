"""Why a command may have had no answer, by what was known shortly before the deadline."""

from oraculo.core.phase import Looks
from oraculo.core.run import Task
from oraculo.wire.naming import ANSWERS


def why_unanswered(task: Task, queue: str, looks: Looks, unheard: str | None) -> str:
    """Return the end of a timeout's reason: why the engine heard no answers, and what was seen of the task's queue."""
    deaf = "" if unheard is None else f"; ORÁCULO itself heard nothing on queue {ANSWERS} ({unheard})"
    return deaf + _what_was_seen(task, queue, looks)


def _what_was_seen(task: Task, queue: str, looks: Looks) -> str:
    """Return nothing when nobody looked since the command was sent, or the look says nothing of it."""
    of_all = looks.get((queue, None))  # of a single broker
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
