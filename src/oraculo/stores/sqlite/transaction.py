"""One transaction: which jobs of a group may be written, and the writing."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from oraculo.errors import StoreError
from oraculo.ports.store import Committed, Created, CreationOutcome
from oraculo.stores.commit_queue import Job, Taken
from oraculo.stores.sql import named_queries
from oraculo.stores.sqlite.bulk import Bulk, Lookup
from oraculo.stores.sqlite.connections import FOREIGN, Transaction, ours, primary_code
from oraculo.stores.sqlite.rows import SqliteWrite

QUERIES = named_queries("sqlite")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def write_all(connection: sqlite3.Connection, statements: Sequence[tuple[str, dict[str, Any]]]) -> list[int]:
    """Run statements in one transaction. Returns how many rows each changed."""
    with Transaction(connection):
        return [connection.execute(QUERIES[query], parameters).rowcount for query, parameters in statements]


def as_json(values: Iterable[Any]) -> str:
    return msgspec.json.encode(list(values)).decode()


SqliteJob = Job[SqliteWrite]


# -- writing, in the writer's thread --------------------------------------------------------------------------------


def is_busy(outcome: Committed | StoreError) -> bool:
    """Return True when another process was writing, so that nothing was written."""
    cause = outcome.__cause__ if isinstance(outcome, StoreError) else None
    return isinstance(cause, Exception) and primary_code(cause) in _BUSY


def write_group(group: Sequence[SqliteJob], path: str, connection: sqlite3.Connection) -> list[Committed | StoreError]:
    """Write a group in one transaction.

    If that fails, write each job alone, so that a bad one does not stop the others.
    """
    try:
        return list(_write_together(connection, group))
    except FOREIGN as error:
        if len(group) == 1 or primary_code(error) in _BUSY:
            return [ours(error, path) for _ in group]
    return [write_group([job], path, connection)[0] for job in group]


def _write_together(connection: sqlite3.Connection, group: Sequence[SqliteJob]) -> list[Committed]:
    with Transaction(connection):
        ledger = _Ledger(connection, group)
        outcomes = [ledger.enter(job) for job in group]
        ledger.write()
    return outcomes


class _Ledger:
    """The decisions on what may be written, given what is stored and what this group wrote before."""

    def __init__(self, connection: sqlite3.Connection, group: Sequence[SqliteJob]) -> None:
        inserts = [insert for job in group for insert in job.inserts]
        updates = [update for job in group for update in job.updates]
        self._connection = connection
        stored = _STORED_RUNS.rows(connection, {write.run_id for write in chain(inserts, updates)})
        used = _USED_KEYS.rows(connection, {insert.key for insert in inserts if insert.key is not None})
        self._numbers = {run_id: (n, version) for run_id, n, version, _, _ in stored}
        self._taken = Taken((run_id, key, fingerprint) for run_id, _, _, key, fingerprint in chain(stored, used))
        self._next_number = self._take_numbers(len(inserts)) if inserts else 0
        self._inserts: list[SqliteWrite] = []
        self._updates: list[SqliteWrite] = []

    def _take_numbers(self, count: int) -> int:
        [(last,)] = self._connection.execute(QUERIES["take_numbers"], {"count": count}).fetchall()
        return int(last) - count + 1

    def enter(self, job: SqliteJob) -> Committed:
        created = [self._taken.outcome_of(insert) or self._enter_insert(insert) for insert in job.inserts]
        return Committed(created, frozenset(u.run_id for u in job.updates if not self._enter_update(u)))

    def _enter_insert(self, insert: SqliteWrite) -> Created:
        self._taken.add(insert.run_id, insert.key, insert.fingerprint)
        self._numbers[insert.run_id] = self._next_number, insert.version
        insert.belong_to(self._next_number, is_new=True)
        self._next_number += 1
        self._inserts.append(insert)
        return Created(CreationOutcome.CREATED, insert.run_id)

    def _enter_update(self, update: SqliteWrite) -> bool:
        n, version = self._numbers.get(update.run_id, (0, -1))
        if version != update.version - 1:
            return False
        self._numbers[update.run_id] = n, update.version
        update.belong_to(n)
        self._updates.append(update)
        return True

    def write(self) -> None:
        inserts, updates = self._inserts, self._updates
        _INSERT_RUNS.run(self._connection, [insert.head for insert in inserts])
        _INSERT_INPUTS.run(self._connection, [insert.inputs for insert in inserts])
        if len(updates) == 1:
            self._connection.execute(QUERIES["update_head"], updates[0].head)
        else:
            for part in _without_repeats(updates):
                _UPDATE_HEADS.run(self._connection, [update.head for update in part])
        _WRITE_TASKS.run(self._connection, [row for write in chain(inserts, updates) for row in write.tasks])
        _INSERT_HISTORY.run(self._connection, [row for write in chain(inserts, updates) for row in write.history])


def _without_repeats(updates: list[SqliteWrite]) -> Iterator[list[SqliteWrite]]:
    """Yield parts in which each run occurs once: UPDATE … FROM picks any of several rows for one run."""
    part: dict[str, SqliteWrite] = {}
    for update in updates:
        if update.run_id in part:
            yield list(part.values())
            part = {}
        part[update.run_id] = update
    yield list(part.values())


_STORED_RUNS = Lookup(QUERIES["stored_runs"])
_USED_KEYS = Lookup(QUERIES["used_keys"])
_INSERT_RUNS = Bulk(QUERIES["insert_runs"])
_INSERT_INPUTS = Bulk(QUERIES["insert_inputs"])
_UPDATE_HEADS = Bulk(QUERIES["update_heads"])
_WRITE_TASKS = Bulk(QUERIES["write_tasks"])
_INSERT_HISTORY = Bulk(QUERIES["insert_history"])


def prune(numbers: list[int], ended_before: float, connection: sqlite3.Connection) -> int:
    with Transaction(connection):
        parameters = {"numbers": as_json(numbers), "ended_before": ended_before}
        still = connection.execute(QUERIES["still_prunable"], parameters).fetchall()
        gone = {"numbers": as_json(n for (n,) in still)}
        for query in ("delete_history", "delete_tasks", "delete_inputs", "delete_runs"):
            connection.execute(QUERIES[query], gone)
    return len(still)
