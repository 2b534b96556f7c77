"""How a queue of Celery's workers is, for whoever asks why a run waits. kombu blocks, so this has its own thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from oraculo.bridges.celery.connections import Address, CeleryAway, queue_counts
from oraculo.core.bridge import Beyond

_PATIENCE = 2.0  # seconds


class QueueLook:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._thread: ThreadPoolExecutor | None = None  # made when somebody asks

    async def at(self, queue: str) -> Beyond | None:
        """None: it cannot be told now."""
        self._thread = self._thread or ThreadPoolExecutor(1, "oraculo-celery-look")
        asking = asyncio.get_running_loop().run_in_executor(self._thread, queue_counts, self._address, queue)
        try:
            waiting, listening = await asyncio.wait_for(asking, _PATIENCE)
        except (CeleryAway, TimeoutError):
            return None
        return Beyond(f"Celery's queue {queue}", waiting, listening=listening)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
