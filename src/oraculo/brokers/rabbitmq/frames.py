"""The frames that come by the thousand, read and written directly. Everything else on a connection is pika's.

pika makes a dozen objects for each message, which is most of the cost of a delivery or a confirm. So both are read from
the bytes here. A published message is three frames packed by hand, an ack is one.
"""

from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any, NamedTuple, Protocol

import pika
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.frame import decode_frame

_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_KINDS = frozenset({_METHOD, _HEADER, _BODY, _HEARTBEAT})
_FRAME_END = b"\xce"
_OVERHEAD = 8  # of a frame: its head and its end
_BASIC = 60
_DELIVER, _GOT, _ACK, _NACK = (_BASIC, 60), (_BASIC, 71), (_BASIC, 80), (_BASIC, 120)
_MULTIPLE = 1
_MOST_QUEUES = 10_000  # whose names are kept packed
_PIECE = 64 * 1024  # bytes, about: what is handed over for sending at once

_head = Struct(">BHI")  # kind, channel, size
_index = Struct(">HH")  # class, method
_content = Struct(">HHQ")  # class, weight, size of the body
_tag = Struct(">QB")  # delivery tag, bits
_number = Struct(">I")
_ack = Struct(">BHIHHQBc")  # a whole frame
_ACK_SIZE = _index.size + _tag.size


Fit = Callable[[bytes, int], bytes]  # cuts properties to a number of bytes


class Parcel(NamedTuple):
    """A message on its way to a queue."""

    queue: str
    properties: bytes  # as they stand in the content header
    body: bytes


class Receiver(Protocol):
    """A reader of some frames of one channel. It returns False for a frame that is for pika."""

    def frame(self, kind: int, buffer: bytes, start: int, end: int) -> bool: ...


class Connection(AsyncioConnection):  # type: ignore[misc, unused-ignore]
    """pika's connection, with receivers that see the frames of their channel first."""

    _frame_buffer: bytes  # the beginning of a frame whose end has not come yet

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.receivers: dict[int, Receiver] = {}  # by channel
        self.confirmed_at = 0.0  # the loop's time of the last confirm on any channel
        self.largest_message: int | None = None  # bytes, once the server has refused a message for its size
        super().__init__(*arguments, **options)

    def _on_data_available(self, data_in: bytes) -> None:
        buffer = self._frame_buffer + data_in if self._frame_buffer else data_in
        self._frame_buffer = b""
        start, end = 0, len(buffer)
        while end - start >= _OVERHEAD:
            kind, channel, size = _head.unpack_from(buffer, start)
            if kind not in _KINDS:  # the server speaks another version, and says so without a frame
                super()._on_data_available(buffer[start:])
                return
            following = start + size + _OVERHEAD
            if following > end:
                break
            receiver = self.receivers.get(channel)
            if receiver is None or not receiver.frame(kind, buffer, start + _head.size, following - 1):
                self._process_frame(decode_frame(buffer[start:following])[1])
            self.bytes_received += following - start
            start = following
        self._frame_buffer = buffer[start:]

    def emit(self, pieces: list[bytes]) -> None:
        """Send packed frames."""
        self._output_marshaled_frames(pieces)

    def ack(self, channel: int, tag: int, *, multiple: bool) -> None:
        """Send an ack soon: nobody waits for it."""
        if self._transport is not None:
            self._transport.write_soon(_ack.pack(_METHOD, channel, _ACK_SIZE, *_ACK, tag, multiple, _FRAME_END))

    def abort(self, reason: str) -> None:
        """End it without asking the server, which may be frozen. Soon after, pika reports it as lost."""
        if self._transport is not None:
            self._terminate_stream(pika.exceptions.StreamLostError(reason))
        elif not (self.is_closed or self.is_closing):  # nothing answered yet
            self.close()


