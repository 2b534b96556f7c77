"""Runs in one SQLite file: durable, with no server.

- One writer thread. Commits that arrive while one is being written are written together, in one transaction: the disk
  is synced once for all of them.
- Readers have connections of their own (the file is in WAL mode): one for the engine, one for people, so that neither a
  long list nor a long search holds up a commit or a timer.
- Another process may open the same file: a transaction takes the write lock at once and then compares versions.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.run import Changes, RunHead, RunStatus
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.store import Committed, Created, Creation, Due, Outcome, Page, RunQuery, Snapshot, Unsent
from oraculo.stores.file_lock import FileLock
from oraculo.stores.sql import migrations, named_queries
from oraculo.stores.sql.cursor import make_cursor, read_cursor
from oraculo.stores.sqlite_rows import RUN_STATUS, Birth, Bulk, Update, head_of, task_of

MEMORY = ":memory:"
OLDEST_SQLITE = (3, 35, 0)  # UPDATE … FROM and RETURNING
BUSY_SECONDS = 5.0
# Limits of one transaction, so that neither memory nor the wait of those behind it grows without end.
GROUP_ROWS = 20_000
PRUNED_TASKS = 5_000

Result = TypeVar("Result")
_QUERIES = named_queries("sqlite")


class SqliteStore:
    """Keeps the contract of `ports.store.Store`.

    `inline`: every call runs at once in the caller's thread, for simulations that must be deterministic.
    `exclusive`: no other process may open the file this way, for a broker that lives inside one process: the timers of
    another would put commands on queues that no worker of this one sees.
    """

    name = "sqlite"

    def __init__(self, path: str, *, inline: bool = False, exclusive: bool = False) -> None:
        self._path = path
        self._inline = inline
        self._lock = FileLock(f"{path}.lock") if exclusive and path != MEMORY else None
        self._lanes: list[_Lane] = []
        self._queue: deque[_Job] = deque()
        self._draining: asyncio.Task[None] | None = None
        self._migrated: Sequence[str] = ()  # by opening it, until somebody asks

    # -- opening and closing ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._lanes:
            return
        _make_parent(self._path)
        if self._lock is not None:
            self._lock.take()
        roles = ("writer",) if self._path == MEMORY else ("writer", "reader", "browser")
        self._lanes = [_Lane(f"sqlite-{role}", self._path, self._inline) for role in roles]
        try:
            for lane in self._lanes:
                await lane.open(read_only=lane is not self._writer)
                if lane is self._writer:  # before anybody reads
                    self._migrated = await lane.run(partial(_migrate, path=self._path))
        except BaseException:
            await self.close()
            raise

    async def migrate(self) -> Sequence[str]:
        """Opening it does that too: the file is one machine's, and nobody else's programs are in its way."""
        await self.start()
        migrated, self._migrated = self._migrated, ()
        return migrated

    async def close(self) -> None:
        if self._draining is not None:
            await asyncio.wait([self._draining])
        lanes, self._lanes = self._lanes, []
        for lane in reversed(lanes):  # the writer last: it is the one that can fold the WAL into the file
            await lane.close()
        if self._lock is not None:
            self._lock.release()

    async def check(self) -> str:
        try:
            await self._write("prove_write", {})
            await self._read("next_due", {})
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error
        return f"SQLite {sqlite3.sqlite_version}"

    def _lane(self, number: int) -> "_Lane":
        if not self._lanes:
            raise StoreError(f"the store {self._path} is not open: call start() first, and nothing after close()")
        return self._lanes[min(number, len(self._lanes) - 1)]

    @property
    def _writer(self) -> "_Lane":
        return self._lane(0)

    @property
    def _reader(self) -> "_Lane":
        return self._lane(1)

    @property
    def _browser(self) -> "_Lane":
        return self._lane(2)

    async def _read(self, query: str, parameters: dict[str, Any]) -> list[Any]:
        sql = _QUERIES[query]
        return await self._reader.run(lambda connection: connection.execute(sql, parameters).fetchall())

    async def _write(self, query: str, parameters: dict[str, Any]) -> int:
        return await self._writer.run(lambda connection: _write_one(connection, query, parameters))

    # -- commits ------------------------------------------------------------------------------------------------

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        writer = self._writer
        with _translated(self._path):  # rows are built before the first await: the run may change after it
            job = _Job([Birth(creation) for creation in creations], [Update(change) for change in changes])
        self._queue.append(job)
        if self._inline:
            await self._drain(writer)
        elif self._draining is None:
            self._draining = asyncio.create_task(self._drain(writer))
        return await job.done

    async def _drain(self, writer: "_Lane") -> None:
        """Writes the queue, a group at a time. A caller who gives up waiting does not stop it."""
        group: list[_Job] = []
        try:
            while self._queue:
                group = list(self._next_group())
                outcomes = await writer.run(partial(_write_group, group, self._path))
                for job, outcome in zip(group, outcomes, strict=True):
                    job.settle(outcome)
        except BaseException as error:
            for job in chain(group, self._queue):
                job.settle(StoreError(f"the commit was given up: {error!r}"))
            self._queue.clear()
            raise
        finally:
            self._draining = None

    def _next_group(self) -> "Iterator[_Job]":
        rows = 0
        while self._queue and rows < GROUP_ROWS:
            job = self._queue.popleft()
            rows += job.rows
            yield job

    # -- what the engine reads ----------------------------------------------------------------------------------

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        return await self._reader.run(partial(_load, tuple(run_ids)))

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        heads = map(head_of, await self._read("load_heads", {"ids": _json(run_ids)}))
        return {head.id: head for head in heads}

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        rows = await self._read("due", {"now": now, "limit": limit})
        return [Due(run_id, task) for _, _, task, run_id in rows]

    async def next_due(self) -> float | None:
        [(due_at,)] = await self._read("next_due", {})
        return None if due_at is None else float(due_at)

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        run_id, task = after or ("", -1)
        found = await self._read("number_of_run", {"id": run_id})
        # A run that was pruned meanwhile has lost its place: begin again rather than leave something out.
        place = {"n": found[0][0], "number": task} if found else {"n": 0, "number": -1}
        rows = await self._read("unsent", place | {"limit": limit})
        return [Unsent(*row) for row in rows]

    async def brokers_in_use(self) -> Sequence[str | None]:
        return [via for (via,) in await self._read("brokers_in_use", {})]

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        found = await self._read("number_of_run", {"id": after})
        query = "dead_letters_with" if dead_letters else "commands_with"
        rows = await self._read(query, {"via": via, "n": found[0][0] if found else 0, "limit": limit})
        return [run_id for _, run_id in rows]

    async def forget_sent(self) -> int:
        return await self._write("forget_commands", {}) + await self._write("forget_dead_letters", {})

    # -- what people read ---------------------------------------------------------------------------------------

    async def runs(self, query: RunQuery) -> Page:
        before = read_cursor(query.cursor)
        sql, parameters = _listing(query)
        parameters |= {"before": before, "limit": query.limit + 1}
        rows = await self._browser.run(lambda connection: connection.execute(sql, parameters).fetchall())
        page = rows[: query.limit]
        more = len(rows) > query.limit and bool(page)
        return Page([head_of(row[1:]) for row in page], make_cursor(page[-1][0]) if more else None)

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        parameters = {"id": run_id, "after": after, "limit": limit}
        sql = _QUERIES["history"]
        rows = await self._browser.run(lambda connection: connection.execute(sql, parameters).fetchall())
        return [HistoryEntry(seq, at, Happened(what), *rest) for seq, at, what, *rest in rows]

    async def census(self) -> dict[RunStatus, int]:
        sql = _QUERIES["census"]
        rows = await self._browser.run(lambda connection: connection.execute(sql).fetchall())
        return dict.fromkeys(RunStatus, 0) | {RUN_STATUS[status]: count for status, count in rows}

    # -- retention and pipelines --------------------------------------------------------------------------------

    async def prune(self, ended_before: float, limit: int) -> int:
        found = await self._read("prunable", {"ended_before": ended_before, "limit": limit})
        pruned = 0
        for numbers in _slices(found):  # a transaction each, so that commits go on in between
            pruned += await self._writer.run(partial(_prune, numbers, ended_before))
        return pruned

    async def pipelines(self) -> dict[str, bytes]:
        return dict(await self._read("pipelines", {}))

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        await self._write("put_pipeline", {"name": name, "definition": definition, "now": now})

    async def delete_pipeline(self, name: str) -> bool:
        return await self._write("delete_pipeline", {"name": name}) > 0


# -- lanes: a connection and the thread it lives on -----------------------------------------------------------------


class _Lane:
    def __init__(self, name: str, path: str, inline: bool) -> None:
        self._path = path
        self._thread = None if inline else ThreadPoolExecutor(1, thread_name_prefix=name)
        self._connection: sqlite3.Connection | None = None

    async def open(self, *, read_only: bool) -> None:
        self._connection = await self._call(_open_reader if read_only else _open_writer, self._path)

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        assert self._connection is not None, "a lane is opened before it is used"
        return await self._call(work, self._connection)

    async def _call(self, work: Callable[[Any], Result], subject: object) -> Result:
        if self._thread is None:
            return self._translated_call(work, subject)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._translated_call, work, subject)

    def _translated_call(self, work: Callable[[Any], Result], subject: object) -> Result:
        with _translated(self._path):
            return work(subject)

    async def close(self) -> None:
        try:
            if self._connection is not None:
                await self._call(sqlite3.Connection.close, self._connection)
        finally:
            self._connection = None
            if self._thread is not None:
                self._thread.shutdown(wait=False)


def _make_parent(path: str) -> None:
    if path == MEMORY:
        return
    parent = Path(path).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"the folder {parent} of the SQLite file cannot be made: {error}") from error


def _open_writer(path: str) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: Python must be built with {oldest} or newer")
    connection = _connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_reader(path: str) -> sqlite3.Connection:
    return _connect(f"file:{quote(path)}?mode=ro", uri=True)


def _connect(address: str, *, uri: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(
        address,
        timeout=BUSY_SECONDS,
        isolation_level=None,  # transactions are begun and ended here, not guessed by the module
        cached_statements=256,
        uri=uri,
    )
    connection.create_function("folded", 1, str.casefold, deterministic=True)
    return connection


def _migrate(connection: sqlite3.Connection, path: str) -> list[str]:
    known = migrations("sqlite")
    with _transaction(connection):
        [(version,)] = connection.execute("PRAGMA user_version").fetchall()
        if version > len(known):
            raise StoreError(
                f"{path} was written by a newer ORÁCULO (its schema is {version}, this program knows {len(known)}): "
                "run that version, or give ORACULO_STORE_URL another file"
            )
        for migration in known[version:]:
            for statement in _statements(migration.script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {migration.number}")
    return [migration.label for migration in known[version:]]


def _statements(script: str) -> Iterator[str]:
    """One by one, because executescript() would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


