"""Request bodies: read within a limit, never more of them held than that, and of a kind that can be read."""

import asyncio

from fastapi import HTTPException, Request

from oraculo.api.problems import RETRY_SECONDS
from oraculo.errors import PayloadTooLarge

JSON_KINDS = frozenset({"application/json"})
PIPELINE_KINDS = JSON_KINDS | {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/plain"}
_SUFFIXES = {"application/json": "+json", "application/yaml": "+yaml"}
_UNSAID = "application/x-www-form-urlencoded"
_MOST_DIGITS = 20


async def read_body(request: Request, limit: int) -> bytes:
    """Raises PayloadTooLarge as soon as the length is known to pass the limit, and 503 when the server stops and has
    waited long enough for the rest: it cancels who still waits, and would call that an error of ours."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) <= _MOST_DIGITS and int(declared) > limit:
        raise PayloadTooLarge("request", int(declared), limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise PayloadTooLarge("request", len(body), limit)
    except asyncio.CancelledError:
        detail = "The server is stopping, and the body was not complete; send it again in a moment."
        raise HTTPException(503, detail, {"Retry-After": RETRY_SECONDS}) from None
    return bytes(body)


def expect_kind(request: Request, kinds: frozenset[str]) -> None:
    """Raises 415 when the body is said to be of another kind, or packed; a body without a Content-Type is taken for
    right, and so is one with the type that curl gives to what was sent with `-d` and nothing said."""
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        detail = f"The body must not be packed; got the Content-Encoding {coding}."
        raise HTTPException(415, detail, {"Accept-Encoding": "identity"})
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    suffixes = tuple(_SUFFIXES[known] for known in kinds if known in _SUFFIXES)
    if kind in ("", _UNSAID) or kind in kinds or kind.endswith(suffixes):
        return
    raise HTTPException(415, f"The Content-Type must be {' or '.join(sorted(kinds))}, or absent; got {kind}.")
