"""The layout in Redis: the keys of a queue, the fields of an entry, and its id."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from oraculo.ports.broker import NO_REASON
from oraculo.ports.broker_admin import DeadLetter
from oraculo.wire.naming import dlq_name

_DELAYED_SUFFIX = ":delayed"  # no queue's name has a colon, so it is never another queue's stream
_OURS = (b"reason", b"at", b"redeliveries")  # fields of a dead letter
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_SECONDS = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,9})?")


def keys(queue: str) -> tuple[str, str, str]:
    """Return the keys of the stream, its delayed messages and its dead letters. A dead-letter queue is its own."""
    return queue, queue + _DELAYED_SUFFIX, dlq_name(queue)


def is_text(key: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        return bool(key.decode())
    return False


def text(reason: str) -> bytes:
    """Return a reason as bytes. It may quote a broken character."""
    return reason.encode(errors="replace")


def content(fields: list[bytes]) -> tuple[bytes, int]:
    """Return the body, and how often it was delivered under earlier ids."""
    if len(fields) == 2 and fields[0] == b"body":
        return fields[1], 0
    named = table(fields)
    return named.get(b"body", b""), _count(named.get(b"redeliveries"))


def letter(queue: str, entry: bytes, fields: list[bytes]) -> DeadLetter:
    """Return the dead letter in an entry. A plain client's entry may lack fields; the id gives the time."""
    named = table(fields)
    reason = named.get(b"reason", b"").decode(errors="replace") or NO_REASON
    at = _seconds(named.get(b"at")) or order(entry)[0] / 1000
    count = _count(named.get(b"redeliveries"))
    return DeadLetter(entry.decode(), queue, _shown_body(named), reason, at, count)


def _shown_body(named: dict[bytes, bytes]) -> bytes:
    """Return the body or, where an entry has none, all its fields as text."""
    if b"body" in named:
        return named[b"body"]
    return b"\n".join(b"%s: %s" % field for field in named.items() if field[0] not in _OURS)


def table(reply: list[Any]) -> dict[bytes, Any]:
    """Return a dict from a list in which names and values alternate."""
    return dict(zip(reply[::2], reply[1::2], strict=True))


def order(entry: bytes | str) -> tuple[int, int]:
    """Return the sort key of an entry's id."""
    milliseconds, sequence = entry.split("-") if isinstance(entry, str) else entry.split(b"-")
    return int(milliseconds), int(sequence)


def is_id(candidate: str) -> bool:
    return _ID.fullmatch(candidate) is not None and max(map(int, candidate.split("-"))) < 2**64


def known_ids(ids: Iterable[str]) -> list[str]:
    """Return the texts that can be ids, each once."""
    return [each for each in dict.fromkeys(ids) if is_id(each)]


def _count(field: bytes | None) -> int:
    """Return the count in a field, or 0."""
    return int(field) if field and field.isdigit() and len(field) < 10 else 0


def _seconds(field: bytes | None) -> float:
    """Return the time in a field, or 0."""
    return float(field) if field and _SECONDS.fullmatch(field) else 0.0