# -- the border: SQLite's errors become ours ------------------------------------------------------------------------

_WORTH_A_RETRY = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_FOREIGN = (sqlite3.Error, OverflowError, UnicodeError, msgspec.EncodeError)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except _FOREIGN as error:
        raise _ours(error, path) from error


def _ours(error: Exception, path: str) -> StoreError:
    kind = StoreUnavailable if _primary_code(error) in _WORTH_A_RETRY else StoreError
    return kind(f"SQLite file {path}: {error}")


def _primary_code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends it by itself when the disk is full
            connection.execute("ROLLBACK")
        raise


def _write_one(connection: sqlite3.Connection, query: str, parameters: dict[str, Any]) -> int:
    with _transaction(connection):
        return connection.execute(_QUERIES[query], parameters).rowcount


def _json(values: Iterable[Any]) -> str:
    return msgspec.json.encode(list(values)).decode()


class _Job:
    """One call of `commit`, on its way to the writer."""

    __slots__ = ("births", "done", "rows", "updates")

    def __init__(self, births: list[Birth], updates: list[Update]) -> None:
        self.births = births
        self.updates = updates
        self.rows = sum(len(write.tasks) + len(write.history) + 1 for write in chain(births, updates))
        self.done: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()

    def settle(self, outcome: Committed | StoreError) -> None:
        """In the event loop's thread. The caller may be gone: what was written was written."""
        if isinstance(outcome, Committed):
            self._note_versions(outcome)
            if not self.done.done():
                self.done.set_result(outcome)
        elif not self.done.done():
            self.done.set_exception(outcome)

    def _note_versions(self, outcome: Committed) -> None:
        for birth, created in zip(self.births, outcome.created, strict=True):
            if created.outcome is Outcome.CREATED:
                birth.changes.run.head.version = birth.version
        for update in self.updates:
            if update.run_id not in outcome.conflicts:
                update.changes.run.head.version = update.version


