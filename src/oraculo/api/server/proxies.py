"""Reverse proxies: the trusted source of client addresses, and the limit for each client behind one."""

from collections.abc import Sequence
from ipaddress import ip_network
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from oraculo.api.problems import RETRY_SECONDS, http_problem
from oraculo.api.server.bounds import Bounds, client_of
from oraculo.api.server.connection import TOO_MANY


class BehindProxies:
    """Middleware that reads clients' addresses from configured proxies, and limits the requests of each client.

    All connections of a proxy have one address. So a client behind it may have as many requests at a time as other
    clients may have connections.
    """

    def __init__(self, app: ASGIApp, proxies: Sequence[str], bounds: Bounds) -> None:
        self.app = app
        self._bounds = bounds
        trusted = [str(ip_network(entry, strict=False)) for entry in proxies]
        self._read_headers: Any = ProxyHeadersMiddleware(_nothing, trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        proxy = scope.get("client")
        await self._read_headers(scope, receive, send)
        if (client := scope.get("client")) == proxy or client is None:
            await self.app(scope, receive, send)
        else:
            await self._counted(client[0], scope, receive, send)

    async def _counted(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        client, request = client_of(address), _Request()
        if not self._bounds.enter(client, request):
            self._bounds.log("a client behind a proxy had as many requests as it may, and got 429", address)
            refusal = HTTPException(429, TOO_MANY, {"Retry-After": RETRY_SECONDS})
            await http_problem(scope, refusal)(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            self._bounds.leave(client, request)


async def _nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """Stand in for an app: only the middleware's change of the scope is wanted."""


class _Request:
    """A request behind a proxy, which counts as a connection in use."""

    def is_serving(self) -> bool:
        return True

    def give_way(self) -> None:
        pass
