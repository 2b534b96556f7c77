"""JSON answers, encoded by msgspec: `msgspec.Raw` payloads leave exactly as they came."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from oraculo.api.auth import SAFE_METHODS
from oraculo.api.room import Room

JSON = "application/json"
PAGE_BYTES = 8 * 1024 * 1024  # of the items on one page of a list; a single larger one is a page by itself

_PIECE = 256 * 1024  # bytes of a reply that the server gets at once

_encoder = msgspec.json.Encoder()


def json_text(value: Any) -> bytes:
    return _encoder.encode(value)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return encoded_reply(json_text(value), status, headers)


def encoded_reply(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return _Reply(body, status, headers, JSON)


def page_of(items: Iterable[Any]) -> list[msgspec.Raw]:
    """Encode as many of the items as fit on a page, and at least one where there are some."""
    page: list[msgspec.Raw] = []
    room = PAGE_BYTES
    for item in items:
        text = json_text(item)
        room -= len(text)
        if page and room < 0:
            break
        page.append(msgspec.Raw(text))
    return page


def room_for_replies(size: int) -> Room:
    """Return the room for all replies being sent, so that clients that do not read cannot fill the memory."""
    return Room(size, "Too many large replies are being read by others; ask again in a moment.")


class _Reply(Response):
    """A reply that is sent in pieces, as fast as it is read, and takes its share of the room meanwhile.

    Without room a GET gets 503. A call that has changed something is answered all the same.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room: Room = scope["app"].state.context.replies
        with room.share(is_owed=scope["method"] not in SAFE_METHODS) as grow:
            grow(len(self.body))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, max(1, len(self.body)), _PIECE):
                end = start + _PIECE
                piece = self.body[start:end]
                await send({"type": "http.response.body", "body": piece, "more_body": end < len(self.body)})