# -- one transaction, in the writer's thread ------------------------------------------------------------------------


def _write_group(group: Sequence[_Job], path: str, connection: sqlite3.Connection) -> list[Committed | StoreError]:
    """All in one transaction; if that fails, each in its own, so that a bad one does not sink the others."""
    try:
        return list(_write_together(connection, group))
    except _FOREIGN as error:
        if len(group) == 1 or _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return [_ours(error, path) for _ in group]
    return [_write_group([job], path, connection)[0] for job in group]


def _write_together(connection: sqlite3.Connection, group: Sequence[_Job]) -> list[Committed]:
    with _transaction(connection):
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

    def __init__(self, connection: sqlite3.Connection, group: Sequence[_Job]) -> None:
        births = [birth for job in group for birth in job.births]
        updates = (update for job in group for update in job.updates)
        self._connection = connection
        self._by_id = self._stored_runs({write.run_id for write in chain(births, updates)})
        self._by_key = self._used_keys({birth.key for birth in births if birth.key is not None})
        self._next_number = self._take_numbers(len(births)) if births else 0
        self._births: list[Birth] = []
        self._updates: list[Update] = []

    def _stored_runs(self, ids: set[str]) -> dict[str, _Stored]:
        rows = self._connection.execute(_QUERIES["stored_runs"], {"ids": _json(ids)}).fetchall()
        return {row[0]: _Stored(*row) for row in rows}

    def _used_keys(self, keys: set[str]) -> dict[str, _Stored]:
        if not keys:
            return {}
        rows = self._connection.execute(_QUERIES["used_keys"], {"keys": _json(keys)}).fetchall()
        return {key: _Stored(run_id, 0, 0, fingerprint) for key, run_id, fingerprint in rows}

    def _take_numbers(self, count: int) -> int:
        [(last,)] = self._connection.execute(_QUERIES["take_numbers"], {"count": count}).fetchall()
        return int(last) - count + 1

    def enter(self, job: _Job) -> Committed:
        created = [self._enter_birth(birth) for birth in job.births]
        return Committed(created, frozenset(u.run_id for u in job.updates if not self._enter_update(u)))

    def _enter_birth(self, birth: Birth) -> Created:
        if birth.key is not None and (stored := self._by_key.get(birth.key)):
            return _again(birth, stored, Outcome.KEY_REUSED)
        if stored := self._by_id.get(birth.run_id):
            return _again(birth, stored, Outcome.ID_IN_USE)
        stored = _Stored(birth.run_id, self._next_number, birth.version, birth.fingerprint)
        self._next_number += 1
        self._by_id[birth.run_id] = stored
        if birth.key is not None:
            self._by_key[birth.key] = stored
        birth.belong_to(stored.n)
        self._births.append(birth)
        return Created(Outcome.CREATED, birth.run_id)

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
        for part in _without_repeats(updates):
            _UPDATE_HEADS.run(self._connection, [update.head for update in part])
        _WRITE_TASKS.run(self._connection, [row for write in chain(births, updates) for row in write.tasks])
        _INSERT_HISTORY.run(self._connection, [row for write in chain(births, updates) for row in write.history])


