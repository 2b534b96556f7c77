"""The border: what PostgreSQL, asyncpg and the network raise becomes ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import asyncpg
import msgspec

from oraculo.errors import StoreError, StoreUnavailable

# By the first two characters of SQLSTATE, or by all five.
_WORTH_A_RETRY = frozenset(
    {
        "08",  # the connection
        "28",  # the user or the password: it may be mended while the engine waits
        "40",  # a deadlock, or a clash of transactions
        "53",  # no disk, no memory, no connection left
        "57",  # starting, stopping, crashed; a statement that took too long
        "58",  # a fault of the disk
        "25006",  # a standby that does not take writes
        "3D000",  # no such database
        "55006",  # something is in use
        "55P03",  # a lock
    }
)
_CLASHES = frozenset({"40001", "40P01"})
_FOREIGN = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    msgspec.EncodeError,
    OSError,
    ValueError,
    OverflowError,
)


class Clash(StoreUnavailable):
    """Two transactions were in each other's way, and nothing of this one was written: again, at once."""


@contextmanager
def translated(place: str) -> Iterator[None]:
    try:
        yield
    except _FOREIGN as error:
        raise _ours(error, place) from error


def _ours(error: Exception, place: str) -> StoreError:
    text = f"PostgreSQL at {place}: {_in_words(error)}"
    state = getattr(error, "sqlstate", None)
    if state in _CLASHES:
        return Clash(text)
    return StoreUnavailable(text) if _is_worth_a_retry(error, state) else StoreError(text)


def _is_worth_a_retry(error: Exception, state: str | None) -> bool:
    if isinstance(error, asyncpg.PostgresError):
        return state is not None and (state in _WORTH_A_RETRY or state[:2] in _WORTH_A_RETRY)
    if isinstance(error, asyncpg.InternalClientError):
        return True
    # asyncpg's own: the connection is closed, or busy with what was given up; a ValueError is what it cannot encode.
    return isinstance(error, OSError | asyncpg.InterfaceError) and not isinstance(error, ValueError)


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, asyncpg.PostgresError):
        return f"{error.args[0]} ({getattr(error, 'sqlstate', None) or 'no code'})"
    return str(error) or type(error).__name__


def place_of(url: str) -> str:
    """`host:port/database`, for people: without the password."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2] or "localhost"
    return f"{hosts}{parts.path}"
