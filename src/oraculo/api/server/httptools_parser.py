"""The bounds for httptools, which has none, and buffers a header that does not end."""

from typing import Any

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from oraculo.api.server.bounds import HEAD_BYTES, HEAD_FIELDS, ChunkOverhead
from oraculo.api.server.connection import BoundedConnection


class BoundedHttpTools(BoundedConnection, HttpToolsProtocol):
    """A connection that httptools reads, within the bounds."""

    parser_name = "httptools"
    _overhead = ChunkOverhead()
    _head_bytes = 0  # of headers that are not complete
    _fields = 0  # of the headers or trailers being read
    _answered: RequestResponseCycle | None = None  # `cycle` is the newest of several that a client sent at once
    _ends = 0  # heads and messages that ended
    _data = 0  # bytes of body in the present piece
    _chunks = 0  # chunks in the present piece

    def feed(self, piece: bytes) -> None:
        ends, self._data, self._chunks = self._ends, 0, 0
        HttpToolsProtocol.data_received(self, piece)
        if ends != self._ends:
            # The next head or body began somewhere in this piece: it is counted from the next piece on.
            self._head_bytes = 0
            return
        if self.is_in_head:
            self._head_bytes += len(piece)
        else:
            self._overhead.take(len(piece), self._data, self._chunks)
        if self._head_bytes > HEAD_BYTES or self._overhead.is_too_much:
            self.refuse_too_large()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect the request that is being answered. uvicorn disconnects the newest only."""
        super().connection_lost(exc)
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()

    @property
    def piece_size(self) -> int:
        return HEAD_BYTES + 1 - self._head_bytes if self.is_in_head else HEAD_BYTES

    @property
    def is_overfull(self) -> bool:
        return self._fields > HEAD_FIELDS

    @property
    def has_part_of_head(self) -> bool:
        return self.is_in_head and self._head_bytes > 0

    # -- httptools' callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._fields = 0
        self._overhead = ChunkOverhead()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > HEAD_FIELDS:
            raise HttpParserError("too many headers")
        if self.is_in_head:  # trailers must not pass for headers, which were checked before
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._ends += 1
        self._fields = 0
        self.head_ended()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        self._data += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._ends += 1
        self.message_ended()
        super().on_message_complete()
