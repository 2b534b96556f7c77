"""The state machine of a run: `start` makes its first changes, `apply` applies one event to it.

The laws it keeps:
- An ended task is final. A duplicate, late or unknown answer changes no status; it is counted and recorded.
- A task is sent only when everything it depends on has succeeded.
- Every run has a deadline. When it comes, the open tasks are closed and the run ends.
- The run ends when no task is open, when its quorum is met, when its deadline comes, or when it is cancelled.
- Only `repetir`, a redrive and an amendment open or change what has ended.

`core.transitions` lists which status may follow which. Each kind of event has its module here. The modules call each
other as `moves.dispatch(…)`, so that a test can replace a step of the machine in one place.
"""

from collections.abc import Callable
from typing import Any

from oraculo.core.events import (
    Answered,
    BrokerLost,
    Cancelled,
    DeadLetterDiscarded,
    Delivered,
    DeliveryFailed,
    DeliveryMoved,
    Event,
    Progressed,
    Redriven,
    Repeated,
    RunDue,
    Sent,
    TaskDue,
    Unsendable,
    Verdict,
)
from oraculo.core.history import Happened
from oraculo.core.machine import answers, delivery, moves, operators, sending, timers
from oraculo.core.run import Changes, Run

__all__ = ["Verdict", "apply", "start"]

_HANDLERS: dict[type[Event], Callable[[Run, Any, float, Changes], Verdict]] = {
    Sent: sending.sent,
    Unsendable: sending.unsendable,
    BrokerLost: sending.broker_lost,
    Answered: answers.answered,
    Progressed: answers.progressed,
    TaskDue: timers.task_due,
    RunDue: timers.run_due,
    Cancelled: operators.cancelled,
    Repeated: operators.repeated,
    Redriven: operators.redriven,
    DeadLetterDiscarded: operators.dead_letter_discarded,
    Delivered: delivery.delivered,
    DeliveryFailed: delivery.delivery_failed,
    DeliveryMoved: delivery.delivery_moved,
}


def start(run: Run, now: float) -> Changes:
    """Return the first changes of a new run: every task that depends on nothing is sent."""
    changes = Changes(run)
    changes.record(now, Happened.STARTED, detail=run.head.name or None)
    run.head.due_at = run.head.deadline
    for task in run.tasks:
        changes.touch(task)
        task.last_attempt = run.plan.steps[task.number].retry.max_attempts
        if not task.missing:
            moves.dispatch(run, task, now, changes)
    return changes


def apply(run: Run, event: Event, now: float, changes: Changes) -> Verdict:
    """Apply one event to the run and add what it changed to `changes`.

    The result depends on the arguments alone. An event that does not fit returns a verdict and changes no status.
    """
    return _HANDLERS[type(event)](run, event, now, changes)
