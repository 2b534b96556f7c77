"""How queues and messages are laid out in Redis: the keys of a queue, the fields of an entry, and its id."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec

from oraculo.ports.broker import NO_REASON
from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES, DeadLetter
from oraculo.wire.naming import dlq_name

_DELAYED_SUFFIX = ":delayed"  # with a sign that no queue's name has: it is never the stream of another queue
_OURS = (b"reason", b"at", b"redeliveries")  # of a dead letter
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_SECONDS = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,9})?")


def keys(queue: str) -> tuple[str, str, str]:
    """The stream, what waits for a delay, and the dead letters; a dead-letter queue is its own."""
    return queue, queue + _DELAYED_SUFFIX, dlq_name(queue)


def is_text(key: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        return bool(key.decode())
    return False


def text(reason: str) -> bytes:
    """Whatever is in it: a reason quotes what was wrong, which may be half a character."""
    return reason.encode(errors="replace")


def content(fields: list[bytes]) -> tuple[bytes, int]:
    """The body, and how often it was delivered under earlier ids."""
    if len(fields) == 2 and fields[0] == b"body":
        return fields[1], 0
    named = table(fields)
    return named.get(b"body", b""), _count(named.get(b"redeliveries"))


def letter(queue: str, entry: bytes, fields: list[bytes]) -> DeadLetter:
    """Whoever put it there: what its fields do not say, its id does, or nothing."""
    named = table(fields)
    reason = named.get(b"reason", b"").decode(errors="replace") or NO_REASON
    at = _seconds(named.get(b"at")) or order(entry)[0] / 1000
    count = _count(named.get(b"redeliveries"))
    return DeadLetter(entry.decode(), queue, _shown_body(named), reason, at, count)


def as_far_as_shown(beginning: DeadLetter, size: int) -> DeadLetter:
    """Return a letter of which the server gave the beginning of a body of `size` bytes."""
    return beginning if size <= DEAD_LETTER_BODY_BYTES else msgspec.structs.replace(beginning, cut_from=size)


def _shown_body(named: dict[bytes, bytes]) -> bytes:
    """Of one that has its JSON elsewhere, all that it has, as text."""
    if b"body" in named:
        return named[b"body"]
    return b"\n".join(b"%s: %s" % field for field in named.items() if field[0] not in _OURS)


def table(reply: list[Any]) -> dict[bytes, Any]:
    """Names and values, which come in turns."""
    return dict(zip(reply[::2], reply[1::2], strict=True))


def order(entry: bytes | str) -> tuple[int, int]:
    """By which the ids of entries are sorted."""
    milliseconds, sequence = entry.split("-") if isinstance(entry, str) else entry.split(b"-")
    return int(milliseconds), int(sequence)


def is_id(candidate: str) -> bool:
    return _ID.fullmatch(candidate) is not None and max(map(int, candidate.split("-"))) < 2**64


def known_ids(ids: Iterable[str]) -> list[str]:
    """Those that can be ids, each once."""
    return [each for each in dict.fromkeys(ids) if is_id(each)]


def _count(field: bytes | None) -> int:
    """0 for what is no count."""
    return int(field) if field and field.isdigit() and len(field) < 10 else 0


def _seconds(field: bytes | None) -> float:
    """0 for what is no time."""
    return float(field) if field and _SECONDS.fullmatch(field) else 0.0
