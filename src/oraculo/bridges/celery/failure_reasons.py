"""Joins failed tasks with the events that say why they failed.

A failed task replies with its id alone. The reason comes in an event of its worker, which the broker does not keep.
"""

import asyncio

from oraculo.bridges.celery.recent import RecentDict
from oraculo.bridges.celery.replies import Reason

EVENT_TIMEOUT = 5.0  # seconds from a reply to its event, which a busy worker sends a moment later
_MAX_KEPT = 1000  # failed tasks whose reply or event is missing; some belong to other apps


class FailureReasons:
    """The reasons of failed tasks, kept on the event loop. `timeout` is 0 where no events are read."""

    def __init__(self, timeout: float = EVENT_TIMEOUT) -> None:
        self._timeout = timeout
        self._reasons = RecentDict[str, asyncio.Future[Reason]](_MAX_KEPT)

    async def note(self, task_id: str, reason: Reason) -> None:
        future = self._future(task_id)
        if not future.done():
            future.set_result(reason)

    async def of(self, task_id: str) -> Reason | None:
        """Return why a task failed, or None if no event says so in time."""
        done, _ = await asyncio.wait([self._future(task_id)], timeout=self._timeout)
        self._reasons.pop(task_id, None)
        return done.pop().result() if done else None

    def _future(self, task_id: str) -> "asyncio.Future[Reason]":
        return self._reasons.setdefault(task_id, asyncio.get_running_loop().create_future())
