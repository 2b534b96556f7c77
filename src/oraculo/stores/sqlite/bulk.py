"""Statements that write many rows, or look for many values, at once.

Not executemany(): that gives up the interpreter's lock twice for each row and, while the event loop is busy, waits up
to 5 ms to have it back each time. A statement is made in the very size for a few rows, and else in sizes of a power of
two, filled up with NULLs, so that few are to be prepared and all of them stay in the connection's cache.
"""

import math
import sqlite3
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from oraculo.core.chunks import pages

Row = list[Any]

# SQLite stores NaN as NULL. Python's module binds a float in 0.05 µs and None, which it first tries to adapt, in 0.7;
# with ten of them in a row that is most of the cost of writing it. For the same reason a blob goes as a bytearray and
# an enum as its plain value.
NULL = math.nan
MOST = 512  # rows or values of one statement
_EXACT = 8  # up to so many it is made in the very size: most commits are small, and to leave out the NULLs costs time


def _size_for(count: int) -> int:
    return count if count <= _EXACT else 1 << (count - 1).bit_length()


class Bulk:
    """Writes rows, with `VALUES /* rows */` in its SQL; their first column is never NULL."""

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
    """Finds the rows of some values, with `/* values */` in its SQL."""

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
