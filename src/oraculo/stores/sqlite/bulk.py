"""Statements that write many rows, or look up many values, at once.

executemany() gives up the interpreter's lock twice for each row. While the event loop is busy, it waits up to 5 ms each
time to have the lock back. So a statement takes many rows: exactly as many for a few, and otherwise a power of two,
padded with NULLs. Then few statements are prepared, and all stay in the connection's cache.
"""

import math
import sqlite3
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from oraculo.core.chunks import pages

Row = list[Any]

# SQLite stores NaN as NULL. Python's module binds a float in 0.05 µs, and None in 0.7 µs, because it tries adapters
# first. With ten of them in a row, that is most of the cost of writing it. A bytearray instead of bytes, and a plain
# value instead of an enum, save the same.
NULL = math.nan
MOST = 512  # rows or values in one statement
_EXACT = 8  # rows up to which the size is exact: most commits are small, and removing NULLs costs time


def _size_for(count: int) -> int:
    return count if count <= _EXACT else 1 << (count - 1).bit_length()


class Bulk:
    """A statement that writes rows. Its SQL has `VALUES /* rows */`, and the first column is never NULL."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._sized: dict[int, str] = {}

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        if len(rows) > MOST:
            for part in pages(rows, MOST):
                self._write(connection, part)
        elif rows:
            self._write(connection, rows)

    def _write(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        size, width = _size_for(len(rows)), len(rows[0])
        parameters = rows[0] if size == 1 else list(chain.from_iterable(rows))
        if size > len(rows):
            parameters += [NULL] * (size * width - len(parameters))
        connection.execute(self._sized.get(size) or self._of_size(size, width), parameters)

    def _of_size(self, size: int, width: int) -> str:
        row = f"({', '.join('?' * width)})"
        values = f"VALUES {', '.join([row] * size)}"
        if size > _EXACT:
            values = f"SELECT * FROM ({values}) WHERE column1 IS NOT NULL"
        sql = self._sized[size] = self._sql.replace("VALUES /* rows */", values)
        return sql


class Lookup:
    """A statement that finds the rows of some values. Its SQL has `/* values */`."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._sized: dict[int, str] = {}

    def rows(self, connection: sqlite3.Connection, values: Collection[str]) -> list[Any]:
        if len(values) <= _EXACT:
            return self._rows(connection, list(values)) if values else []
        return [row for part in pages(list(values), MOST) for row in self._rows(connection, list(part))]

    def _rows(self, connection: sqlite3.Connection, values: list[Any]) -> list[Any]:
        size = _size_for(len(values))
        values += [NULL] * (size - len(values))
        return connection.execute(self._sized.get(size) or self._of_size(size), values).fetchall()

    def _of_size(self, size: int) -> str:
        sql = self._sized[size] = self._sql.replace("/* values */", ", ".join("?" * size))
        return sql
