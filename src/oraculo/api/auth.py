"""API keys: when some are set, every call has to bring one whose role allows it, but for health checks and pages."""

import asyncio
import hmac
import re
from collections.abc import Sequence

from fastapi import HTTPException
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from oraculo.api.parameters import BLANKS
from oraculo.api.paths import QUEUES, RUNS
from oraculo.api.problems import http_problem
from oraculo.settings import KeyRole, read_key

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
OPEN_PATHS = frozenset({"/health", "/health/ready"})
_PAGES = re.compile("/|/docs|/swagger/.*")  # they ask for a key, and hold nothing that needs one
WRONG_KEY_PAUSE = 1.0  # seconds before a wrong key is refused: guessing takes long
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="oraculo"'}
_DETAIL = "This call needs an API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`."


def role_needed(method: str, path: str) -> KeyRole:
    """Return the least role that may make a call. A call that is not known here needs the most."""
    if method in SAFE_METHODS:
        return KeyRole.READER
    is_operators = path == RUNS or path.startswith((f"{RUNS}/", f"{QUEUES}/"))
    return KeyRole.OPERATOR if is_operators else KeyRole.ADMIN


class ApiKeys:
    """Refuses calls without a key that is known (401), and those that the key's role does not allow (403)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._roles = [(key.encode(), role) for role, key in map(read_key, keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As the routes see it: behind a prefix that a proxy was given (`--root-path`), if any.
        if scope["type"] != "http" or (path := get_route_path(scope)) in OPEN_PATHS or _PAGES.fullmatch(path):
            await self._app(scope, receive, send)
            return
        try:
            await self._check(Headers(scope=scope), role_needed(scope["method"], path))
        except HTTPException as error:
            await http_problem(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _check(self, headers: Headers, needed: KeyRole) -> None:
        given = _given_key(headers)
        role = self._role_of(given)
        if role is None:
            if given:
                await asyncio.sleep(WRONG_KEY_PAUSE)
            raise HTTPException(401, _DETAIL, _CHALLENGE)
        if not role.allows(needed):
            raise HTTPException(403, f"This call needs a key with the role {needed}; the key's role is {role}.")

    def _role_of(self, given: bytes) -> KeyRole | None:
        # Every key is compared, in constant time each: how long it takes tells nothing of which came close.
        found = [role for key, role in self._roles if hmac.compare_digest(given, key)]
        return found[0] if found else None


def _given_key(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # Header values are latin-1 to Starlette: these are the bytes that were sent.
    return key.strip(BLANKS).encode("latin-1")
