"""API keys: when some are set, every call needs one with the right role, except health checks and pages."""

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
_PAGES = re.compile("/|/docs|/swagger/.*")  # they hold nothing secret; the page asks its reader for a key
WRONG_KEY_PAUSE = 1.0  # seconds before a wrong key is refused: guessing takes long
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="oraculo"'}
_DETAIL = "This call needs an API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`."


def role_needed(method: str, path: str) -> KeyRole:
    """Return the least role that may make a call. Unknown calls need an admin's key."""
    if method in SAFE_METHODS:
        return KeyRole.READER
    is_operators = path == RUNS or path.startswith((f"{RUNS}/", f"{QUEUES}/"))
    return KeyRole.OPERATOR if is_operators else KeyRole.ADMIN


class ApiKeys:
    """Middleware that refuses calls without a known key (401), and calls that the key's role does not allow (403)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._roles = [(key.encode(), role) for role, key in map(read_key, keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The path without the prefix of a proxy (`--root-path`), as the routes see it.
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
        # Every key is compared, each in constant time, so that the time betrays no key.
        found = [role for key, role in self._roles if hmac.compare_digest(given, key)]
        return found[0] if found else None


def _given_key(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # Starlette decodes headers as latin-1: this gives back the bytes that were sent.
    return key.strip(BLANKS).encode("latin-1")
