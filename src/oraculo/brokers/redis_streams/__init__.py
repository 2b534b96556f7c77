"""A broker on Redis Streams. `broker` implements the port, and the other files are its parts."""

from oraculo.brokers.redis_streams.broker import RedisStreamsBroker

__all__ = ["RedisStreamsBroker"]
