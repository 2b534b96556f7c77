"""The properties of a message: what they say of its deliveries and its death, and what travels on to another queue."""

import re
import struct
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from hashlib import blake2b
from itertools import count
from math import isfinite
from typing import Any
from uuid import uuid4

from pika import BasicProperties

from oraculo.ports.broker import NO_REASON
from oraculo.ports.broker_admin import DeadLetter
from oraculo.wire.naming import AMQP_REASON_HEADER, LONGEST_REASON

PERSISTENT = 2

_OURS = "x-oraculo-"
REDELIVERIES = _OURS + "redeliveries"
_ID = _OURS + "letter"
_DIED_AT = _OURS + "died-at"
OUR_HEADERS = (REDELIVERIES, _ID, AMQP_REASON_HEADER, _DIED_AT)
_COUNTERS = ("x-delivery-count", "x-acquired-count")  # failures and, since RabbitMQ 4.3, all; a classic queue has none
# Headers that the server wrote or would act upon: CC and BCC would send copies of a message that only moves.
_NOT_CARRIED = re.compile(rf"{_OURS}.*|x-delivery-count|x-acquired-count|x-death|x-(first|last)-death-.*|CC|BCC")
_LIMIT_REACHED = "delivery_limit"
_DEATHS = {
    _LIMIT_REACHED: "delivered too often and never settled",
    "rejected": "rejected by its consumer",
    "expired": "expired before it was consumed",
    "maxlen": "the queue was full",
}
LETTER_ID = re.compile(r"[0-9a-f]{14}-[0-9a-f]{14}(-[0-9]+)?")  # the time of death, and what tells it from others
_LATEST = 0xFFFFFFFFFFFFFF  # microseconds: the latest time that fits into an id
_HAS_HEADERS = BasicProperties.FLAG_HEADERS

_process = uuid4().hex[:8]
_sequence = count()


def encoded(properties: BasicProperties) -> bytes:
    return b"".join(properties.encode())


def redeliveries_of(properties: bytes, is_redelivered: bool) -> int:
    """Return how often a message was delivered before: by its own header, and by its queue's counter since."""
    if not struct.unpack_from(">H", properties)[0] & _HAS_HEADERS:
        return int(is_redelivered)
    headers = _decoded(properties).headers or {}
    counted = max([_number(headers.get(counter)) for counter in _COUNTERS])
    return _number(headers.get(REDELIVERIES)) + max(counted, int(is_redelivered))


def carried(properties: bytes, kept: Collection[str] = (), /, **ours: str | int) -> bytes:
    """Return the properties of a message that moves to another queue.

    Headers that belong to the old queue are left out, except those in `kept`.
    """
    own = _decoded(properties)
    headers = {name: value for name, value in (own.headers or {}).items() if name in kept or not _stays(name)}
    own.delivery_mode = PERSISTENT
    own.expiration = own.user_id = None  # it may not vanish, and the server takes no other user's name from us
    own.headers = headers | ours or None
    with suppress(Exception):  # a type that pika reads but does not write
        return encoded(own)
    own.headers = dict(ours) or None
    return encoded(own)


def fitted(properties: bytes, room: int) -> bytes:
    """Return properties that fit into one frame: only our headers, and as much of the reason as there is room for."""
    own = _decoded(properties)
    own.headers = {name: value for name, value in (own.headers or {}).items() if name in OUR_HEADERS}
    excess = len(encoded(own)) - room
    if excess > 0 and isinstance(reason := own.headers.get(AMQP_REASON_HEADER), str):
        own.headers[AMQP_REASON_HEADER] = reason.encode()[:-excess].decode(errors="ignore")
    return encoded(own)


def dead(properties: bytes, reason: str, at: float, redeliveries: int) -> bytes:
    """Return the properties of a dead letter. Its id begins with the time of death, so later ones are greater."""
    letter = f"{_time_part(at)}-{next(_sequence) % 0x1000000:06x}{_process}"
    return carried(properties, **{_ID: letter}, **_death_headers(reason, at, redeliveries))


def renewed(properties: bytes, letter: DeadLetter) -> bytes:
    """Return the properties of the same dead letter with no deliveries counted by its queue."""
    own_id = _own_id(_decoded(properties).headers or {})
    ours: dict[str, str | int] = {_ID: own_id} if own_id else {}  # the id of a plain letter comes from its content
    return carried(properties, **ours, **_death_headers(letter.reason, letter.at, letter.redeliveries))


