"""The numbers that bound connections, and the count of each client's connections."""

import logging
import time
from collections.abc import Hashable
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Protocol

from oraculo.core.log_throttle import LogThrottle
from oraculo.settings import ApiSettings

HEAD_BYTES = 64 * 1024  # of a request line with its headers, of trailers, and of a chunk's extensions
HEAD_FIELDS = 100  # headers of a request, and trailers

_logger = logging.getLogger("oraculo.api")


class Seat(Protocol):
    """A connection, as the count of a client's connections sees it."""

    def is_serving(self) -> bool:
        """Return whether a request is being answered."""
        ...

    def give_way(self) -> None:
        """Close, for a newer connection of the same client."""
        ...


class Bounds:
    """The bounds that the connections of one server share."""

    def __init__(self, settings: ApiSettings) -> None:
        self.header_timeout = settings.header_timeout
        self.write_timeout = settings.write_timeout
        self._most = settings.client_connections
        self._proxies = [ip_network(entry, strict=False) for entry in settings.proxies]
        self._connections: dict[Hashable, dict[Seat, None]] = {}  # of each client, the oldest first
        self._repeats = LogThrottle()

    def is_proxy(self, address: str) -> bool:
        """Return whether a configured proxy has the address: the clients behind it are counted, and not it."""
        try:
            return any(ip_address(address) in network for network in self._proxies)
        except ValueError:
            return False

    def enter(self, client: Hashable, connection: Seat) -> bool:
        """Count a connection of `client`, or its request behind a proxy. Return False when it has too many.

        Its oldest idle connection is closed first, so that idle connections keep out nobody.
        """
        connections = self._connections.setdefault(client, {})
        if len(connections) >= self._most:
            idle = next((one for one in connections if not one.is_serving()), None)
            if idle is None:
                return False
            del connections[idle]
            idle.give_way()
        connections[connection] = None
        return True

    def leave(self, client: Hashable, connection: Seat) -> None:
        """Count `connection` no longer."""
        connections = self._connections.get(client, {})
        connections.pop(connection, None)
        if not connections:
            self._connections.pop(client, None)

    def log(self, what: str, address: str) -> None:
        """Log what was done to a connection, the same at most once a minute."""
        if times := self._repeats.times(what, time.monotonic()):
            _logger.warning("%s (%s%s)", what, address, f", and {times - 1} more" if times > 1 else "")


def client_of(address: str) -> Hashable:
    """Return what counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, IPv4Address):
        return ip.packed
    return ip.packed[:8] if ip.ipv4_mapped is None else ip.ipv4_mapped.packed
