"""A store in PostgreSQL, for several engines at once."""

from oraculo.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