def was_given_back(properties: bytes) -> bool:
    """Return True when its queue counted a delivery, or when the count cannot be read."""
    if _COUNTERS[0].encode() not in properties:  # cheap, for there may be many letters
        return False
    headers = _decoded(properties).headers
    return headers is None or _number(headers.get(_COUNTERS[0])) > 0


class LetterReader:
    """Reads the dead letters of one queue in their order.

    The letter of a plain client gets an id from its content and from the number of equal letters before it.
    """

    def __init__(self, queue: str, delivery_limit: int) -> None:
        self._queue = queue
        self._delivery_limit = delivery_limit
        self._equal: Counter[str] = Counter()

    def read(self, raw: bytes, body: bytes) -> DeadLetter:
        properties = _decoded(raw)
        headers: dict[str, Any] = properties.headers or {}
        at = _died_at(properties, headers)
        letter_id = _own_id(headers) or self._plain_id(properties, body, at)
        return DeadLetter(letter_id, self._queue, body, _reason(headers), at, self._redeliveries(headers))

    def _redeliveries(self, headers: dict[str, Any]) -> int:
        own = _number(headers.get(REDELIVERIES))
        # The server does not say how often it delivered what reached the limit.
        is_worn_out = AMQP_REASON_HEADER not in headers and _server_death(headers).get("reason") == _LIMIT_REACHED
        return own + self._delivery_limit - 1 if is_worn_out else own

    def _plain_id(self, properties: BasicProperties, body: bytes, at: float) -> str:
        named = f"{properties.message_id}\0{properties.correlation_id}\0".encode(errors="replace")
        plain = f"{_time_part(at)}-{blake2b(named + body, digest_size=7).hexdigest()}"
        self._equal[plain] += 1
        return plain if self._equal[plain] == 1 else f"{plain}-{self._equal[plain]}"


def _death_headers(reason: str, at: float, redeliveries: int) -> dict[str, str | int]:
    encodable = reason[:LONGEST_REASON].encode(errors="replace").decode()  # half a surrogate pair is not
    return {AMQP_REASON_HEADER: encodable, _DIED_AT: repr(at), REDELIVERIES: redeliveries}


def _time_part(at: float) -> str:
    return f"{min(int(max(at, 0.0) * 1_000_000), _LATEST):014x}"


def _stays(name: str | bytes) -> bool:
    """Return True for a header of the old queue. pika leaves names that are not UTF-8 as bytes."""
    return isinstance(name, str) and _NOT_CARRIED.fullmatch(name) is not None


def _decoded(properties: bytes) -> BasicProperties:
    """Decode as much as can be read.

    Clients write headers that pika cannot read, such as a time in milliseconds. An error here would end the whole
    connection, and every other message on it.
    """
    for readable in (bytes, _without_headers):
        with suppress(Exception):
            return BasicProperties().decode(readable(properties))
    return BasicProperties()


def _without_headers(properties: bytes) -> bytes:
    flags, start = struct.unpack_from(">H", properties)[0], 2
    for flag in (BasicProperties.FLAG_CONTENT_TYPE, BasicProperties.FLAG_CONTENT_ENCODING):  # these stand before them
        start += 1 + properties[start] if flags & flag else 0
    end = start + 4 + struct.unpack_from(">I", properties, start)[0]
    return struct.pack(">H", flags & ~_HAS_HEADERS) + properties[2:start] + properties[end:]


def _number(value: object) -> int:
    return int(value) if isinstance(value, int) else 0


def _own_id(headers: dict[str, Any]) -> str | None:
    letter = headers.get(_ID)
    return letter if isinstance(letter, str) and LETTER_ID.fullmatch(letter) else None


def _server_death(headers: dict[str, Any]) -> dict[str, Any]:
    """Return what the server wrote when it moved the message itself."""
    deaths = headers.get("x-death")
    return deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}


def _reason(headers: dict[str, Any]) -> str:
    if isinstance(own := headers.get(AMQP_REASON_HEADER), str):
        return own
    if isinstance(death := _server_death(headers).get("reason"), str):
        return f"moved by RabbitMQ: {_DEATHS.get(death, death)}"
    return NO_REASON


def _died_at(properties: BasicProperties, headers: dict[str, Any]) -> float:
    """Return the time of death, or 0 when nobody wrote one."""
    with suppress(ValueError, TypeError, OverflowError):
        at = float(headers[_DIED_AT]) if _DIED_AT in headers else _time_by_server(properties, headers)
        return at if isfinite(at) else 0.0
    return 0.0


def _time_by_server(properties: BasicProperties, headers: dict[str, Any]) -> float:
    time = _server_death(headers).get("time")
    return time.timestamp() if isinstance(time, datetime) else float(properties.timestamp or 0)
