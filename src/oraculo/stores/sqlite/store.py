"""A store in one SQLite file: durable, and without a server.

- One thread writes. Commits that arrive during a write are written together next, so that one disk sync serves all.
- Readers have connections of their own, in WAL mode: one for the engine and one for people. So a long search holds up
no commit and no timer.
- Another process may open the same file. A transaction takes the write lock first and then compares versions.
"""

import sqlite3
from collections.abc import Sequence
from functools import partial
from math import inf
from operator import itemgetter
from typing import Any

from oraculo.core.chunks import slices
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, RunStatus, Task
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.browse import Page, RunQuery
from oraculo.ports.store import Committed, Creation, Due, Snapshot, Unsent
from oraculo.stores.cursor import make_cursor, read_cursor
from oraculo.stores.records import census_of, entry_of, head_of, task_of, unchanged_among
from oraculo.stores.sql.listing import one_list_a_status
from oraculo.stores.sqlite.connection_threads import Lane, Writer
from oraculo.stores.sqlite.connections import MEMORY, Translated, is_for_want_of_room, make_parent
from oraculo.stores.sqlite.file_lock import FileLock
from oraculo.stores.sqlite.open_files import OpenFiles
from oraculo.stores.sqlite.rows import SqliteWrite
from oraculo.stores.sqlite.transaction import QUERIES, SqliteJob, as_json, prune, write_all

PRUNED_TASKS = 5_000  # about so many in one transaction; commits go on in between


