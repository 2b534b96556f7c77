"""Broker URLs, read by `oraculo.clients.address`."""

from collections.abc import Sequence

from oraculo.clients import address
from oraculo.clients.address import Address
from oraculo.errors import BrokerError, BrokerUnavailable

__all__ = ["Address", "no_node", "read_address"]


def read_address(url: str, *, port: int, known: frozenset[str] = frozenset(), is_cluster: bool = False) -> Address:
    """Return what a broker URL says. Raises InvalidSettings, which names ORACULO_BROKER_URL."""
    return address.read_address(url, "ORACULO_BROKER_URL", port=port, known=known, is_cluster=is_cluster)


def no_node(failures: Sequence[BrokerError]) -> BrokerError:
    """Return the error for a cluster whose nodes all failed.

    It is BrokerError only when every node refused: what one node does not allow, another may.
    """
    if len(failures) == 1:
        return failures[0]
    reasons = "; ".join(map(str, failures))
    is_away = any(isinstance(failure, BrokerUnavailable) for failure in failures)
    return BrokerUnavailable(reasons) if is_away else BrokerError(reasons)
