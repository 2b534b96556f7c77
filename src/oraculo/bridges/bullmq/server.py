"""The Redis that BullMQ uses: how the bridge connects to it, and what is wrong when it cannot be used."""

import asyncio
import re
from collections.abc import Awaitable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as LostConnection

from oraculo.clients.subscription import LONGEST_PAUSE
from oraculo.errors import Fault, InvalidSettings

T = TypeVar("T")

CONNECT_TIMEOUT = 3.0
COMMAND_TIMEOUT = 10.0
BLOCKING_TIMEOUT = 30.0  # for connections whose calls wait for something; longer than any of them waits
MOST_CONNECTIONS = 16  # for one client; BullMQ's worker would open one for each job that it may take
WATCH_PAUSE = 1.0
REFUSED_FOR = LONGEST_PAUSE + 10.0  # seconds since a part was last refused: longer than it waits before it tries again
SETTING = "ORACULO_BULLMQ_URL"

# Errors worth another try; a wrong password too, because somebody may correct it on the server. Where redis-py has a
# type for an error it takes the code off the text. Inside a script or a transaction the code stays in the text.
_PASSING_TYPES = (ClusterDownError, NoScriptError, OutOfMemoryError, ReadOnlyError, TryAgainError)
_PASSING = re.compile(
    r"\b(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOREPLICAS|OOM|READONLY|TRYAGAIN|UNBLOCKED|WRONGPASS) "
    r"|invalid (username|password)"
)
_DATABASE = re.compile(r"/?\d*")
_IN_PIPELINE = "of pipeline caused error: "  # redis-py puts the command before it, which holds names of users

_log = structlog.get_logger("oraculo.bullmq")


class BullmqRedis:
    """The connection to BullMQ's Redis. Use opens it, and opens it again after a loss.

    `client` is for calls that return at once. `trouble` says why nothing can be written now.
    """

    def __init__(self, url: str, prefix: str = "") -> None:
        self._url = url
        self._probe = f"oraculo:{prefix}ponte-bullmq:watch"
        self.place = _place_of(url)
        self.trouble: str | None = f"not connected to {self.place} yet"
        self.client: Any = self.connection(timeout=COMMAND_TIMEOUT)

    def connection(self, *, timeout: float, tries: int = 0) -> Any:
        """Return another client. `tries`: how often a call is repeated when the connection is lost meanwhile."""
        retry = Retry(ExponentialBackoff(cap=1, base=0.05) if tries else NoBackoff(), tries)
        pool = BlockingConnectionPool.from_url(
            self._url,
            max_connections=MOST_CONNECTIONS,
            timeout=BLOCKING_TIMEOUT,  # for one of them to be free
            decode_responses=True,
            encoding_errors="replace",  # what others wrote must not break the reading of what is ours
            socket_connect_timeout=CONNECT_TIMEOUT,
            socket_timeout=timeout,
            retry=retry,
        )
        return Redis.from_pool(pool)

    async def watch(self) -> None:
        """Keep `trouble` up to date, for ever."""
        while True:
            await self.takes_writes()
            await asyncio.sleep(WATCH_PAUSE)

    async def takes_writes(self) -> bool:
        """Return whether our keys can be written: a full Redis or a replica answers, and is of no use."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self.try_to_write()
        except (RedisError, OSError, TimeoutError) as error:
            self._note_trouble(error)
            return False
        if self.trouble is not None:
            _log.info("bullmq can be used", server=self.place)
        self.trouble = None
        return True

    async def try_to_write(self) -> None:
        """Write nothing, with a command that needs the right to write. Raises what redis-py raises."""
        await self.client.zadd(self._probe, {"x": 0}, xx=True)

    def _note_trouble(self, error: BaseException) -> None:
        answers = isinstance(error, ResponseError)
        what = f"{self.place} refuses to write {self._probe}" if answers else f"cannot reach {self.place}"
        trouble = f"{what}: {_text_of(error)}"
        if self.trouble != trouble:
            _log.warning("bullmq cannot be used; steps for it wait", reason=trouble)
        self.trouble = trouble

    async def close(self) -> None:
        await close_client(self.client)


class Refusals:
    """The parts of the bridge to which Redis refuses what they need, for want of a right, while others work.

    A part cannot always say when it was let in, so each refusal is reported for a while.
    """

    def __init__(self) -> None:
        self._noted: dict[str, tuple[float, str]] = {}

    def note(self, part: str, error: BaseException) -> None:
        if isinstance(error, ResponseError) and not is_passing(error):
            self._noted[part] = (asyncio.get_running_loop().time(), str(error))

    @property
    def text(self) -> str | None:
        since = asyncio.get_running_loop().time() - REFUSED_FOR
        self._noted = {part: noted for part, noted in self._noted.items() if noted[0] > since}
        return "; ".join(f"Redis refuses what {part} needs: {why}" for part, (_, why) in self._noted.items()) or None


def is_passing(error: BaseException) -> bool:
    """Return whether an error is worth another try: the server is away, or cannot do it now."""
    if isinstance(error, ResponseError) and not isinstance(error, LostConnection):
        cause = str(error).rpartition(_IN_PIPELINE)[2]
        return isinstance(error, _PASSING_TYPES) or _PASSING.search(cause) is not None
    return isinstance(error, RedisError | OSError | TimeoutError)


async def close_client(client: Any) -> None:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            await client.aclose()
    except (RedisError, OSError, TimeoutError) as error:
        _log.debug("a connection did not close", reason=_text_of(error))


async def within(seconds: float, awaitable: Awaitable[T]) -> T | None:
    """Return its result, or cancel it and return None when it takes longer."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        return None


def _place_of(url: str) -> str:
    """Return `host:port`, without the password. Raises InvalidSettings."""
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise InvalidSettings(Fault(SETTING, "must begin with redis://, rediss:// or unix://"))
    try:
        parts = urlsplit(url)
        pool: Any = Redis.from_url(url).connection_pool
        pool.make_connection()  # which connects to nothing yet
        place = f"{parts.hostname or parts.path}:{parts.port or 6379}"
    except ValueError:  # its text may hold a part of the password
        right = "cannot be read; a ':', '@' or '/' in a password is written %3A, %40, %2F, and the port is a number"
        raise InvalidSettings(Fault(SETTING, right)) from None
    except TypeError:
        right = "has a parameter that redis-py's connections do not take, behind the '?'"
        raise InvalidSettings(Fault(SETTING, right)) from None
    if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):  # redis-py would take the first one instead
        raise InvalidSettings(Fault(SETTING, "has a path that is not a database's number, as redis://localhost:6379/2"))
    return place


def _text_of(error: BaseException) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
