"""The Redis that BullMQ uses: how it is reached, and what is wrong when it is not."""

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

from oraculo.errors import Fault, InvalidSettings

T = TypeVar("T")

CONNECT_TIMEOUT = 3.0
COMMAND_TIMEOUT = 10.0
BLOCKING_TIMEOUT = 30.0  # of a connection whose calls wait for something; longer than any of them waits
MOST_CONNECTIONS = 16  # of one client; BullMQ's worker would open one for each job that it may take
WATCH_PAUSE = 1.0
SETTING = "ORACULO_BULLMQ_URL"

# What cannot be done now and is worth another try; a wrong password too, for it may be mended on the server. Where
# redis-py has a type for an error it takes the code off the text; inside a script or a transaction the code is there.
_PASSING_TYPES = (ClusterDownError, NoScriptError, OutOfMemoryError, ReadOnlyError, TryAgainError)
_PASSING = re.compile(
    r"\b(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOREPLICAS|OOM|READONLY|TRYAGAIN|UNBLOCKED|WRONGPASS) "
    r"|invalid (username|password)"
)
_DATABASE = re.compile(r"/?\d*")
_IN_PIPELINE = "of pipeline caused error: "  # what redis-py puts before is the command, with names that are not ours

_log = structlog.get_logger("oraculo.bullmq")


class BullmqRedis:
    """Opened by use, and again after each loss. `client` is for calls that return at once."""

    def __init__(self, url: str, prefix: str = "") -> None:
        self._url = url
        self._probe = f"oraculo:{prefix}ponte-bullmq:watch"
        self.place = _place_of(url)
        self.trouble: str | None = f"not connected to {self.place} yet"
        self.client: Any = self.connection(timeout=COMMAND_TIMEOUT)

    def connection(self, *, timeout: float, tries: int = 0) -> Any:
        """A client of its own. `tries`: how often a call is made again when the connection is lost meanwhile."""
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
        """For ever: whether it can be used."""
        while True:
            await self.ask()
            await asyncio.sleep(WATCH_PAUSE)

    async def ask(self) -> bool:
        """Whether it takes writes of ours: one that is full, or a replica, answers and is of no use."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self.try_to_write()
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)
            return False
        if self.trouble is not None:
            _log.info("bullmq can be used", server=self.place)
        self.trouble = None
        return True

    async def try_to_write(self) -> None:
        """What leaves nothing behind, by a command that is needed anyway. Raises what redis-py does."""
        await self.client.zadd(self._probe, {"x": 0}, xx=True)

    def _failed(self, error: BaseException) -> None:
        answers = isinstance(error, ResponseError)
        what = f"{self.place} refuses to write {self._probe}" if answers else f"cannot reach {self.place}"
        trouble = f"{what}: {_told(error)}"
        if self.trouble != trouble:
            _log.warning("bullmq cannot be used; steps for it wait", reason=trouble)
        self.trouble = trouble

    async def close(self) -> None:
        await close_client(self.client)


def is_passing(error: BaseException) -> bool:
    """Whether it is worth another try: the server is away, or cannot do it now. Else it says no."""
    if isinstance(error, ResponseError) and not isinstance(error, LostConnection):
        cause = str(error).rpartition(_IN_PIPELINE)[2]
        return isinstance(error, _PASSING_TYPES) or _PASSING.search(cause) is not None
    return isinstance(error, RedisError | OSError | TimeoutError)


async def close_client(client: Any) -> None:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            await client.aclose()
    except (RedisError, OSError, TimeoutError) as error:
        _log.debug("a connection did not close", reason=_told(error))


async def within(seconds: float, awaitable: Awaitable[T]) -> T | None:
    """Its result, or None when it takes longer: then it is cancelled."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        return None


def _place_of(url: str) -> str:
    """`host:port`, without the password. Raises InvalidSettings."""
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


def _told(error: BaseException) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
