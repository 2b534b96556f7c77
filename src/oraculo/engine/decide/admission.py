"""Holds back requests that came as messages and may name too many new queues, until the broker has answered."""

import asyncio
from collections.abc import Iterable

from oraculo.engine.decide.batches import Batch
from oraculo.engine.decide.settle import Settling
from oraculo.engine.inbox import Arrived, Inbox, Submission
from oraculo.engine.queues.limits import NewQueueLimits
from oraculo.errors import InvalidRequest, TooManyNewQueues


class Admission:
    """The requests that wait to be admitted: one after the other, because each takes the broker a while."""

    def __init__(self, new_queues: NewQueueLimits, inbox: Inbox, settling: Settling) -> None:
        self._new_queues = new_queues
        self._inbox = inbox
        self._settling = settling
        self._waiting: dict[Arrived, Submission] = {}
        self._task: asyncio.Task[None] | None = None
        self._has_stopped = False

    @property
    def arrived(self) -> Iterable[Arrived]:
        """The messages that wait here."""
        return self._waiting

    def stop(self) -> None:
        """Stop admitting: what waits is delivered again."""
        self._has_stopped = True
        if self._task is not None:
            self._task.cancel()

    def take_out(self, batch: Batch) -> dict[Arrived, Submission]:
        """Take the requests out of a batch about which the broker must be asked, and return them."""
        left: dict[Arrived, Submission] = {}
        submissions, batch.submissions = batch.submissions, []
        for one in submissions:
            if one.arrived is None or self._new_queues.admits_run_at_once(one):
                batch.submissions.append(one)
            else:
                left[one.arrived] = one
        return left

    def admit_soon(self, requests: dict[Arrived, Submission]) -> None:
        """Begin to ask the broker about the queues of these requests."""
        if not requests or self._has_stopped:
            return
        consumers = {arrived.consumer for arrived in requests}  # an earlier consumer's messages are delivered again
        self._waiting = {each: one for each, one in self._waiting.items() if each.consumer in consumers} | requests
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._admit(), name="admit")

    async def _admit(self) -> None:
        while self._waiting:
            arrived, one = next(iter(self._waiting.items()))
            try:
                await self._admit_one(one, arrived)
            finally:
                self._waiting.pop(arrived, None)

    async def _admit_one(self, one: Submission, arrived: Arrived) -> None:
        """Put an admitted request back into the inbox; make a dead letter of any other, or have it come again."""
        try:
            await self._new_queues.admit_run(one)
        except TooManyNewQueues as error:
            await self._settling.retry(arrived, error.wait, str(error))
        except InvalidRequest as error:
            await self._settling.settle(Batch(refused=[(arrived, str(error.within("payload")))]))
        else:
            self._inbox.put([arrived])
