"""How it is beyond a bridge that other processes run, without waiting for it again and again."""

import asyncio

from oraculo.pipeline.bridges import Beyond, Bridge
from oraculo.ports.bridge import Outlook

SILENT = 0.5  # seconds after which no answer was not an answer: nobody could be reached
SPARED = 30.0  # seconds in which who was silent is not asked again


class SparingOutlook:
    """A bridge knows when its system is away. Who only looks now and then would wait for it each time."""

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
