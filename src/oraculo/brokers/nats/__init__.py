"""NATS JetStream: `broker` is the port, the rest is what it is made of."""

from oraculo.errors import how_to_add

try:
    import nats.aio.client  # noqa: F401 - asked for here, before any part of this package needs it
except ImportError as missing:
    raise ImportError(f"nats:// needs the package nats-py: {how_to_add('nats')}") from missing

from oraculo.brokers.nats.broker import NatsBroker

__all__ = ["NatsBroker"]
