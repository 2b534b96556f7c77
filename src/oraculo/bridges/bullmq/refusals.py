"""What Redis refuses to one part of the bridge, for want of a right say, while it can be used otherwise."""

import asyncio

from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.server import is_passing
from oraculo.clients.subscription import LONGEST_PAUSE

_TOLD_FOR = LONGEST_PAUSE + 10.0  # seconds since the last time: longer than any part waits before it tries again


class Refusals:
    """Told until nothing was refused for a while: not every part can say when it was let in."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[float, str]] = {}

    def note(self, part: str, error: BaseException) -> None:
        if isinstance(error, ResponseError) and not is_passing(error):
            self._noted[part] = (asyncio.get_running_loop().time(), str(error))

    @property
    def told(self) -> str | None:
        since = asyncio.get_running_loop().time() - _TOLD_FOR
        told = [f"Redis refuses what {part} needs: {why}" for part, (at, why) in self._noted.items() if at > since]
        return "; ".join(told) or None
