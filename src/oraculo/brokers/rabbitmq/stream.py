"""The bytes of a connection, carried by the event loop's own transport.

pika's own reads 4 kB at a time, once more to learn that there is nothing left, and waits for another turn of the loop
before it writes: for large messages more than half of what they cost here. pika takes any that a loop offers by its
`AbstractIOServices`.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

from pika.adapters.asyncio_connection import _AsyncioIOServicesAdapter
from pika.adapters.utils.nbio_interface import AbstractIOReference, AbstractStreamTransport

Linked = Callable[[Any], None]  # gets the transport and its protocol, or what went wrong


class LoopServices(_AsyncioIOServicesAdapter):  # type: ignore[misc, unused-ignore]
    """What pika asks of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._own_loop = loop

    def create_streaming_connection(
        self,
        protocol_factory: Callable[[], Any],
        sock: socket.socket,
        on_done: Linked,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> "_Attempt":
        opening = self._open(protocol_factory, sock, on_done, ssl_context, server_hostname)
        return _Attempt(self._own_loop.create_task(opening, name="link a stream to RabbitMQ"))

    async def _open(
        self,
        protocol_factory: Callable[[], Any],
        sock: socket.socket,
        on_done: Linked,
        tls: ssl.SSLContext | None,
        hostname: str | None,
    ) -> None:
        name = (hostname or "") if tls else None
        try:
            _, stream = await self._own_loop.create_connection(_Stream, sock=sock, ssl=tls, server_hostname=name)
        except OSError as error:  # those of TLS are such, too
            sock.close()
            on_done(error)
        except BaseException:
            sock.close()
            raise
        else:
            # In one step: an answer must find both sides ready for it.
            on_done((stream, stream.link(protocol_factory())))


class _Attempt(AbstractIOReference):  # type: ignore[misc, unused-ignore]
    def __init__(self, opening: "asyncio.Task[None]") -> None:
        self._opening = opening

    def cancel(self) -> bool:
        return self._opening.cancel()


class _Stream(asyncio.Protocol, AbstractStreamTransport):  # type: ignore[misc, unused-ignore]
    """To the event loop a protocol, to pika a transport."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._protocol: Any = None
        self._error: Exception | None = None
        self._pieces: list[bytes] = []  # to be sent with the next turn of the loop
        self._call_soon = asyncio.get_running_loop().call_soon

    def link(self, protocol: Any) -> Any:
        self._protocol = protocol
        protocol.connection_made(self)
        return protocol

    # -- for the event loop ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._protocol.data_received(data)
        except Exception as error:  # noqa: BLE001 - nobody is above this; the connection ends with it
            self._error = error
            self._transport.abort()

    def eof_received(self) -> bool:
        return bool(self._protocol.eof_received())

    def connection_lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(self._error or error)

    # -- for pika -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
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
