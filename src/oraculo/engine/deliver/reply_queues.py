"""Reply queues: sends aggregates to them, as messages."""

import msgspec

from oraculo.core.run import RunDelivery
from oraculo.engine.results.get import ResultReader
from oraculo.errors import MessageTooLarge
from oraculo.ports.broker import Outgoing, Publisher, publish_all
from oraculo.ports.clock import Clock
from oraculo.wire import naming
from oraculo.wire.message import Message, encode_message
from oraculo.wire.naming import QueueNames
from oraculo.wire.timestamps import to_iso


class ReplyQueues:
    """The sender of aggregates to reply queues."""

    def __init__(self, publisher: Publisher, results: ResultReader, names: QueueNames, clock: Clock) -> None:
        self._publisher = publisher
        self._results = results
        self._names = names
        self._clock = clock

    async def send(self, run_id: str, delivery: RunDelivery, aggregate: bytes) -> None:
        """Send an aggregate. Raise BrokerError; MessageTooLarge when the broker takes it in no form."""
        try:
            await self._publish(run_id, delivery, aggregate)
        except MessageTooLarge as error:
            smaller = await self._results.lessened(run_id, aggregate, error.excess)
            if smaller is None:
                raise
            await self._publish(run_id, delivery, smaller)

    async def _publish(self, run_id: str, delivery: RunDelivery, aggregate: bytes) -> None:
        message = Message(
            correlation_id=run_id,
            tipo_evento=naming.RUN_ENDED,
            payload=msgspec.Raw(aggregate),
            timestamp=to_iso(self._clock.now()),
        )
        queue = self._names.reply_queue(delivery.target)
        reply = Outgoing(queue, encode_message(message), prefer=delivery.via, is_reply=True, leaves_room=True)
        await publish_all(self._publisher, [reply])
