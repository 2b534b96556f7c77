"""Keeps a queue of ours subscribed, whatever the broker does, and hands on what arrives in batches."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from oraculo.bridges.bullmq.server import Backoff
from oraculo.errors import OraculoError
from oraculo.ports.broker import Broker, Consumer, Delivery
from oraculo.ports.clock import Entropy
from oraculo.ports.telemetry import LoopFailed, Telemetry

PREFETCH = 100

Handle = Callable[[Consumer, Sequence[Delivery]], Awaitable[None]]


class Intake:
    """`handle` settles what it is given. Raising gives back all that is unsettled, after which it comes again."""

    def __init__(self, broker: Broker, queue: str, handle: Handle, entropy: Entropy, telemetry: Telemetry) -> None:
        self._broker = broker
        self._queue = queue
        self._handle = handle
        self._backoff = Backoff(entropy)
        self._telemetry = telemetry

    async def run(self) -> None:
        """For ever. When cancelled, what is not settled is given back."""
        while True:
            try:
                await self._broker.start()
                consumer = await self._broker.consume(self._queue, prefetch=PREFETCH)
                try:
                    await self._take(consumer)
                finally:
                    with suppress(OraculoError):
                        await consumer.close()
            except Exception as error:  # noqa: BLE001 - the bridge outlives whatever its broker does
                self._telemetry.emit(LoopFailed(f"bridge {self._queue}", f"{type(error).__name__}: {error}"))
            await self._backoff.pause()

    async def _take(self, consumer: Consumer) -> None:
        while deliveries := await consumer.take(PREFETCH):
            await self._handle(consumer, deliveries)
            self._backoff.reset()
