"""The bounds of HTTP connections: `bind` puts them on a uvicorn server."""

from oraculo.api.server.binding import bind, bind_every_server_of

__all__ = ["bind", "bind_every_server_of"]