class Deliveries:
    """Puts the messages of one channel together: `on_message(delivery tag, is redelivered, properties, body)`.

    After a message that was asked for alone, `on_got(how many are behind it)` follows.
    """

    def __init__(
        self, on_message: Callable[[int, bool, bytes, bytes], None], on_got: Callable[[int], None] | None = None
    ) -> None:
        self._on_message = on_message
        self._on_got = on_got
        self._behind: int | None = None  # None: the message was not asked for
        self._tag = 0  # of the message that is being received, or 0
        self._is_redelivered = False
        self._properties = b""
        self._missing = 0
        self._parts: list[bytes] = []

    def frame(self, kind: int, buffer: bytes, start: int, end: int) -> bool:
        if kind == _METHOD:
            return self._method(buffer, start)
        if not self._tag:
            return False
        if kind == _HEADER:
            self._missing = _content.unpack_from(buffer, start)[2]
            self._properties = buffer[start + _content.size : end]
        else:
            self._parts.append(buffer[start:end])
            self._missing -= end - start
        if self._missing <= 0:
            self._complete()
        return True

    def _method(self, buffer: bytes, start: int) -> bool:
        index = _index.unpack_from(buffer, start)
        if index != _DELIVER and index != _GOT:
            return False
        start += _index.size
        if index == _DELIVER:
            start += 1 + buffer[start]  # the consumer tag
        self._tag, bits = _tag.unpack_from(buffer, start)
        self._is_redelivered = bool(bits & 1)
        self._behind = _count_behind(buffer, start + _tag.size) if index == _GOT else None
        return True

    def _complete(self) -> None:
        tag, parts = self._tag, self._parts
        self._tag, self._parts = 0, []
        self._on_message(tag, self._is_redelivered, self._properties, parts[0] if len(parts) == 1 else b"".join(parts))
        if self._behind is not None and self._on_got is not None:
            self._on_got(self._behind)


def _count_behind(buffer: bytes, start: int) -> int:
    """Return the count that stands behind the exchange and the routing key."""
    for _ in range(2):
        start += 1 + buffer[start]
    return int(_number.unpack_from(buffer, start)[0])


class Confirms:
    """Reads the confirms of one channel: `on_confirm(tag, is multiple, is taken)`."""

    def __init__(self, on_confirm: Callable[[int, bool, bool], None]) -> None:
        self._on_confirm = on_confirm

    def frame(self, kind: int, buffer: bytes, start: int, end: int) -> bool:
        index = _index.unpack_from(buffer, start) if kind == _METHOD else None
        if index != _ACK and index != _NACK:
            return False
        tag, bits = _tag.unpack_from(buffer, start + _index.size)
        self._on_confirm(tag, bool(bits & _MULTIPLE), index == _ACK)
        return True


class Packer:
    """Packs messages for the default exchange into frames of one channel.

    `fit` cuts properties that do not fit into one frame, for which the server would end the connection.
    """

    def __init__(self, channel: int, frame_max: int, fit: Fit) -> None:
        self._channel = channel
        self._most = frame_max - _OVERHEAD
        self._room = self._most - _content.size
        self._fit = fit
        self._publishes: dict[str, bytes] = {}  # the frame that opens a message, by queue

    def pack(self, parcels: Iterable[Parcel]) -> list[bytes]:
        """Return the frames in pieces: what cannot be sent at once is copied, and a large piece again and again."""
        pieces: list[bytes] = []
        parts: list[bytes] = []
        size = 0
        for queue, properties, body in parcels:
            if size + len(body) > _PIECE:
                pieces.append(b"".join(parts))
                parts, size = [], 0
            if len(properties) > self._room:
                properties = self._fit(properties, self._room)
            parts.append(self._publishes.get(queue) or self._publish(queue))
            parts.append(self._frame(_HEADER, _content.pack(_BASIC, 0, len(body)) + properties))
            if len(body) <= self._most:
                parts.append(self._frame(_BODY, body) if body else b"")
            else:
                pieces += [b"".join(parts), *self._cut(body)]
                parts = []
            size += len(body) + _OVERHEAD
        pieces.append(b"".join(parts))
        return [piece for piece in pieces if piece]

    def _cut(self, body: bytes) -> list[bytes]:
        cuts = range(0, len(body), self._most)
        return [self._frame(_BODY, body[start : start + self._most]) for start in cuts]

    def _publish(self, queue: str) -> bytes:
        method = pika.spec.Basic.Publish(exchange="", routing_key=queue, mandatory=True)
        if len(self._publishes) >= _MOST_QUEUES:
            self._publishes.clear()
        packed: bytes = pika.frame.Method(self._channel, method).marshal()
        self._publishes[queue] = packed
        return packed

    def _frame(self, kind: int, payload: bytes) -> bytes:
        return _head.pack(kind, self._channel, len(payload)) + payload + _FRAME_END
