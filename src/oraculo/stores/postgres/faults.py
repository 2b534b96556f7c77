"""Translation of the errors of PostgreSQL, asyncpg and the network into ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
import msgspec

from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable

# Classes of SQLSTATE that concern what was written. Everything else concerns the server, its owner or the
# network, and may be repaired while the engine waits: a revoked right, or a table that is being restored.
_OF_THE_DATA = frozenset(
    {
        "22",  # an impossible value
        "23",  # a constraint
        "54",  # over a limit of the server
    }
)
# Beginnings of SQLSTATEs that concern the server, its owner or other users, and no batch: no commit is taken until that
# is repaired. Those that a large batch may cause are left out: no memory (53200), a limit (53400), an ended statement
# (57014, 57P01). So is a locked row (55P03).
_REFUSALS = (
    "25006",  # the server is read-only
    "28",  # the login
    "3D",  # no such database
    "3F",  # no such schema
    "42",  # a right, a table or a function that is missing
    "53100",  # its disk is full
    "53300",  # too many connections
    "55000",  # not accepting connections
    "55006",  # in use by another session
    "57P03",  # starting or stopping
    "XX001",  # a table is damaged
    "XX002",  # an index is damaged
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
    """Two transactions blocked each other, and this one wrote nothing. Try again at once."""


class Stale(StoreUnavailable):
    """The connection ended while it was idle, and nothing was sent. Try again at once, on another."""


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
    if isinstance(error, asyncpg.InternalClientError):  # the server is closing this connection
        return Stale(text)
    if state is not None and state.startswith(_REFUSALS):
        return StoreRefuses(text)
    return StoreUnavailable(text) if _is_worth_a_retry(error, state) else StoreError(text)


def _is_worth_a_retry(error: Exception, state: str | None) -> bool:
    if isinstance(error, asyncpg.PostgresError):
        return state is None or state[:2] not in _OF_THE_DATA
    # asyncpg's own: the connection is closed, or busy with what was given up; a ValueError is what it cannot encode.
    return isinstance(error, OSError | asyncpg.InterfaceError) and not isinstance(error, ValueError)


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, asyncpg.PostgresError):
        return f"{error.args[0]} ({getattr(error, 'sqlstate', None) or 'no code'})"
    return str(error) or type(error).__name__
