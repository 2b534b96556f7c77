"""Statements of many rows: everything is written and found once, whatever the number, by few statements."""

import sqlite3
from collections.abc import Iterator

import pytest

from oraculo.stores.sqlite.bulk import MOST, NULL, Bulk, Lookup

COUNTS = [0, 1, 2, 7, 8, 9, 16, 17, MOST, MOST + 1, MOST + 9, 2 * MOST + 3]


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (id TEXT PRIMARY KEY, note TEXT)")
    yield connection
    connection.close()


def names(count: int) -> list[str]:
    return [f"id-{number:05}" for number in range(count)]


@pytest.mark.parametrize("count", COUNTS)
def test_every_row_is_written_once(connection: sqlite3.Connection, count: int) -> None:
    rows = [[name, NULL] for name in names(count)]
    Bulk("INSERT INTO t (id, note) VALUES /* rows */").run(connection, rows)
    written = connection.execute("SELECT id, note FROM t ORDER BY id").fetchall()
    assert written == [(name, None) for name in names(count)]
    assert rows == [[name, NULL] for name in names(count)]  # they are the caller's


@pytest.mark.parametrize("count", COUNTS)
def test_rows_that_are_there_are_changed(connection: sqlite3.Connection, count: int) -> None:
    Bulk("INSERT INTO t (id, note) VALUES /* rows */").run(connection, [[name, "old"] for name in names(count + 1)])
    upsert = Bulk("INSERT INTO t (id, note) VALUES /* rows */ ON CONFLICT (id) DO UPDATE SET note = excluded.note")
    upsert.run(connection, [[name, "new"] for name in names(count)])
    assert [note for (note,) in connection.execute("SELECT note FROM t ORDER BY id")] == ["new"] * count + ["old"]


@pytest.mark.parametrize("count", COUNTS)
def test_every_value_is_found_once(connection: sqlite3.Connection, count: int) -> None:
    Bulk("INSERT INTO t (id, note) VALUES /* rows */").run(connection, [[name, NULL] for name in names(count + 1)])
    lookup = Lookup("SELECT id FROM t WHERE id IN (/* values */)")
    assert sorted(lookup.rows(connection, {*names(count), "missing"})) == [(name,) for name in names(count)]
    assert sorted(lookup.rows(connection, set(names(count)))) == [(name,) for name in names(count)]


def test_few_statements_are_made(connection: sqlite3.Connection) -> None:
    """They must all stay in the connection's cache, with those of the other tables."""
    bulk = Bulk("INSERT OR REPLACE INTO t (id, note) VALUES /* rows */")
    lookup = Lookup("SELECT 1 FROM t WHERE id IN (/* values */)")
    rows = [[name, NULL] for name in names(MOST)]
    for count in range(1, MOST + 1):
        bulk.run(connection, rows[:count])
        lookup.rows(connection, names(count))
    assert len(bulk._sized) == len(lookup._sized) == 14  # 1 to 8, and 16 to 512
