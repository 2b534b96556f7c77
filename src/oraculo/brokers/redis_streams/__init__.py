"""Redis Streams: `broker` is the port, the rest is what it is made of."""

from oraculo.brokers.redis_streams.broker import RedisStreamsBroker

__all__ = ["RedisStreamsBroker"]
