"""NATS JetStream: `broker` is the port, the rest is what it is made of."""

try:
    import nats.aio.client  # noqa: F401 - asked for here, before any part of this package needs it
except ImportError as missing:
    raise ImportError("nats:// needs the package nats-py: pip install 'oraculo[nats]'") from missing

from oraculo.brokers.nats.broker import NatsBroker

__all__ = ["NatsBroker"]
