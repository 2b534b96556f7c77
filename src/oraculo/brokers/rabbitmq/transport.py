"""The bytes of a connection, carried by the event loop's own transport.

pika's own transport reads 4 kB at a time, reads once more to learn that nothing is left, and waits for another turn of
the loop before it writes. For large messages that is more than half of their cost. pika lets a loop offer its own.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

from pika.adapters.asyncio_connection import _AsyncioIOServicesAdapter
from pika.adapters.utils.nbio_interface import AbstractIOReference, AbstractStreamTransport

MakeProtocol = Callable[[], Any]  # pika's side of a stream
OnDone = Callable[[Any], None]  # gets what was asked for, or what went wrong


class LoopServices(_AsyncioIOServicesAdapter):  # type: ignore[misc, unused-ignore]
    """The services that pika asks of an event loop.

    `turn` chooses which address of a name comes first. pika tries them in order, and a silent one takes all the time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, turn: int = 0) -> None:
        super().__init__(loop)
        self._turn = turn

    def getaddrinfo(self, host: str, port: int, on_done: OnDone, **wanted: int) -> Any:
        def rotated(found: Any) -> None:
            if isinstance(found, list) and found and self._turn:  # else it is an error
                found = sorted(found, key=str)  # for a resolver may turn them too, each time
                first = (self._turn + os.getpid()) % len(found)  # so that not all clients come to the same one
                found = [*found[first:], *found[:first]]
            on_done(found)

        return super().getaddrinfo(host, port, rotated, **wanted)

    def create_streaming_connection(
        self,
        protocol_factory: MakeProtocol,
        sock: socket.socket,
        on_done: OnDone,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> "_Attempt":
        return _Attempt(protocol_factory, sock, on_done, ssl_context, server_hostname)


class _Attempt(AbstractIOReference):  # type: ignore[misc, unused-ignore]
    """Makes a stream of a connected socket, and reports the outcome once, unless it is cancelled before."""

    def __init__(
        self,
        make_protocol: MakeProtocol,
        sock: socket.socket,
        on_done: OnDone,
        tls: ssl.SSLContext | None,
        hostname: str | None,
    ) -> None:
        self._make_protocol = make_protocol
        self._sock = sock
        self._on_done = on_done
        self._is_over = False
        self._opening = asyncio.create_task(self._open(tls, hostname), name="open a stream to RabbitMQ")
        self._opening.add_done_callback(self._opened)

    def cancel(self) -> bool:
        if self._is_over:
            return False
        self._is_over = True
        self._opening.cancel()
        return True

    def link(self, stream: "_Stream") -> Any:
        """Return pika's protocol, or None when the attempt is over."""
        if self._is_over:
            return None
        try:
            protocol = self._make_protocol()
            protocol.connection_made(stream)
        except Exception as error:  # noqa: BLE001 - pika gets it
            self._report(error)
            return None
        self._report((stream, protocol))
        return protocol

    async def _open(self, tls: ssl.SSLContext | None, hostname: str | None) -> None:
        name = (hostname or "") if tls else None
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: _Stream(self.link), sock=self._sock, ssl=tls, server_hostname=name
            )
        except Exception as error:  # noqa: BLE001 - pika gets it
            self._sock.close()
            self._report(error)

    def _opened(self, opening: "asyncio.Task[None]") -> None:
        if opening.cancelled():  # perhaps before it began, so that nobody else closes it
            self._sock.close()

    def _report(self, outcome: Any) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_done(outcome)


class _Stream(asyncio.Protocol, AbstractStreamTransport):  # type: ignore[misc, unused-ignore]
    """A protocol to the event loop and a transport to pika. They are linked before the loop reads anything."""

    def __init__(self, link: "Callable[[_Stream], Any]") -> None:
        self._link = link
        self._transport: Any = None
        self._protocol: Any = None
        self._error: Exception | None = None
        self._is_end_known = False  # to pika, because it was reported, or pika ended it
        self._pieces: list[bytes] = []  # not sent yet
        self._call_soon = asyncio.get_running_loop().call_soon

    # -- for the event loop ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._protocol = self._link(self)
        if self._protocol is None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._protocol is None:
            return
        try:
            self._protocol.data_received(data)
        except Exception as error:  # noqa: BLE001 - nobody is above this; the connection ends with it
            self._error = error
            self._transport.abort()

    def eof_received(self) -> bool:
        """End it without sending the rest, which nobody reads any more."""
        self._report_end()
        self._transport.abort()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        error = self._error or error
        if error is None:
            self._report_end()  # under TLS uvloop does not say so before
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _report_end(self) -> None:
        if self._protocol is not None and not self._is_end_known:
            self._is_end_known = True
            self._protocol.eof_received()

    # -- for pika -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._is_end_known = True
        self._transport.abort()

    def get_protocol(self) -> Any:
        return self._protocol

    def write(self, data: bytes) -> None:
        self._pieces.append(data)
        self._send()

    def write_soon(self, data: bytes) -> None:
        """Write with what is written next, or in the next turn of the loop: each sending costs more than its bytes."""
        if not self._pieces:
            self._call_soon(self._send)
        self._pieces.append(data)

    def get_write_buffer_size(self) -> int:
        return int(self._transport.get_write_buffer_size()) + sum(map(len, self._pieces))

    def _send(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():  # else it is soon reported as lost, and the loop would warn
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
