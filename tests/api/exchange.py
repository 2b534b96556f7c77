"""One HTTP exchange at the level of ASGI, where a test can hold a stream open and leave it."""

import asyncio
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

from fastapi import FastAPI


class Exchange:
    """`window`: how many messages the application may send before the test has to read one; 0 is any number."""

    def __init__(
        self, app: FastAPI, method: str, path: str, headers: dict[str, str] | None = None, *, window: int = 0
    ) -> None:
        given = ({} if method == "GET" else {"Content-Type": "application/json"}) | (headers or {})
        self._app = app
        self._sent: asyncio.Queue[Any] = asyncio.Queue(window)
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self.stalled = asyncio.Event()  # the window is full and the application waits to send more
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._app(self._scope, self._received.get, self._send))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self, message: Any) -> None:
        if self._sent.full():
            self.stalled.set()
        await self._sent.put(message)

    async def next(self) -> dict[str, Any]:
        """What the application sends next."""
        async with asyncio.timeout(10):
            message: dict[str, Any] = await self._sent.get()
            return message

    async def next_chunk(self) -> str:
        message = await self.next()
        if message["type"] == "http.response.start":
            message = await self.next()
        text: str = message["body"].decode()
        return text

    def upload(self, body: bytes, *, more: bool) -> None:
        self._received.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._received.put_nowait({"type": "http.disconnect"})

    async def finished(self) -> None:
        """Returns when the application is done with the exchange; raises what it raised."""
        async with asyncio.timeout(10):
            await self._task

    @property
    def unread_uploads(self) -> int:
        return self._received.qsize()
