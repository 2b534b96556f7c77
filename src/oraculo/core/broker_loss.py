"""What a broker had when it was lost."""

from oraculo.core.events import BrokerLost
from oraculo.core.run import Run, Task, TaskStatus

_CLOCKS_DIFFER = 1.5  # seconds, between engines, at the most


def commands_lost(run: Run, event: BrokerLost, now: float) -> list[Task]:
    return [
        task
        for task in run.tasks
        if task.status is TaskStatus.RUNNING
        and _had(event, task)
        and not _is_since(event.before, task.sent_at or 0.0, now)
    ]


def letters_lost(run: Run, event: BrokerLost, now: float) -> list[Task]:
    """One was sent after its task had ended, as another engine's clock may have told."""
    before = None if event.before is None else event.before + _CLOCKS_DIFFER
    return [
        task
        for task in run.tasks
        if task.dead_letter
        and _had(event, task)
        and not _is_since(before, max(task.sent_at or 0.0, task.ended_at or 0.0), now)
    ]


def _had(event: BrokerLost, task: Task) -> bool:
    return task.via == event.via and not task.unsent


def _is_since(before: float | None, sent_at: float, now: float) -> bool:
    """What seems to be sent later than now was sent before the clock was set back."""
    return before is not None and before < sent_at <= now
