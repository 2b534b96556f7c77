"""A store in Redis or Valkey. `store` implements the port, and the other files are its parts."""

from oraculo.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
