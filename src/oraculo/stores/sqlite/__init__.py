"""Runs in one SQLite file."""

from oraculo.stores.sqlite.connections import MEMORY
from oraculo.stores.sqlite.store import SqliteStore

__all__ = ["MEMORY", "SqliteStore"]
