"""The checks of every request before keys and routes: its origin, its host, and the type of its body.

A browser sends requests to this machine for any page that its user visits. Three headers betray such a request:
`Sec-Fetch-Site`, the page's `Origin`, and a `Host` that is no name of this machine. A foreign page can send a body only
as a form or as plain text, because this server never allows more.
"""

from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from fastapi import HTTPException
from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oraculo.api.auth import OPEN_PATHS, SAFE_METHODS
from oraculo.api.bodies import JSON_KINDS, PIPELINE_KINDS, expect_kind
from oraculo.api.paths import PIPELINES
from oraculo.api.problems import http_problem
from oraculo.core.loopback import is_loopback

# Pages load from this server only, send to it only, and no other page may frame them.
_OF_PAGES = {
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
_DEFAULT_PORTS = {"http": 80, "https": 443}
_FOREIGN_PAGE = (
    "A browser sent this for a page of another site, which may change nothing here. Call the API from a page of this "
    "host, or from a program."
)
_FOREIGN_HOST = (
    "The Host {host} is no name of this machine, and the server has no API keys. Set ORACULO_API_KEYS, or "
    "ORACULO_API_INSECURE=true where a proxy decides who may call."
)
_NO_KEYS = (
    "This server has no API keys, so it answers only to its own machine; set ORACULO_API_KEYS, or "
    "ORACULO_API_INSECURE=true to let in whoever can reach it."
)


class Doors:
    """Middleware that refuses requests of foreign web pages, and restricts what this server's own pages may load."""

    def __init__(self, app: ASGIApp, *, is_locked: bool) -> None:
        """Make the middleware. `is_locked`: the server has keys, or `insecure` says that a proxy guards it."""
        self._app = app
        self._is_locked = is_locked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
        except HTTPException as error:
            await http_problem(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, _guarding_pages(send))

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = get_route_path(scope)
        if not self._is_locked:
            _expect_this_machine(scope, headers, path)
        if scope["method"] in SAFE_METHODS:
            return
        if _is_of_foreign_page(headers):
            raise HTTPException(403, _FOREIGN_PAGE)
        expect_kind(headers, _kinds(path))


def _kinds(path: str) -> frozenset[str]:
    return PIPELINE_KINDS if path.startswith(PIPELINES) else JSON_KINDS


# -- which page --------------------------------------------------------------------------------------------------


def _is_of_foreign_page(headers: Mapping[str, str]) -> bool:
    if headers.get("sec-fetch-site", "").lower() in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and not _is_this_host(origin, headers.get("host", ""))


def _is_this_host(origin: str, host: str) -> bool:
    """Compare without the scheme: behind a proxy that speaks TLS, only the proxy knows which it was."""
    try:
        page = urlsplit(origin)
        return bool(page.hostname) and _place(page) == _place(urlsplit(f"{page.scheme}://{host}"))
    except ValueError:
        return False


def _place(url: SplitResult) -> tuple[str | None, int | None]:
    return url.hostname, url.port or _DEFAULT_PORTS.get(url.scheme)


# -- which machine -----------------------------------------------------------------------------------------------


def _expect_this_machine(scope: Scope, headers: Headers, path: str) -> None:
    """Raise 403 for a call from another machine, and 421 for one by a name that is not of this machine."""
    address, port = scope.get("server") or (None, None)
    if address is None or port is None:  # a UNIX socket: whoever may open its file may call
        return
    if not is_loopback(address):
        if path not in OPEN_PATHS:
            raise HTTPException(403, _NO_KEYS)
    elif not _names_this_machine(host := headers.get("host", "")):
        raise HTTPException(421, _FOREIGN_HOST.format(host=host))


def _names_this_machine(host: str) -> bool:
    """Return whether a Host is of this machine. Without one, no browser sent the request."""
    try:
        return not host or is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


# -- pages -------------------------------------------------------------------------------------------------------


def _guarding_pages(send: Send) -> Send:
    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if headers.get("content-type", "").startswith("text/html"):
                headers.update(_OF_PAGES)
        await send(message)

    return send_guarded
