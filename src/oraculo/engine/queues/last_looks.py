"""The last look at the queues of what is due soon, so that a timeout has a reason and waits for no broker."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from types import MappingProxyType

from oraculo.core.phase import Looks
from oraculo.core.plan import Plan
from oraculo.core.run import RunStatus
from oraculo.engine.decide.cache import Plans
from oraculo.engine.queues.looks import QueueLooks
from oraculo.engine.queues.served import ServedQueues
from oraculo.errors import StoreError
from oraculo.ports.clock import Clock
from oraculo.ports.store import Due, Store
from oraculo.ports.threads import handed_over_if_wide

_EVERY = 1.0  # seconds from one look to the next
_AHEAD = 2.0  # seconds before a timer rings in which its queue is looked at
_MOST_DUE = 500  # timers that are looked at, the next ones first
_MOST_QUEUES = 200  # one look at so many takes RabbitMQ 0.1 s, NATS 0.04 s and Redis 0.01 s
_MOST_MEANT = 20  # queues for which a similar name is searched, at up to 0.01 s each


class LastLooks:
    """The loop that looks at the queues of timers about to ring."""

    def __init__(
        self, store: Store, plans: Plans, clock: Clock, threads: Executor, queue_looks: QueueLooks, served: ServedQueues
    ) -> None:
        self._store = store
        self._plans = plans
        self._clock = clock
        self._threads = threads
        self._queue_looks = queue_looks
        self._served = served
        self._looks: Looks = MappingProxyType({})

    def looks(self) -> Looks:
        """Return the queues of what is due now, as the last look saw them."""
        return self._looks

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            try:
                due = await self._store.due(self._clock.now() + _AHEAD, _MOST_DUE)
                queues = await self._queues_of(due) if due else []
            except StoreError:  # the timers, which need it more, log that
                queues = []
            looks = await self._queue_looks.at(queues) if queues else {}
            unserved = [place for place, look in looks.items() if look.is_unserved]
            meant = {place: await self._served.near(place[0]) for place in unserved[:_MOST_MEANT]}
            self._looks = {place: look._replace(meant=meant.get(place)) for place, look in looks.items()}

    async def _queues_of(self, due: Sequence[Due]) -> list[str]:
        """Return the queues of open runs whose timers these are."""
        plans = await self._plans_of(dict.fromkeys(one.run_id for one in due))
        found = dict[str, None]()
        for one in due:
            if (plan := plans.get(one.run_id)) is not None:
                steps = plan.steps if one.task is None else (plan.steps[one.task],)
                found.update((step.queue, None) for step in steps)
            if len(found) >= _MOST_QUEUES:
                break
        return list(found)[:_MOST_QUEUES]

    async def _plans_of(self, run_ids: Iterable[str]) -> Mapping[str, Plan]:
        """Return the plans by run. A whole run is read only when its plan is not in memory."""
        heads = await self._store.heads(list(run_ids))
        found = dict[str, Plan]()
        for run_id, head in heads.items():
            if head.status is not RunStatus.RUNNING:
                continue
            if (plan := self._plans.known(head.definition_hash)) is None:
                if (snapshot := (await self._store.load([run_id])).get(run_id)) is None:
                    continue
                restore = partial(self._plans.restore, snapshot)
                plan = (await handed_over_if_wide(self._threads, len(snapshot.tasks), restore)).plan
            found[run_id] = plan
        return found
