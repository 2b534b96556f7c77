"""JSON answers, encoded by msgspec: payloads that are `msgspec.Raw` leave exactly as they came."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

JSON = "application/json"

_encoder = msgspec.json.Encoder()


def json_text(value: Any) -> bytes:
    return _encoder.encode(value)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return encoded_reply(json_text(value), status, headers)


def encoded_reply(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, JSON)
