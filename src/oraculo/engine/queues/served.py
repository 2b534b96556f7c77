"""The queues that somebody serves: one with a similar name may be meant when nobody serves a run's queue."""

import asyncio
from collections.abc import Collection

from oraculo.engine.queues.remembered import RememberedQueues
from oraculo.errors import BrokerError
from oraculo.pipeline.queue_rules import QueueRules
from oraculo.ports.broker_admin import BrokerAdmin, QueueState
from oraculo.wire.naming import QueueNames, is_own_queue, near_miss

_FRESH = 5.0  # seconds for which one look at all queues serves
_PATIENCE = 0.5  # seconds for the broker; without its answer nothing is suggested


class ServedQueues:
    """The names of served queues, looked up at most every few seconds."""

    def __init__(
        self, broker: BrokerAdmin, remembered: RememberedQueues, names: QueueNames, targets: QueueRules
    ) -> None:
        self._broker = broker
        self._remembered = remembered
        self._names = names
        self._targets = targets
        self._served: Collection[str] = ()
        self._fresh_until = 0.0
        self._turn = asyncio.Lock()

    async def near(self, queue: str) -> str | None:
        """Return the served queue with the most similar name, if one is similar enough."""
        async with self._turn:
            if (now := asyncio.get_running_loop().time()) >= self._fresh_until:
                self._served = await self._look()
                self._fresh_until = now + _FRESH
        return near_miss(queue, self._served)

    async def _look(self) -> Collection[str]:
        try:
            async with asyncio.timeout(_PATIENCE):
                listed = await self._broker.queues()
                states = [*listed, *await self._remembered.unlisted(listed, self._names)]
        except (BrokerError, TimeoutError):
            return ()
        served = [state.queue for state in states if _is_served(state) and state.queue.startswith(self._names.prefix)]
        return {name for name in map(self._names.logical, served) if self._may_be_named(name)}

    def _may_be_named(self, queue: str) -> bool:
        return not is_own_queue(queue) and self._targets.call_fault(queue) is None


def _is_served(state: QueueState) -> bool:
    """Return whether somebody reads the queue, or seems to where the broker does not count consumers."""
    return bool(state.consumers) or (state.consumers is None and (not state.ready or bool(state.unacked)))
