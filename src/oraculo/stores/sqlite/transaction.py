"""One transaction: what of a group of commits may be written, and the writing of it."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from oraculo.errors import StoreError
from oraculo.ports.store import Committed, Created, CreationOutcome
from oraculo.stores.sql import named_queries
from oraculo.stores.sql.jobs import Job
from oraculo.stores.sqlite.bulk import Bulk, Lookup
from oraculo.stores.sqlite.connections import FOREIGN, Transaction, ours, primary_code
from oraculo.stores.sqlite.rows import Birth, Update

QUERIES = named_queries("sqlite")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def write_all(connection: sqlite3.Connection, statements: Sequence[tuple[str, dict[str, Any]]]) -> list[int]:
    """In one transaction. Returns how many rows each changed."""
    with Transaction(connection):
        return [connection.execute(QUERIES[query], parameters).rowcount for query, parameters in statements]


def as_json(values: Iterable[Any]) -> str:
    return msgspec.json.encode(list(values)).decode()


class SqliteJob(Job[Birth, Update]):
    __slots__ = ()


# -- one transaction, in the writer's thread ------------------------------------------------------------------------


def is_busy(outcome: Committed | StoreError) -> bool:
    """Whether another process was writing, so that nothing was tried."""
    cause = outcome.__cause__ if isinstance(outcome, StoreError) else None
    return isinstance(cause, Exception) and primary_code(cause) in _BUSY


def write_group(group: Sequence[SqliteJob], path: str, connection: sqlite3.Connection) -> list[Committed | StoreError]:
    """All in one transaction; if that fails, each in its own, so that a bad one does not sink the others."""
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


class _Stored:
    """What a transaction knows of a run that is in the file, or will be by its end."""

    __slots__ = ("fingerprint", "n", "run_id", "version")

    def __init__(self, run_id: str, n: int, version: int, fingerprint: str) -> None:
        self.run_id = run_id
        self.n = n
        self.version = version
        self.fingerprint = fingerprint


class _Ledger:
    """Decides what of a group may be written, against what is stored and what the group itself wrote before."""

    def __init__(self, connection: sqlite3.Connection, group: Sequence[SqliteJob]) -> None:
        births = [birth for job in group for birth in job.births]
        updates = (update for job in group for update in job.updates)
        self._connection = connection
        self._by_id = self._stored_runs({write.run_id for write in chain(births, updates)})
        self._by_key = self._used_keys({birth.key for birth in births if birth.key is not None})
        self._next_number = self._take_numbers(len(births)) if births else 0
        self._births: list[Birth] = []
        self._updates: list[Update] = []

    def _stored_runs(self, ids: set[str]) -> dict[str, _Stored]:
        return {row[0]: _Stored(*row) for row in _STORED_RUNS.rows(self._connection, ids)}

    def _used_keys(self, keys: set[str]) -> dict[str, _Stored]:
        rows = _USED_KEYS.rows(self._connection, keys)
        return {key: _Stored(run_id, 0, 0, fingerprint) for key, run_id, fingerprint in rows}

    def _take_numbers(self, count: int) -> int:
        [(last,)] = self._connection.execute(QUERIES["take_numbers"], {"count": count}).fetchall()
        return int(last) - count + 1

    def enter(self, job: SqliteJob) -> Committed:
        created = [self._enter_birth(birth) for birth in job.births]
        return Committed(created, frozenset(u.run_id for u in job.updates if not self._enter_update(u)))

    def _enter_birth(self, birth: Birth) -> Created:
        if birth.key is not None and (stored := self._by_key.get(birth.key)):
            return _again(birth, stored, CreationOutcome.KEY_REUSED)
        if stored := self._by_id.get(birth.run_id):
            return _again(birth, stored, CreationOutcome.ID_IN_USE)
        stored = _Stored(birth.run_id, self._next_number, birth.version, birth.fingerprint)
        self._next_number += 1
        self._by_id[birth.run_id] = stored
        if birth.key is not None:
            self._by_key[birth.key] = stored
        birth.belong_to(stored.n)
        self._births.append(birth)
        return Created(CreationOutcome.CREATED, birth.run_id)

    def _enter_update(self, update: Update) -> bool:
        stored = self._by_id.get(update.run_id)
        if stored is None or stored.version != update.version - 1:
            return False
        stored.version = update.version
        update.belong_to(stored.n)
        self._updates.append(update)
        return True

    def write(self) -> None:
        births, updates = self._births, self._updates
        _INSERT_RUNS.run(self._connection, [birth.head for birth in births])
        _INSERT_INPUTS.run(self._connection, [birth.inputs for birth in births])
        if len(updates) == 1:
            n, *changing = updates[0].head
            self._connection.execute(QUERIES["update_head"], [*changing, n])
        else:
            for part in _without_repeats(updates):
                _UPDATE_HEADS.run(self._connection, [update.head for update in part])
        _WRITE_TASKS.run(self._connection, [row for write in chain(births, updates) for row in write.tasks])
        _INSERT_HISTORY.run(self._connection, [row for write in chain(births, updates) for row in write.history])


def _again(birth: Birth, stored: _Stored, otherwise: CreationOutcome) -> Created:
    return Created(CreationOutcome.SAME if stored.fingerprint == birth.fingerprint else otherwise, stored.run_id)


def _without_repeats(updates: list[Update]) -> Iterator[list[Update]]:
    """UPDATE … FROM does not say which of two rows for one run wins, so each part has a run only once."""
    part: dict[str, Update] = {}
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
