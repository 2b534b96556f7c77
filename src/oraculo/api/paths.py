"""The paths of the API, and the middleware for ids with a slash and for HEAD.

Servers decode `%2F` to `/` before a route sees the path, and an id may hold a `/`. The run `a/eventos` would be taken
for the events of the run `a`. So an encoded slash is marked until the path was matched.
"""

import asyncio
import re
from urllib.parse import unquote

from starlette.convertors import Convertor, register_url_convertor
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Half a surrogate pair: decoded UTF-8 never holds one, so no path does.
_ENCODED_SLASH = "\udc2f"
_ESCAPE = re.compile("%2f", re.IGNORECASE)


class SegmentConvertor(Convertor[str]):
    """One segment of a path, `%2F` included."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return value.replace(_ENCODED_SLASH, "/")

    def to_string(self, value: str) -> str:
        return value


class RunConvertor(SegmentConvertor):
    """A run's id. It may hold plain slashes, unless a path of a run follows one, such as `/eventos`."""

    regex = r"(?:(?!/(?:eventos|explicacao|cancelar|repetir|resultados/[^/]+)\Z)[\s\S])+"


register_url_convertor("segment", SegmentConvertor())
register_url_convertor("run", RunConvertor())

RUNS = "/orquestracoes"
RUN = RUNS + "/{correlation_id:run}"
PIPELINES = "/pipelines"
PIPELINE = PIPELINES + "/{name:segment}"
QUEUES = "/filas"
DEAD_LETTERS = QUEUES + "/{fila:segment}/dlq"


class ExactPaths:
    """Middleware that marks encoded slashes for the convertors above."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path") if scope["type"] == "http" else None
        if raw and b"%2" in raw:
            scope = {**scope, "path": _marked(raw.decode("latin-1"))}
        await self._app(scope, receive, send)


def _marked(raw: str) -> str:
    return _ENCODED_SLASH.join(unquote(part, errors="replace") for part in _ESCAPE.split(raw))


class HeadAsGet:
    """Middleware that answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                answered.set()

        async def leave_when_answered() -> Message:
            await answered.wait()  # a live stream has no end of its own: its reader counts as gone now
            return {"type": "http.disconnect"}

        await self._app({**scope, "method": "GET"}, leave_when_answered, send_head)
