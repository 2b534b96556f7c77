"""A store in one SQLite file."""

from oraculo.stores.sqlite.connections import MEMORY, is_older_file
from oraculo.stores.sqlite.store import SqliteStore

__all__ = ["MEMORY", "SqliteStore", "is_older_file"]
