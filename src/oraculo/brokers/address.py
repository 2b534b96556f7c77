"""What a broker's URL says; `oraculo.clients.address` reads it."""

from oraculo.clients import address
from oraculo.clients.address import Address

__all__ = ["Address", "read_address"]


def read_address(url: str, *, port: int, known: frozenset[str] = frozenset(), is_cluster: bool = False) -> Address:
    """As there, of the setting that names the brokers. Raises InvalidSettings."""
    return address.read_address(url, "ORACULO_BROKER_URL", port=port, known=known, is_cluster=is_cluster)