def _again(birth: Birth, stored: _Stored, otherwise: Outcome) -> Created:
    return Created(Outcome.SAME if stored.fingerprint == birth.fingerprint else otherwise, stored.run_id)


def _without_repeats(updates: list[Update]) -> Iterator[list[Update]]:
    """UPDATE … FROM does not say which of two rows for one run wins, so each part has a run only once."""
    part: dict[str, Update] = {}
    for update in updates:
        if update.run_id in part:
            yield list(part.values())
            part = {}
        part[update.run_id] = update
    yield list(part.values())


_INSERT_RUNS = Bulk(_QUERIES["insert_runs"])
_INSERT_INPUTS = Bulk(_QUERIES["insert_inputs"])
_UPDATE_HEADS = Bulk(_QUERIES["update_heads"])
_WRITE_TASKS = Bulk(_QUERIES["write_tasks"])
_INSERT_HISTORY = Bulk(_QUERIES["insert_history"])


def _slices(found: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """The runs to be pruned, by number and size, in parts of about PRUNED_TASKS tasks."""
    numbers: list[int] = []
    tasks = 0
    for n, total in found:
        numbers.append(n)
        tasks += total
        if tasks >= PRUNED_TASKS:
            yield numbers
            numbers, tasks = [], 0
    if numbers:
        yield numbers


def _prune(numbers: list[int], ended_before: float, connection: sqlite3.Connection) -> int:
    with _transaction(connection):
        parameters = {"numbers": _json(numbers), "ended_before": ended_before}
        still = connection.execute(_QUERIES["still_prunable"], parameters).fetchall()
        gone = {"numbers": _json(n for (n,) in still)}
        for query in ("delete_history", "delete_tasks", "delete_inputs", "delete_runs"):
            connection.execute(_QUERIES[query], gone)
    return len(still)


# -- reading --------------------------------------------------------------------------------------------------------


def _load(run_ids: Sequence[str], connection: sqlite3.Connection) -> dict[str, Snapshot]:
    connection.execute("BEGIN")  # head and tasks as of one moment
    try:
        runs = connection.execute(_QUERIES["load_runs"], {"ids": _json(run_ids)}).fetchall()
        numbers = {"numbers": _json(row[0] for row in runs)}
        tasks = connection.execute(_QUERIES["load_tasks"], numbers).fetchall()
    finally:
        connection.execute("COMMIT")
    by_number = {n: Snapshot(head_of(head), definition, payload, []) for n, definition, payload, *head in runs}
    for n, *task in tasks:
        by_number[n].tasks.append(task_of(task))
    return {snapshot.head.id: snapshot for snapshot in by_number.values()}


def _listing(query: RunQuery) -> tuple[str, dict[str, Any]]:
    filters: list[str] = []
    parameters: dict[str, Any] = {}
    if query.status is not None:
        filters.append("with_status")
        parameters["status"] = query.status.value
    if query.name is not None:
        filters.append("with_name")
        parameters["name"] = query.name
    if query.text:
        filters.append("with_ascii_text" if query.text.isascii() else "with_text")
        parameters["text"] = f"%{_escaped(query.text.casefold())}%"
    sql = _QUERIES["list_runs"].replace("/* filters */", " ".join(_QUERIES[name] for name in filters))
    return sql, parameters


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
