"""API keys: when some are set, every call but the health checks has to bring one."""

import hmac
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from oraculo.api.parameters import BLANKS
from oraculo.api.problems import Problem, problem_reply

OPEN_PATHS = frozenset({"/health", "/health/ready"})
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="oraculo"'}
_DETAIL = "This call needs an API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`."


class ApiKeys:
    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As the routes see it: behind a prefix that a proxy was given (`--root-path`), if any.
        is_open = scope["type"] != "http" or get_route_path(scope) in OPEN_PATHS
        if is_open or self._knows(_given_key(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        problem = Problem("urn:oraculo:problem:unauthorized", "Unauthorized", 401, _DETAIL)
        await problem_reply(scope, problem, _CHALLENGE)(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        # Every key is compared, in constant time each: how long it takes tells nothing of which came close.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


def _given_key(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # Header values are latin-1 to Starlette: these are the bytes that were sent.
    return key.strip(BLANKS).encode("latin-1")
