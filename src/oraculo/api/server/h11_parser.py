"""The bounds for h11, which counts neither headers nor chunk extensions."""

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from oraculo.api.server.bounds import HEAD_BYTES, HEAD_FIELDS, ChunkOverhead
from oraculo.api.server.connection import BoundedConnection


class _Parser(h11.Connection):
    """h11's connection, which also refuses what is too large."""

    is_overfull = False

    def __init__(self, head_ended: Callable[[], None], message_ended: Callable[[], None]) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self._head_ended = head_ended
        self._message_ended = message_ended
        self._overhead = ChunkOverhead()
        self._read = self._data = self._chunks = 0  # of the body, and not yet counted

    def receive_data(self, data: bytes) -> None:
        self._read += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            self._look(event)
        except h11.RemoteProtocolError as error:
            self.is_overfull = error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise
        return event

    def _look(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            _expect_few(event.headers, len(event.method) + len(event.target) + len("  HTTP/1.1\r\n\r\n"))
            self._overhead = ChunkOverhead()
            self._read, self._data, self._chunks = len(self.trailing_data[0]), 0, 0
            self._head_ended()
        elif isinstance(event, h11.Data):
            self._data += len(event.data)
            self._chunks += event.chunk_start
        elif isinstance(event, h11.EndOfMessage):
            _expect_few(event.headers)
            self._message_ended()
        elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
            self._overhead.take(self._read, self._data, self._chunks)
            self._read = self._data = self._chunks = 0
            if self._overhead.is_too_much:
                raise _too_much()


def _expect_few(headers: Iterable[tuple[bytes, bytes]], more: int = 0) -> None:
    sizes = [len(name) + len(value) + len(": \r\n") for name, value in headers]
    if len(sizes) > HEAD_FIELDS or sum(sizes) + more > HEAD_BYTES:
        raise _too_much()


def _too_much() -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError("too much besides data", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)


class BoundedH11(BoundedConnection, H11Protocol):
    """A connection that h11 reads, within the bounds."""

    parser_name = "h11"
    conn: _Parser

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(self.head_ended, self.message_ended)

    def feed(self, piece: bytes) -> None:
        H11Protocol.data_received(self, piece)

    @property
    def has_part_of_head(self) -> bool:
        return self.is_in_head and bool(self.conn.trailing_data[0])

    @property
    def is_overfull(self) -> bool:
        return self.conn.is_overfull
