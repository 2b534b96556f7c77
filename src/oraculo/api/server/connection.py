"""The bounds of one connection: the time and size of headers, the time for reading a reply, a client's connections.

They are part of the server, because an ASGI app sees a request only once its headers are complete. httptools, which
reads requests, has no bounds itself.
"""

import asyncio
from collections.abc import Hashable
from http import HTTPStatus
from typing import Any

import msgspec
from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from oraculo.api.problems import PROBLEM_JSON, RETRY_SECONDS, Problem
from oraculo.api.server.bounds import HEAD_BYTES, HEAD_FIELDS, Bounds, client_of
from oraculo.api.server.unread import unread_bytes

# After a refusal incoming bytes are read and dropped for a while, so that the refusal arrives. Closing a connection
# with unread bytes makes the other end drop what it has not read.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1024 * 1024

_UNREADABLE = "This is no request that HTTP/1.1 knows."
TOO_MANY = "Your address has as many connections as one may have; close some, or ask again in a moment."
_LATE = "The headers of the request did not come in time; send it again."
TOO_LARGE = f"Headers, trailers and chunk extensions may have {HEAD_BYTES} bytes and {HEAD_FIELDS} fields; send less."


class BoundedConnection(HttpToolsProtocol):
    """A connection of uvicorn, within the bounds."""

    loop: Any
    transport: Any
    client: Any
    cycle: Any
    server_state: Any

    def __init__(self, *args: Any, bounds: Bounds, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bounds = bounds
        self._counted_as: Hashable | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._write_timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of replies when the timer was started
        self._reads = False  # the process has written all of them since
        self._dropped = 0  # bytes that came after a refusal
        self._is_in_head = True  # what comes next belongs to the headers of a request
        self._fields = 0  # of the headers or trailers being read
        self._empty = 0  # bytes since a request, its headers or a part of its body was complete
        self._marks = 0  # such completions
        self._answered: RequestResponseCycle | None = (
            None  # `cycle` is the newest of several that a client sent at once
        )

    # -- asyncio's callbacks ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if self.client is not None and not self._bounds.is_proxy(self.client[0]):
            client = client_of(self.client[0])
            if not self._bounds.enter(client, self):
                self._bounds.log("a client had as many connections as it may, and got 429", self.client[0])
                self.refuse(429, TOO_MANY)
                return
            self._counted_as = client
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted_as is not None:
            self._bounds.leave(self._counted_as, self)
        self._stop_head_timer()
        for timer in (self._linger_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn disconnects the newest request only
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._drop(data)
            return
        while data and not self._is_refused and not self.transport.is_closing():
            size = HEAD_BYTES + 1 - self._empty
            piece, data = data[:size], data[size:]
            self._feed(piece)
        if not self._is_refused and not self.is_serving():
            self._start_head_timer()

    def _feed(self, piece: bytes) -> None:
        marks = self._marks
        super().data_received(piece)
        # What follows the last completion began somewhere in this piece: it is counted from the next piece on.
        self._empty = self._empty + len(piece) if marks == self._marks else 0
        if self._empty > HEAD_BYTES:
            self.refuse(431, TOO_LARGE)

    def shutdown(self) -> None:
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    # -- httptools' callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._fields = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > HEAD_FIELDS:
            raise HttpParserError("too many headers")
        if self._is_in_head:  # trailers must not pass for headers, which were checked before
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._marks += 1
        self._fields = 0
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._marks += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._marks += 1
        self._is_in_head = True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    # -- making room for newer connections of a client ---------------------------------------------------------------

    def is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def give_way(self) -> None:
        self._bounds.log(
            "a client had as many connections as it may, and its oldest idle one was closed", self._address()
        )
        self.transport.abort()

    # -- the deadline for headers ----------------------------------------------------------------------------------

    def _start_head_timer(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._head_timer = self.loop.call_later(self._bounds.header_timeout, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_in_head and self._empty:
            self._bounds.log("the headers of a request did not come in time, and it got 408", self._address())
            self.refuse(408, _LATE)
        else:
            self.transport.abort()

    # -- the deadline for reading a reply ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reads = True

    def on_response_complete(self) -> None:
        """Watch the reader of a reply that uvicorn has written: the client may never read the rest."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_reader()

    def _watch_reader(self) -> None:
        if self._write_timer is None:
            self._unread, self._reads = unread_bytes(self.transport), False
            self._write_timer = self.loop.call_later(self._bounds.write_timeout, self._look_at_reader)

    def _look_at_reader(self) -> None:
        self._write_timer = None
        is_left = self.transport.get_write_buffer_size() > 0
        if is_left and unread_bytes(self.transport) >= self._unread and not self._reads:
            self._bounds.log("a client did not read its reply, and was cut off", self._address())
            self.transport.abort()
        elif is_left:
            self._watch_reader()

    # -- what is not served ------------------------------------------------------------------------------------------

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a client that offers another protocol gets its answer in this one."""

    # -- refusals --------------------------------------------------------------------------------------------------

    def send_400_response(self, _msg: str) -> None:
        """Answer a request that the parser cannot read. uvicorn calls it."""
        if self._fields > HEAD_FIELDS:
            self.refuse(431, TOO_LARGE)
        else:
            self.refuse(400, _UNREADABLE)

    def refuse(self, status: int, detail: str) -> None:
        """Answer with a problem, and close the connection.

        With a reply under way the connection is only closed: the client would take the problem for that reply.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        if status == 431:
            self._bounds.log("a request had too large headers, trailers or chunk extensions", self._address())
        if self.is_serving():
            has_begun = self.cycle.response_started or self._is_in_head
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if has_begun:
                self.transport.abort()
                return
        elif not self._is_in_head:
            self.transport.abort()
            return
        self.transport.write(self._refusal(status, detail))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._linger_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()

    def _refusal(self, status: int, detail: str) -> bytes:
        phrase = HTTPStatus(status).phrase
        slug = phrase.lower().replace(" ", "-")
        body = msgspec.json.encode(Problem(f"urn:oraculo:problem:{slug}", phrase, status, detail))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", PROBLEM_JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            headers.append((b"retry-after", RETRY_SECONDS.encode()))
        lines = [b"HTTP/1.1 %d %s" % (status, phrase.encode()), *(b"%s: %s" % header for header in headers)]
        return b"\r\n".join([*lines, b"", body])

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > _LINGER_BYTES:
            self.transport.abort()

    def _address(self) -> str:
        return self.client[0] if self.client else "a local socket"
