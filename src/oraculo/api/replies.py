"""JSON answers, encoded by msgspec: payloads that are `msgspec.Raw` leave exactly as they came."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import Response

JSON = "application/json"
PAGE_BYTES = 8 * 1024 * 1024  # of the items on one page of a list; a single larger one is a page by itself

_encoder = msgspec.json.Encoder()


def json_text(value: Any) -> bytes:
    return _encoder.encode(value)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return encoded_reply(json_text(value), status, headers)


def encoded_reply(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, JSON)


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
