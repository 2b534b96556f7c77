"""The bytes of a connection, carried by the event loop's own transport.

pika's own reads 4 kB at a time, once more to learn that there is nothing left, and waits for another turn of the loop
before it writes: for large messages more than half of what they cost here. pika takes any that a loop offers by its
`AbstractIOServices`.
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
    """What pika asks of an event loop. `turn`: which of a name's addresses comes first, counted round and round; pika
    tries them in their order, and one that says nothing takes all the time that there is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turn: int = 0) -> None:
        super().__init__(loop)
        self._turn = turn

    def getaddrinfo(self, host: str, port: int, on_done: OnDone, **wanted: int) -> Any:
        def rotated(found: Any) -> None:
            if isinstance(found, list) and found and self._turn:  # a list: else it is what went wrong
                found = sorted(found, key=str)  # for a resolver may turn them too, each time
                first = (self._turn + os.getpid()) % len(found)  # nor are all clients to come to the same one
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
    """Makes a stream of a connected socket, and tells how that went: once, and not after it was cancelled."""

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
        """Returns pika's protocol; None when it is not to be."""
        if self._is_over:
            return None
        try:
            protocol = self._make_protocol()
            protocol.connection_made(stream)
        except Exception as error:  # noqa: BLE001 - it is told to whoever waits
            self._tell(error)
            return None
        self._tell((stream, protocol))
        return protocol

    async def _open(self, tls: ssl.SSLContext | None, hostname: str | None) -> None:
        name = (hostname or "") if tls else None
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: _Stream(self.link), sock=self._sock, ssl=tls, server_hostname=name
            )
        except Exception as error:  # noqa: BLE001 - it is told to whoever waits
            self._sock.close()
            self._tell(error)

    def _opened(self, opening: "asyncio.Task[None]") -> None:
        if opening.cancelled():  # perhaps before it began, so that nobody else closes it
            self._sock.close()

    def _tell(self, outcome: Any) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_done(outcome)


class _Stream(asyncio.Protocol, AbstractStreamTransport):  # type: ignore[misc, unused-ignore]
    """To the event loop a protocol, to pika a transport. They are linked before the loop reads anything."""

    def __init__(self, link: "Callable[[_Stream], Any]") -> None:
        self._link = link
        self._transport: Any = None
        self._protocol: Any = None
        self._error: Exception | None = None
        self._is_end_known = False  # to pika: that the peer ended it, or because pika itself did
        self._pieces: list[bytes] = []  # that were not sent yet
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
        """Nobody reads any more what is still to be sent: it is not waited for."""
        self._tell_end()
        self._transport.abort()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        error = self._error or error
        if error is None:
            self._tell_end()  # under TLS uvloop does not say so before
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _tell_end(self) -> None:
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
        """With what is written next, or in the next turn of the loop: for what nobody waits for. To send costs more
        than its bytes do."""
        if not self._pieces:
            self._call_soon(self._send)
        self._pieces.append(data)

    def get_write_buffer_size(self) -> int:
        return int(self._transport.get_write_buffer_size()) + sum(map(len, self._pieces))

    def _send(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():  # soon told as lost; until then the loop would warn of each
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
