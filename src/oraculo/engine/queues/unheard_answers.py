"""The answers that nobody hears, as an API beside engines sees them.

Engines with another prefix or another broker share the store all the same, and give their signs of life there. Then
runs are accepted and workers answer, but the answers wait where nobody listens.
"""

import asyncio

from oraculo.errors import OraculoError
from oraculo.ports.broker_admin import FullBroker, QueueState

_EVERY = 2.0  # seconds from one look to the next
_LOOKS = 3  # in a row, because an engine may need two seconds to connect again, and NATS does not count listeners
_PATIENCE = 5.0
_SEE = "see whether the engines have the same ORACULO_BROKER_URL and ORACULO_PREFIX, or why by their own /health/ready"


class UnheardAnswers:
    """The loop that looks at the answers queue."""

    def __init__(self, broker: FullBroker, queue: str) -> None:
        self.trouble: str | None = None
        self._broker = broker
        self._queue = queue
        self._in_a_row: dict[str, int] = {}  # looks that found unheard answers, by place

    async def run(self) -> None:
        try:
            while True:
                await self.look()
                await asyncio.sleep(_EVERY)
        finally:
            self.trouble = None  # nothing is known without looks

    async def look(self) -> None:
        unheard = await self._unheard()
        self._in_a_row = {place: self._in_a_row.get(place, 0) + 1 for place in unheard}
        reports = [unheard[place] for place, looks in self._in_a_row.items() if looks >= _LOOKS]
        self.trouble = f"{'; '.join(reports)}: {_SEE}" if reports else None

    async def _unheard(self) -> dict[str, str]:
        """Return the unheard answers by queue, or by broker when there are several."""
        try:
            async with asyncio.timeout(_PATIENCE):
                states = await self._broker.queues([self._queue])
        except (OraculoError, TimeoutError):  # health shows that as the broker's own trouble
            return {}
        at = {f"{self._queue} at broker {name}": part for state in states for name, part in state.at.items()}
        at = at or {state.queue: state for state in states}
        return {place: _waiting(place, state) for place, state in at.items() if _waits_unheard(state)}


def _waits_unheard(state: QueueState) -> bool:
    """Return whether answers wait, without a delay, and nobody listens.

    A queue must hold something to count: RabbitMQ shows a queue without a leader as empty and unread.
    """
    return state.ready > state.delayed and (state.consumers == 0 or (state.consumers is None and state.unacked == 0))


def _waiting(place: str, state: QueueState) -> str:
    count = state.ready - state.delayed
    waiting, them = ("1 message waits", "it") if count == 1 else (f"{count} messages wait", "them")
    nobody = "nobody listens" if state.consumers == 0 else f"nobody seems to take {them}"
    return f"{waiting} in queue {place}, where answers come, and {nobody}"
