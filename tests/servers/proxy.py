"""A TCP proxy that misbehaves on demand: cuts connections, swallows what is sent, delays, refuses; and ends TLS for a
server that has none.

It runs in a thread of its own, so that it stands between processes and never waits for the test's event loop.
"""

import asyncio
import ssl
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.servers.certificates import Certificates

_CHUNK = 64 * 1024


class Proxy:
    """`with Proxy(server.url) as proxy:` and use `proxy.url` instead."""

    def __init__(self, url: str, certificates: Certificates | None = None) -> None:
        parts = urlsplit(url)
        self._url = url
        self._target = (parts.hostname or "localhost", parts.port or 0)
        self._tls = _server_side(certificates) if certificates else None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._listener: asyncio.Server | None = None
        self.port = 0
        self.delay = 0.0  # seconds that each chunk is held back
        self.swallows = False  # a black hole: connections stay open, and nothing goes through
        self.refuses = False  # new connections are closed at once
        self.refused = 0  # how many

    @property
    def url(self) -> str:
        return self._url.replace(f":{self._target[1]}", f":{self.port}", 1)

    def cut(self) -> int:
        """Breaks every connection, now. Returns how many halves there were."""
        halves: int = self._call(self._cut())
        return halves

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._listener is not None
        self._listener.close()
        await self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _cut(self) -> int:
        writers, self._open = self._open, set()
        for writer in writers:
            writer.transport.abort()
        return len(writers)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, server_writer}
        await asyncio.gather(self._carry(reader, server_writer), self._carry(server_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if self.delay:
                    await asyncio.sleep(self.delay)
                while self.swallows:  # noqa: ASYNC110 - held back and delivered later, as a frozen peer's kernel does
                    await asyncio.sleep(0.01)
                writer.write(chunk)
                await writer.drain()
        self._open.discard(writer)
        writer.transport.abort()


def _server_side(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    return context
