"""The phase of an open task: in its queue, at work, or waiting for its next attempt."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import NamedTuple

from oraculo.core.run import Task, TaskStatus


class Phase(StrEnum):
    """The phases of an open task, by their names on the wire."""

    IN_QUEUE = "na_fila"
    AT_WORK = "em_trabalho"
    AWAITS_RETRY = "aguardando_nova_tentativa"


class QueueLook(NamedTuple):
    """The state of a task's queue at the last look."""

    at: float
    ready: int
    held: int | None  # messages that somebody took and has not settled; None when the broker does not say
    consumers: int | None = None  # None when the broker does not say
    taken: Collection[tuple[str, int]] | None = None  # ids and attempts of the run's tasks among the held, if known
    is_bridged: bool = False  # a bridge takes its commands, which then wait elsewhere
    delayed: int = 0  # those of `ready` that are not due yet
    paused: str | None = None  # why the broker delivers none
    meant: str | None = None  # a queue with a similar name that has consumers, when this one has none

    @property
    def is_unserved(self) -> bool:
        """Return whether nobody takes the queue's messages, as far as the broker says."""
        if self.consumers is None:
            return self.held == 0 and self.ready > self.delayed
        return self.consumers == 0 and not self.held


Looks = Mapping[tuple[str, str | None], QueueLook]  # by queue, and by the broker that took the command


def phase_of(task: Task, step_id: str, look: QueueLook | None) -> Phase | None:
    """Return the phase of a task, or None when it is not open, not yet sent, or not known.

    A worker that reported progress is at work. Otherwise the queue decides: a worker took a command that left the
    queue, and a command that nobody holds is still there. When some are held and others wait, the phase is unknown.
    """
    if task.awaits_retry:
        return Phase.AWAITS_RETRY
    if task.status is not TaskStatus.RUNNING or task.unsent:
        return None
    if task.percent is not None or task.note is not None:
        return Phase.AT_WORK
    if look is None or task.sent_at is None or look.at < task.sent_at:
        return None
    if not look.ready or (step_id, task.attempt) in (look.taken or ()):
        return None if look.is_bridged else Phase.AT_WORK
    nobody_holds = look.held == 0 or (look.held is None and look.consumers == 0)
    return Phase.IN_QUEUE if nobody_holds or look.taken is not None else None
