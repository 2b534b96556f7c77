"""Looks at the queues behind a bridge that other processes run, without waiting again and again for a silent one."""

import asyncio

from oraculo.pipeline.bridges import Beyond, Bridge
from oraculo.ports.bridge import Outlook

SILENT = 0.5  # seconds without an answer, after which the other system counts as unreachable
SPARED = 30.0  # seconds in which an unreachable system is not asked again


class SparingOutlook:
    """An outlook that spares a silent system for a while.

    A bridge knows when its system is away. A process without it would wait for the system at each look.
    """

    def __init__(self, outlook: Outlook) -> None:
        self.name = outlook.name
        self._outlook = outlook
        self._spared_until = 0.0

    async def beyond(self, destination: Bridge) -> Beyond | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began < self._spared_until:
            return None
        found = await self._outlook.beyond(destination)
        if found is None and loop.time() - began >= SILENT:
            self._spared_until = loop.time() + SPARED
        return found

    async def stop(self) -> None:
        await self._outlook.stop()
