"""What a broker's URL says; `oraculo.clients.address` reads it."""

from collections.abc import Sequence

from oraculo.clients import address
from oraculo.clients.address import Address
from oraculo.errors import BrokerError, BrokerUnavailable

__all__ = ["Address", "no_node", "read_address"]


def read_address(url: str, *, port: int, known: frozenset[str] = frozenset(), is_cluster: bool = False) -> Address:
    """As there, of the setting that names the brokers. Raises InvalidSettings."""
    return address.read_address(url, "ORACULO_BROKER_URL", port=port, known=known, is_cluster=is_cluster)


def no_node(failures: Sequence[BrokerError]) -> BrokerError:
    """What became of an attempt at each node of a cluster. It is refused for good only when every one says so: what one
    does not let pass may go by another."""
    if len(failures) == 1:
        return failures[0]
    told = "; ".join(map(str, failures))
    is_away = any(isinstance(failure, BrokerUnavailable) for failure in failures)
    return BrokerUnavailable(told) if is_away else BrokerError(told)
