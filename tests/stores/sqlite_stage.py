"""A file of SQLite, and a look into it beside the store."""

import sqlite3
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from oraculo.stores.sqlite import SqliteStore
from tests.stores.started import started


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "oraculo.db")


def opened(path: str, *, inline: bool = False) -> AbstractAsyncContextManager[SqliteStore]:
    return started(SqliteStore(path, inline=inline))


def damage(path: str, page: int) -> None:
    """As a failing disk does. What was in the log is in the file then, too."""
    look(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    [(size,)] = look(path, "PRAGMA page_size")
    assert isinstance(size, int)
    with open(path, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xaa" * size)


def root_page(path: str, table: str) -> int:
    [(page,)] = look(path, f"SELECT rootpage FROM sqlite_master WHERE name = '{table}'")
    assert isinstance(page, int)
    return page


def look(path: str, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()
