"""Counts the jobs that wait in a queue of BullMQ, for whoever asks why a run waits. Old Bull has the same keys."""

from redis.exceptions import RedisError

from oraculo.bridges.bullmq.server import BullmqRedis, within
from oraculo.pipeline.bridges import BULLMQ, Bridge, ForeignQueue
from oraculo.settings import BullmqSettings

PATIENCE = 1.0  # seconds
_MARKER = "0:"  # BullMQ 4 puts one at the end of `wait`, to wake a worker; it is no job


class BullmqQueues:
    """The queues of BullMQ. It connects at the first look."""

    name = BULLMQ

    def __init__(self, settings: BullmqSettings) -> None:
        self._prefix = settings.prefix
        self._server = BullmqRedis(settings.url)

    async def state_of(self, destination: Bridge) -> ForeignQueue | None:
        """Return how many jobs wait and are in work, and whether the queue is paused; None when Redis does not say."""
        base = f"{self._prefix}:{destination.target}:"
        pipe = self._server.client.pipeline(transaction=False)
        pipe.llen(base + "wait").llen(base + "paused").zcard(base + "prioritized").llen(base + "active")
        pipe.lindex(base + "wait", -1).hexists(base + "meta", "paused").exists(base + "meta-paused")
        try:
            replies = await within(PATIENCE, pipe.execute())
        except (RedisError, OSError):
            return None
        if replies is None:
            return None
        ready, set_aside, prioritized, active, last, is_paused, was_paused = replies
        waiting = ready + set_aside + prioritized - (last or "").startswith(_MARKER)
        place = f"BullMQ's queue {destination.target}"
        return ForeignQueue(place, waiting, held=active, is_paused=bool(is_paused or was_paused))

    async def stop(self) -> None:
        await self._server.close()
