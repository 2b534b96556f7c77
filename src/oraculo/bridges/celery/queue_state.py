"""Counts the messages and workers of a Celery queue, for the explanation of a run that waits."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import kombu

from oraculo.bridges.celery.connections import CeleryBroker, CeleryQueueUnavailable, SetupTimeout, close, open_channel
from oraculo.pipeline.bridges import CELERY, Bridge, ForeignQueue
from oraculo.settings import CelerySettings

_TIMEOUT = 2.0  # seconds that a person waits
_MAX_AT_ONCE = 4  # queues; kombu blocks a thread for each


class CeleryQueues:
    """The queues of Celery. Raises InvalidSettings."""

    name = CELERY

    def __init__(self, settings: CelerySettings) -> None:
        self._default_queue = settings.queue
        self._celery_broker = CeleryBroker(settings.broker_url, settings.key_prefix)
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, "oraculo-celery-queues")

    async def state_of(self, destination: Bridge) -> ForeignQueue | None:
        """Return the state of a destination's queue, or None if Celery's broker does not answer soon."""
        queue = destination.queue or self._default_queue
        with contextlib.suppress(TimeoutError, RuntimeError):  # the threads have ended
            async with asyncio.timeout(_TIMEOUT):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, _state_of, self._celery_broker, queue)
        return None

    async def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _state_of(celery_broker: CeleryBroker, queue: str) -> ForeignQueue | None:
    connection = celery_broker.connection()
    waiting, consumers = 0, 0
    try:
        with (
            contextlib.suppress(CeleryQueueUnavailable),  # nobody has declared the queue yet
            celery_broker.faults(connection),
            SetupTimeout(connection),
        ):
            celery_broker.connect(connection)
            with open_channel(connection) as channel:
                found = kombu.Queue(queue, channel=channel).queue_declare(passive=True)
            waiting, consumers = int(found.message_count), int(found.consumer_count)
    except Exception:  # noqa: BLE001 - an explanation can do without, whatever kombu raises
        return None
    finally:
        close(connection)
    # Redis does not know who reads a list.
    return ForeignQueue(f"Celery's queue {queue}", waiting, listening=consumers if celery_broker.is_amqp else None)
