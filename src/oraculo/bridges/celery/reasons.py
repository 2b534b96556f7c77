"""Why Celery tasks failed, as the events of their workers say it.

A failed task reports its id alone, and that report waits here for the event. Events are not kept by the broker: where
none comes, the report goes on without a reason.
"""

import asyncio
from collections import OrderedDict

PATIENCE = 5.0  # seconds from a report to its event, which a busy worker sends a moment later
_MOST_KEPT = 1000  # reasons that no report has asked for yet; they may be of other apps' tasks

Reason = tuple[str, str]  # the name of the exception's class, and its text


class FailureReasons:
    """Used on the event loop. `patience`: 0 where no events are heard."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._known: OrderedDict[str, Reason] = OrderedDict()
        self._awaited: dict[str, asyncio.Future[Reason]] = {}
        self._are_heard = True

    def note(self, task_id: str, kind: str, text: str) -> None:
        self._are_heard = True
        if (awaited := self._awaited.pop(task_id, None)) is not None:
            awaited.set_result((kind, text))
            return
        self._known[task_id] = (kind, text)
        if len(self._known) > _MOST_KEPT:
            self._known.popitem(last=False)

    async def of(self, task_id: str) -> Reason | None:
        """Return the reason, or None when no event tells it in time."""
        if (known := self._known.pop(task_id, None)) is not None:
            return known
        if not self._patience or not self._are_heard:
            return None
        awaited = self._awaited.setdefault(task_id, asyncio.get_running_loop().create_future())
        try:
            done, _ = await asyncio.wait([awaited], timeout=self._patience)
        finally:
            self._awaited.pop(task_id, None)
        if done:
            return awaited.result()
        self._are_heard = False  # workers that send no events would hold up every failure; the next event ends this
        return None
