"""How a queue of BullMQ is, for whoever asks why a run waits: the same keys in BullMQ and old Bull."""

from typing import Any

from redis.exceptions import RedisError

from oraculo.bridges.bullmq.server import BullmqRedis, within
from oraculo.pipeline.bridges import BULLMQ, Beyond, Bridge
from oraculo.settings import BullmqSettings

_PATIENCE = 1.0  # seconds
_MARKER = "0:"  # what BullMQ 4 puts at the end of `wait` to wake a worker is no job


class BullmqOutlook:
    """For a process that does not run the bridge. Connected by the first look."""

    name = BULLMQ

    def __init__(self, settings: BullmqSettings) -> None:
        self._prefix = settings.prefix
        self._server = BullmqRedis(settings.url)

    async def beyond(self, destination: Bridge) -> Beyond | None:
        return await look_at(self._server.client, self._prefix, destination.target)

    async def stop(self) -> None:
        await self._server.close()


async def look_at(client: Any, prefix: str, queue: str) -> Beyond | None:
    """None: it cannot be told now."""

    def key(name: str) -> str:
        return f"{prefix}:{queue}:{name}"

    pipe = client.pipeline(transaction=False)
    pipe.llen(key("wait")).llen(key("paused")).zcard(key("prioritized")).llen(key("active"))
    pipe.lindex(key("wait"), -1).hexists(key("meta"), "paused").exists(key("meta-paused"))
    try:
        replies = await within(_PATIENCE, pipe.execute())
    except (RedisError, OSError):
        return None
    if replies is None:
        return None
    ready, set_aside, prioritized, active, last, is_paused, was_paused = replies
    waiting = ready + set_aside + prioritized - (last or "").startswith(_MARKER)
    return Beyond(f"BullMQ's queue {queue}", waiting, held=active, is_paused=bool(is_paused or was_paused))
