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


def look(path: str, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()
