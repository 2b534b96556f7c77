"""The limits of new queues, for one request and for a minute: a broker keeps every queue."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from math import ceil

from oraculo.core.chunks import pages
from oraculo.core.run import Channel, Run
from oraculo.engine.inbox import Submission
from oraculo.engine.queues.known import KnownQueues
from oraculo.errors import BrokerError, Fault, InvalidRequest, TooManyNewQueues
from oraculo.ports.broker_admin import BrokerAdmin
from oraculo.settings.sections import QueueSettings
from oraculo.wire.naming import RABBITMQ_PREFIX, QueueNames, is_own_queue

MINUTE = 60.0
PATIENCE = 2.0  # seconds for the broker to say which queues exist; without its answer all count as new


class NewQueueLimits:
    """A count of the queues that are not known yet, by this process alone.

    While they are few, nobody asks the broker whether they exist, because a look in vain costs RabbitMQ a channel.
    `planned` returns the queues of known pipelines and routes, which engines make by themselves.
    """

    def __init__(
        self,
        broker: BrokerAdmin,
        known: KnownQueues,
        names: QueueNames,
        settings: QueueSettings,
        planned: Callable[[], Iterable[str]],
    ) -> None:
        self._planned = planned
        self._broker = broker
        self._known = known
        self._names = names
        self._settings = settings
        self._most = min(settings.new_per_request, settings.new_per_minute)
        self._admitted = KnownQueues()
        self._lately: deque[tuple[float, int]] = deque()  # when some were admitted, by the loop's time, and how many

    def admits_run_at_once(self, submission: Submission) -> bool:
        """Admit the queues of a run if they are few, even when all unknown ones are new.

        Return whether they were admitted.
        """
        return self._admits_at_once(self._queues_of(submission.changes.run))

    async def admit_run(self, submission: Submission) -> None:
        """Admit the queues that a run sends and replies to. Raise like `admit`."""
        await self._admit(self._queues_of(submission.changes.run), submission.queue_field)

    async def admit(self, queues: Iterable[str], field: str) -> None:
        """Admit queues that a field of a request names.

        Raise InvalidRequest when one request may never name so many new queues, TooManyNewQueues when it may later.
        """
        await self._admit(self._destinations(queues), field)

    def _destinations(self, queues: Iterable[str]) -> set[str]:
        return {self._names.physical(queue) for queue in queues if not is_own_queue(queue)}

    def _queues_of(self, run: Run) -> set[str]:
        """Return the queues of a run, without those of bridges and those that only RabbitMQ makes."""
        steps = self._destinations(step.queue for step in run.plan.steps)
        replies = [each.target for each in run.head.deliveries if each.channel is Channel.QUEUE]
        return steps | {self._names.reply_queue(name) for name in replies if not name.startswith(RABBITMQ_PREFIX)}

    def _admits_at_once(self, queues: Collection[str]) -> bool:
        new = self._unknown(queues)
        if len(new) > self._most or self._wait_for(len(new)):
            return False
        self._count(new)
        return True

    async def _admit(self, queues: set[str], field: str) -> None:
        if self._admits_at_once(queues):
            return
        planned = set(map(self._names.physical, self._planned()))
        new = await self._missing(self._unknown(queues - planned))
        if len(new) > self._most:
            raise InvalidRequest(
                Fault(field, f"names more than {self._most} new queues; {self._limit()} allows no more")
            )
        if wait := self._wait_for(len(new)):
            raise TooManyNewQueues(self._settings.new_per_minute, wait)
        self._count(new)

    def _limit(self) -> str:
        is_by_request = self._most == self._settings.new_per_request
        return "ORACULO_QUEUES_NEW_PER_REQUEST" if is_by_request else "ORACULO_QUEUES_NEW_PER_MINUTE"

    def _unknown(self, queues: Collection[str]) -> list[str]:
        return [queue for queue in queues if queue not in self._known and queue not in self._admitted]

    async def _missing(self, queues: list[str]) -> list[str]:
        """Return the queues that the broker lacks, or the first of them when they are too many."""
        missing: list[str] = []
        for some in pages(queues, self._most + 1):
            if len(missing) > self._most:
                break
            found = await self._there(some)
            self._known.add(found)
            missing += [queue for queue in some if queue not in found]
        return missing

    async def _there(self, queues: Collection[str]) -> set[str]:
        try:
            async with asyncio.timeout(PATIENCE):
                return {state.queue for state in await self._broker.queues(list(queues))}
        except (BrokerError, TimeoutError):
            return set()

    def _wait_for(self, count: int) -> int:
        """Return the seconds until there is room for so many more, 0 when there is."""
        now = asyncio.get_running_loop().time()
        while self._lately and self._lately[0][0] <= now - MINUTE:
            self._lately.popleft()
        excess = sum(each for _, each in self._lately) + count - self._settings.new_per_minute
        if not count or excess <= 0:
            return 0
        for at, each in self._lately:
            excess -= each
            if excess <= 0:
                return max(1, ceil(at + MINUTE - now))
        return ceil(MINUTE)

    def _count(self, queues: Collection[str]) -> None:
        if queues:
            self._admitted.add(queues)
            self._lately.append((asyncio.get_running_loop().time(), len(queues)))
