"""The border: what PostgreSQL, asyncpg and the network raise becomes ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
import msgspec

from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable

# The kinds of SQLSTATE that speak of what was to be written. Everything else is the server's, its owner's or the
# network's and may be mended while the engine waits: a right that was taken away, a table that is being restored.
_OF_THE_DATA = frozenset(
    {
        "22",  # a value that cannot be
        "23",  # a constraint
        "54",  # too large for a limit of the server
    }
)
# How a SQLSTATE begins that speaks of the server, its owner or whoever else uses it, and of no batch: nobody's is taken
# until that is mended. What may come of too large a batch is not among them: no memory (53200), a limit (53400), and
# that it was ended in the middle (57014, 57P01); nor that one of its rows is locked (55P03).
_REFUSALS = (
    "25006",  # it is read-only
    "28",  # the login
    "3D",  # no such database
    "3F",  # no such schema
    "42",  # a right, a table or a function that is missing
    "53100",  # its disk is full
    "53300",  # too many connections
    "55000",  # closed to all
    "55006",  # in use by another
    "57P03",  # it is starting or stopping
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
    """Two transactions were in each other's way, and nothing of this one was written: again, at once."""


class Stale(StoreUnavailable):
    """The connection had ended while nobody used it, and nothing was sent on it: again, at once, on another."""


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
    if isinstance(error, asyncpg.InternalClientError):  # it has read that the server ends it, and not yet that it did
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
