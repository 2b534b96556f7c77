"""Looks at the queues behind a bridge that other processes run, without waiting again and again for a silent one."""

import asyncio

from oraculo.pipeline.bridges import Bridge, ForeignQueue
from oraculo.ports.bridge import ForeignQueues

SILENT = 0.5  # seconds without an answer, after which the other system counts as unreachable
SPARED = 30.0  # seconds in which an unreachable system is not asked again


class SparingForeignQueues:
    """A look at foreign queues that spares a silent system for a while.

    A bridge knows when its system is away. A process without it would wait for the system at each look.
    """

    def __init__(self, queues: ForeignQueues) -> None:
        self.name = queues.name
        self._queues = queues
        self._spared_until = 0.0

    async def state_of(self, destination: Bridge) -> ForeignQueue | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began < self._spared_until:
            return None
        found = await self._queues.state_of(destination)
        if found is None and loop.time() - began >= SILENT:
            self._spared_until = loop.time() + SPARED
        return found

    async def stop(self) -> None:
        await self._queues.stop()
