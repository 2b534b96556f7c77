"""The border: errors of pymongo, of the BSON encoder and of the network become ours."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from bson.errors import BSONError
from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
)

from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.settings.urls import redacted

_DUPLICATE_KEY = 11000
# Codes that speak of the server or its owner, and of no batch: nobody's is taken until that is mended.
_REFUSALS = frozenset(
    {
        13, 18, 8000,  # a right that is missing, the user or the password
        91, 11600,  # stopping
        133, 189, 10107, 11602, 13435, 13436,  # no primary, or one that steps down
        371, 14031,  # its owner lets nobody write, or no disk is left
    }
)  # fmt: skip
_WORTH_A_RETRY = _REFUSALS | frozenset(
    {
        6, 7, 74, 89, 9001,  # another server could not be reached
        20,  # the server was restarted outside its replica set, or the driver believes so
        24, 46, 112, 117, 314, 365, 462,  # busy: locks, clashes of writes, too much to do
        43, 175,  # a cursor, or a plan, that was lost
        50, 64, 202, 262,  # it took too long
        239, 246,  # a snapshot that is gone, or not there yet
        251,  # the transaction was ended by the server
        11601,  # asked to stop this
        146,  # no memory
    }
)  # fmt: skip
_LABELS_WORTH_A_RETRY = (
    "RetryableWriteError",
    "SystemOverloadedError",
    "TransientTransactionError",  # nothing of the transaction was written
    "UnknownTransactionCommitResult",  # all of it may have been written, or nothing
)
# What pymongo adds for programmers: the whole answer, the topology, the driver's own limits.
_NOT_FOR_PEOPLE = re.compile(r", full error: .*|, Timeout: .*| \(configured timeouts: [^)]*\)", re.DOTALL)
# pymongo's words for its own connections while the server stands still.
_STANDS_STILL = re.compile("operation cancelled|connection pool paused|[Tt]imed out while checking out a connection")
# An @ in the path, or behind hosts before which there is no login. An option of a URL with a login may have one.
_STRAY_AT = re.compile(r"[^/]*://([^/?@]*[/?].*@|[^/?]*/[^?]*@)", re.DOTALL)
# UnicodeError and the BSON encoder's own are ValueErrors.
_FOREIGN = (PyMongoError, BSONError, msgspec.MsgspecError, OSError, ValueError, OverflowError, RecursionError)


class Duplicate(StoreUnavailable):
    """An id or an idempotency key is in use, so nothing of the transaction was written."""


@contextmanager
def translated(place: str) -> Iterator[None]:
    try:
        yield
    except _FOREIGN as error:
        raise _kind_of(error)(f"MongoDB at {place}: {_in_words(error)}") from error


def _kind_of(error: Exception) -> type[StoreError]:
    codes = _codes(error)
    if _DUPLICATE_KEY in codes:
        return Duplicate
    if isinstance(error, NotPrimaryError) or (codes and codes <= _REFUSALS):
        return StoreRefuses
    return StoreUnavailable if _is_worth_a_retry(error, codes) else StoreError


def _is_worth_a_retry(error: Exception, codes: set[int | None]) -> bool:
    if isinstance(error, ConnectionFailure | WaitQueueTimeoutError | OSError):
        return True
    if not isinstance(error, PyMongoError):
        return False
    if error.timeout or any(map(error.has_error_label, _LABELS_WORTH_A_RETRY)):
        return True
    return bool(codes) and codes <= _WORTH_A_RETRY


def _codes(error: Exception) -> set[int | None]:
    if isinstance(error, BulkWriteError):
        return {fault.get("code") for fault in _faults(error)}
    return {error.code} if isinstance(error, OperationFailure) else set()


def _faults(error: BulkWriteError) -> Iterator[Mapping[str, Any]]:
    details = error.details or {}
    yield from details.get("writeErrors", ())
    yield from details.get("writeConcernErrors", ())


def _in_words(error: Exception) -> str:
    words = _NOT_FOR_PEOPLE.sub("", str(error))
    if isinstance(error, BulkWriteError):
        return "; ".join(dict.fromkeys(str(fault.get("errmsg")) for fault in _faults(error)))[:500] or words
    if isinstance(error, WriteConcernError):
        return f"a majority of its replica set does not confirm writes: {words}"
    if isinstance(error, ConnectionFailure | WaitQueueTimeoutError) and _STANDS_STILL.search(words):
        return f"it does not answer ({words})"
    if isinstance(error, ServerSelectionTimeoutError):
        return f"it cannot be reached: {words}"
    if isinstance(error, PyMongoError) and error.timeout:
        return f"no answer in time: {words}"
    if isinstance(error, OperationFailure):
        return f"{words} ({error.code})"
    return words or type(error).__name__


def place_of(url: str) -> str:
    """Return `host:port/database` for people, with nothing of a password, even one that is not percent-encoded."""
    return redacted(url).partition("://")[2].rpartition("@")[2].rstrip("/") or "localhost"


def refuse_unencoded(url: str) -> None:
    """Raise ValueError for a URL of which pymongo would take a part of the password for the host, and name it."""
    if _STRAY_AT.match(url):
        raise ValueError(
            "its URL has an @ behind the host; in user and password the characters / ? # @ : % are written "
            "percent-encoded: %2F %3F %23 %40 %3A %25"
        )
