"""The bounds of HTTP connections: `bind` puts them on a uvicorn server, whichever of its HTTP parsers it uses."""

from oraculo.api.server.binding import bind, bind_every_server_of

__all__ = ["bind", "bind_every_server_of"]
