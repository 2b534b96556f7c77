"""What a broker's URL says; `oraculo.clients.address` reads it."""

from oraculo.clients import address
from oraculo.clients.address import Address

__all__ = ["Address", "read_address"]


def read_address(url: str, *, port: int, known: frozenset[str] = frozenset()) -> Address:
    """`port` where the URL has none; `known`: the parameters that the adapter understands. Raises InvalidSettings."""
    return address.read_address(url, "ORACULO_BROKER_URL", port=port, known=known)