class SqliteStore:
    """The store of one SQLite file.

    `inline` runs every call in the caller's thread, for deterministic simulations. `exclusive=True` keeps other
    processes from serving this file, because the memory broker's queues are in this process. False shares the file with
    others that say the same. None is for a process that only reads beside either.
    """

    name = "sqlite"

    def __init__(self, path: str, *, inline: bool = False, exclusive: bool | None = None) -> None:
        self._path = path
        self._inline = inline
        is_locked = exclusive is not None and path != MEMORY
        self._lock = FileLock(f"{path}.lock", exclusive=bool(exclusive)) if is_locked else None
        self._lanes: list[Lane] = []
        self._migrated: Sequence[str] = []  # the steps done by opening it, until `migrate` returns them

    # -- opening and closing ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the file. A file that cannot be opened raises StoreError, because waiting does not help.

        A full disk is StoreUnavailable: somebody may free space.
        """
        try:
            await self._open()
        except StoreUnavailable as error:
            if is_for_want_of_room(error):
                raise
            raise StoreError(str(error)) from error

    async def _open(self) -> None:
        if self._lanes:
            return
        make_parent(self._path)
        if self._lock is not None:
            self._lock.take()
        roles = ("writer",) if self._path == MEMORY else ("writer", "reader", "browser")
        kinds = (Writer, Lane, Lane)
        files = OpenFiles(self._path)
        self._lanes = [
            kind(f"sqlite-{role}", self._path, files, self._inline) for kind, role in zip(kinds, roles, strict=False)
        ]
        try:
            for lane in self._lanes:
                await lane.open()
                if lane is self._lanes[0]:  # before anything reads
                    self._migrated = self._writer.migrated
                    files.remember()
        except BaseException:
            await self.close()
            raise

    async def migrate(self) -> Sequence[str]:
        """Bring the schema up to date, which opening does. Raises StoreError when other processes use the file."""
        await self.start()
        migrated, self._migrated = list(self._migrated), []
        return migrated

    async def close(self) -> None:
        if self._lanes:
            await self._writer.finish()
        lanes, self._lanes = self._lanes, []
        for lane in reversed(lanes):  # the writer closes last, because only it can checkpoint the WAL
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

    def _lane(self, number: int) -> Lane:
        if not self._lanes:
            raise StoreError(f"the store {self._path} is not open: call start() first, and nothing after close()")
        return self._lanes[min(number, len(self._lanes) - 1)]

    @property
    def _writer(self) -> Writer:
        writer = self._lane(0)
        assert isinstance(writer, Writer)
        return writer

    @property
    def _reader(self) -> Lane:
        return self._lane(1)

    @property
    def _browser(self) -> Lane:
        return self._lane(2)

    async def _read(self, query: str, parameters: dict[str, Any]) -> list[Any]:
        sql = QUERIES[query]
        return await self._reader.run(lambda connection: connection.execute(sql, parameters).fetchall())

    async def _write(self, query: str, parameters: dict[str, Any]) -> int:
        [count] = await self._write_all((query, parameters))
        return count

    async def _write_all(self, *statements: tuple[str, dict[str, Any]]) -> list[int]:
        """Run statements in one transaction. Returns how many rows each changed."""
        return await self._writer.run(lambda connection: write_all(connection, statements))

    # -- commits ------------------------------------------------------------------------------------------------

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        writer = self._writer
        with Translated(self._path):  # rows are built before the first await, because the run may change later
            job = SqliteJob(SqliteWrite, creations, changes)
        return await writer.commit(job)

    # -- reads of the engine ------------------------------------------------------------------------------------

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        found = await self._read("created_with", {"key": idempotency_key, "fingerprint": fingerprint})
        return found[0][0] if found else None

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        return await self._reader.run(partial(_load, tuple(run_ids)))

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        heads = map(head_of, await self._read("load_heads", {"ids": as_json(run_ids)}))
        return {head.id: head for head in heads}

    async def task(self, run_id: str, number: int) -> Task | None:
        found = await self._read("load_task", {"id": run_id, "number": number})
        return task_of(found[0]) if found else None

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        return unchanged_among(copies, await self.heads([copy.id for copy in copies]))

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        rows = await self._read("due", {"now": now, "limit": limit})
        return [Due(run_id, task) for _, _, task, run_id in rows]

    async def next_due(self) -> float | None:
        [(due_at,)] = await self._read("next_due", {})
        return None if due_at is None else float(due_at)

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        run_id, task = after or ("", -1)
        found = await self._read("number_of_run", {"id": run_id})
        # The run `after` may have been pruned: begin again rather than leave something out.
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

    # -- reads for people ---------------------------------------------------------------------------------------

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
        sql = QUERIES["history"]
        rows = await self._browser.run(lambda connection: connection.execute(sql, parameters).fetchall())
        return [entry_of(row) for row in rows]

    async def census(self) -> dict[RunStatus, int]:
        sql = QUERIES["census"]
        rows = await self._browser.run(lambda connection: connection.execute(sql).fetchall())
        return census_of(rows)

    # -- retention and pipelines --------------------------------------------------------------------------------

    async def prune(self, ended_before: float, limit: int) -> int:
        found = await self._read("prunable", {"ended_before": ended_before, "limit": limit})
        pruned = 0
        for part in slices(found, itemgetter(1), PRUNED_TASKS):
            pruned += await self._writer.run(partial(prune, [n for n, _ in part], ended_before))
        return pruned

    async def pipelines(self) -> dict[str, bytes]:
        return dict(await self._read("pipelines", {}))

    async def pipelines_mark(self) -> str:
        [(mark,)] = await self._read("pipelines_mark", {})
        return str(mark)

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        put = ("put_pipeline", {"name": name, "definition": definition, "now": now})
        await self._write_all(put, ("mark_pipelines", {}))

    async def delete_pipeline(self, name: str) -> bool:
        deleted, _ = await self._write_all(("delete_pipeline", {"name": name}), ("mark_pipelines", {}))
        return deleted > 0

    # -- engines ------------------------------------------------------------------------------------------------

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        """Record that this engine lives, and return those that do.

        All users of the file share one clock. A record from the future was written before the clock was set back, and
        is deleted: an engine that lives writes a new one soon.
        """
        await self._write_all(
            ("forget_engines", {"before": now - ttl, "after": now + ttl, "name": engine}),
            ("note_engine", {"name": engine, "now": now}),
        )
        return await self.engines(now - ttl)

    async def depart(self, engine: str) -> None:
        await self._write("forget_engines", {"before": -inf, "after": inf, "name": engine})

    async def engines(self, since: float) -> Sequence[str]:
        return [name for (name,) in await self._read("engines", {"since": since})]

    async def clock(self) -> float | None:
        return None

    async def installation(self) -> str:
        [(installation,)] = await self._read("installation", {})
        return str(installation)

    async def note(self, fact: str) -> None:
        await self._write("note", {"fact": fact})

    async def noted(self, fact: str) -> bool:
        return bool(await self._read("noted", {"fact": fact}))


# -- reading --------------------------------------------------------------------------------------------------------


def _load(run_ids: Sequence[str], connection: sqlite3.Connection) -> dict[str, Snapshot]:
    connection.execute("BEGIN")  # one transaction, so that head and tasks fit together
    try:
        runs = connection.execute(QUERIES["load_runs"], {"ids": as_json(run_ids)}).fetchall()
        numbers = {"numbers": as_json(row[0] for row in runs)}
        tasks = connection.execute(QUERIES["load_tasks"], numbers).fetchall()
    finally:
        connection.execute("COMMIT")
    by_number = {n: Snapshot(head_of(head), definition, payload, []) for n, definition, payload, *head in runs}
    for n, *task in tasks:
        by_number[n].tasks.append(task_of(task))
    return {snapshot.head.id: snapshot for snapshot in by_number.values()}


def _listing(query: RunQuery) -> tuple[str, dict[str, Any]]:
    given: dict[str, Any] = {
        "with_name": {"name": query.name},
        "with_text": {"text": f"%{_escaped(query.text.casefold())}%" if query.text else None},
        "created_since": {"since": query.since},
        "created_until": {"until": query.until},
    }
    filters = {name: values for name, values in given.items() if None not in values.values()}
    sql = one_list_a_status(
        QUERIES["list_runs"],
        " ".join(QUERIES[name] for name in filters),
        [QUERIES["with_status"].replace(":status", f":status_{number}") for number in range(len(query.statuses))],
        ":limit",
    )
    statuses = {f"status_{number}": status.value for number, status in enumerate(query.statuses)}
    return sql, {**statuses, **dict(item for values in filters.values() for item in values.items())}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
