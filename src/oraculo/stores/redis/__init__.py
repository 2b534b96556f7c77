"""Runs in Redis or Valkey: `store` is the port, the rest is what it is made of."""

from oraculo.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
