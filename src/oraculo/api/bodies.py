"""Request bodies: their limits of size, time and memory, and the content types that are accepted."""

import asyncio
from collections.abc import Callable, Mapping

from fastapi import HTTPException, Request

from oraculo.api.room import Room, not_now
from oraculo.errors import PayloadTooLarge

JSON_KINDS = frozenset({"application/json"})
PIPELINE_KINDS = JSON_KINDS | {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"}
_SUFFIXES = {"application/json": "+json", "application/yaml": "+yaml"}
_MOST_DIGITS = 20
_AT_ONCE = 8  # of the largest requests
_PATIENCE = 30.0  # seconds for the next piece of a body


def room_for_bodies(largest: int) -> Room:
    """Return the room for all bodies being read, so that half-sent ones cannot fill the memory."""
    return Room(_AT_ONCE * largest, "Too many large requests are being read; send it again in a moment.")


async def read_body(request: Request, limit: int, room: Room) -> bytes:
    """Read a body. Raises PayloadTooLarge, 408 when the rest does not come, and 503 when there is no room or the server
    stops."""
    declared = _declared_length(request)
    if declared > limit:
        raise PayloadTooLarge("request", declared, limit)
    room.expect(declared)
    try:
        with room.share() as grow:
            return await _read(request, limit, grow)
    except TimeoutError:
        detail = f"Nothing more of the body came for {_PATIENCE:g} s; send it again."
        raise HTTPException(408, detail, {"Connection": "close"}) from None
    except asyncio.CancelledError:
        raise not_now("The server is stopping, and the body was not complete; send it again in a moment.") from None


def _declared_length(request: Request) -> int:
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() and len(declared) <= _MOST_DIGITS else 0


async def _read(request: Request, limit: int, grow: Callable[[int], None]) -> bytes:
    body, loop = bytearray(), asyncio.get_running_loop()
    async with asyncio.timeout(_PATIENCE) as patience:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise PayloadTooLarge("request", len(body), limit)
            grow(len(body))
            patience.reschedule(loop.time() + _PATIENCE)
    return bytes(body)


def expect_kind(headers: Mapping[str, str], kinds: frozenset[str]) -> None:
    """Raise 415 for a body of another type, of none, or compressed.

    A type must be right even where the body is empty: a browser's form without fields sends one.
    """
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        detail = f"The body must not be packed; got the Content-Encoding {coding}."
        raise HTTPException(415, detail, {"Accept-Encoding": "identity"})
    given = headers.get("content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    suffixes = tuple(_SUFFIXES[known] for known in kinds if known in _SUFFIXES)
    if kind in kinds or kind.endswith(suffixes) or (given is None and not _has_body(headers)):
        return
    got = f"got {kind}" if kind else "got none"
    raise HTTPException(415, f"The Content-Type of the body must be {' or '.join(sorted(kinds))}; {got}.")


def _has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
