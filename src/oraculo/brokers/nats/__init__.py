"""NATS JetStream: `broker` is the port, the rest is what it is made of."""

from oraculo.brokers.nats.broker import NatsBroker

__all__ = ["NatsBroker"]
