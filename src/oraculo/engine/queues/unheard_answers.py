"""Whether anybody hears the answers, for an API beside engines.

Engines that use another prefix or another broker share the store all the same, and give their signs of life there. Runs
are accepted then, workers answer, and the answers wait where nobody listens.
"""

import asyncio

from oraculo.errors import OraculoError
from oraculo.ports.broker_admin import FullBroker, QueueState

_EVERY = 2.0  # seconds from one look to the next
_LOOKS = 3  # in a row: an engine that lost its connection needs a second or two, and NATS does not tell who listens
_PATIENCE = 5.0
_SEE = "see whether the engines have the same ORACULO_BROKER_URL and ORACULO_PREFIX, or why by their own /health/ready"


class UnheardAnswers:
    def __init__(self, broker: FullBroker, queue: str) -> None:
        self.trouble: str | None = None
        self._broker = broker
        self._queue = queue
        self._in_a_row: dict[str, int] = {}  # looks at which answers waited unheard, by where they did

    async def run(self) -> None:
        try:
            while True:
                await self.look()
                await asyncio.sleep(_EVERY)
        finally:
            self.trouble = None  # of what is not looked at nothing is known

    async def look(self) -> None:
        unheard = await self._unheard()
        self._in_a_row = {place: self._in_a_row.get(place, 0) + 1 for place in unheard}
        told = [unheard[place] for place, looks in self._in_a_row.items() if looks >= _LOOKS]
        self.trouble = f"{'; '.join(told)}: {_SEE}" if told else None

    async def _unheard(self) -> dict[str, str]:
        """By the queue, or of several brokers by each that works."""
        try:
            async with asyncio.timeout(_PATIENCE):
                states = await self._broker.queues([self._queue])
        except (OraculoError, TimeoutError):  # which is told as the broker's own trouble
            return {}
        at = {f"{self._queue} at broker {name}": part for state in states for name, part in state.at.items()}
        at = at or {state.queue: state for state in states}
        return {place: _waiting(place, state) for place, state in at.items() if _waits_unheard(state)}


def _waits_unheard(state: QueueState) -> bool:
    """Only where something waits, and for no delay: of any queue without a leader RabbitMQ says that nothing is there
    and nobody listens."""
    return state.ready > state.delayed and (state.consumers == 0 or (state.consumers is None and state.unacked == 0))


def _waiting(place: str, state: QueueState) -> str:
    count = state.ready - state.delayed
    waiting, them = ("1 message waits", "it") if count == 1 else (f"{count} messages wait", "them")
    nobody = "nobody listens" if state.consumers == 0 else f"nobody seems to take {them}"
    return f"{waiting} in queue {place}, where answers come, and {nobody}"
