"""How a queue of Celery's workers is, for whoever asks why a run waits."""

import asyncio
import contextlib
import threading

from oraculo.bridges.celery.connections import Address, queue_counts
from oraculo.pipeline.bridges import CELERY, Beyond, Bridge
from oraculo.settings import CelerySettings

_PATIENCE = 2.0  # seconds
_AT_ONCE = 4  # queues
_NO_REPLIES = ""  # the name of a queue that is never used: a look is not answered by workers

_Asked = asyncio.Future[Beyond | None]


class CeleryOutlook:
    """For a process that does not run the bridge. Raises InvalidSettings."""

    name = CELERY

    def __init__(self, settings: CelerySettings) -> None:
        self._default_queue = settings.queue
        self._look = QueueLook(Address(settings.broker_url, settings.key_prefix, _NO_REPLIES))

    async def beyond(self, destination: Bridge) -> Beyond | None:
        return await self._look.at(destination.queue or self._default_queue)

    async def stop(self) -> None:
        """Each look closes what it opened."""


class QueueLook:
    """kombu blocks, so each look has a thread of its own, for which neither a stop nor the end of the process waits.
    Who asks for a queue that is being looked at hears the same."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._under_way: dict[str, _Asked] = {}

    async def at(self, queue: str) -> Beyond | None:
        """None: it cannot be told now."""
        asked = self._under_way.get(queue) or self._ask(queue)
        if asked is None:
            return None
        done, _ = await asyncio.wait([asked], timeout=_PATIENCE)
        return asked.result() if done else None

    def _ask(self, queue: str) -> _Asked | None:
        if len(self._under_way) >= _AT_ONCE:
            return None
        loop = asyncio.get_running_loop()
        asked: _Asked = loop.create_future()

        def look() -> None:
            found = self._found(queue)
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would hear this
                loop.call_soon_threadsafe(self._tell, queue, found)

        try:
            threading.Thread(target=look, name="oraculo-celery-look", daemon=True).start()
        except RuntimeError:  # there is no room for one more
            return None
        self._under_way[queue] = asked
        return asked

    def _found(self, queue: str) -> Beyond | None:
        try:
            waiting, listening = queue_counts(self._address, queue)
        except Exception:  # noqa: BLE001 - each of kombu's transports has its own errors, and a sentence is worth having without
            return None
        return Beyond(f"Celery's queue {queue}", waiting, listening=listening)

    def _tell(self, queue: str, found: Beyond | None) -> None:
        self._under_way.pop(queue).set_result(found)
