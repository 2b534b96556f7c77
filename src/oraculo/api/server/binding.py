"""The functions that put the bounds of connections on a uvicorn server."""

import socket
from functools import partial

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from oraculo.api.server.access_log import mask_keys
from oraculo.api.server.bounds import Bounds
from oraculo.api.server.connection import BoundedConnection
from oraculo.api.server.proxies import BehindProxies
from oraculo.settings import ApiSettings


def bind(config: uvicorn.Config, settings: ApiSettings) -> None:
    """Bound the connections of the server that will start with `config`, which must be loaded.

    Requests are read by httptools, whatever parser the configuration names.
    """
    config.timeout_keep_alive = settings.keep_alive  # type: ignore[assignment]  # any number of seconds will do
    config.ws_protocol_class = None  # the API has no WebSockets, and their connections would know no bounds
    bounds = Bounds(settings)
    config.http_protocol_class = partial(BoundedConnection, bounds=bounds)  # type: ignore[assignment]
    if isinstance(config.loaded_app, ProxyHeadersMiddleware):  # it trusts the addresses of uvicorn's own options
        config.loaded_app = config.loaded_app.app
    if settings.proxies:
        config.loaded_app = BehindProxies(config.loaded_app, settings.proxies, bounds)
    mask_keys(settings.keys)


def bind_every_server_of(app: object, settings: ApiSettings) -> None:
    """Bound each uvicorn server of this process that serves `app`.

    `uvicorn oraculo.main:app` makes its server before it imports the app, and an app never sees its server. So the
    bounds are put on when the server starts.
    """
    start = uvicorn.Server.startup

    async def start_bounded(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        if _serves(server.config.loaded_app, app):
            bind(server.config, settings)
        await start(server, sockets)

    uvicorn.Server.startup = start_bounded  # type: ignore[assignment,method-assign]


def _serves(loaded: object, app: object) -> bool:
    """Return whether `loaded` is the app, or one of uvicorn's wrappers around it."""
    while loaded is not None and loaded is not app:
        loaded = getattr(loaded, "app", None) if type(loaded).__module__.startswith("uvicorn.") else None
    return loaded is app
