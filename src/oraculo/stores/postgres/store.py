"""A store in PostgreSQL, for any number of engines at once.

- A commit calls a function of the schema: one round trip, one transaction. A run is written only over the version that
the change is based on.
- There are three connections: for commits, for the engine's reads, and for people. So a long search holds up no commit
and no timer.
- Every call has a time limit. A connection that failed is closed, and the next call makes another.
"""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from oraculo.core.chunks import slices
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, RunStatus, Task
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.browse import Page, RunQuery
from oraculo.ports.store import Committed, Creation, Due, Snapshot, Unsent
from oraculo.stores.cursor import make_cursor, read_cursor
from oraculo.stores.postgres.address import Address, Connection, version_of
from oraculo.stores.postgres.commits import PostgresJob, queue_to
from oraculo.stores.postgres.connections import QUERIES, Lane
from oraculo.stores.postgres.faults import translated
from oraculo.stores.postgres.rows import BETWEEN, PostgresWrite, searched, snapshots_of
from oraculo.stores.postgres.schema import (
    has_tables,
    migrate,
    require_rights,
    statements_of_an_empty_database,
    try_to_migrate,
)
from oraculo.stores.records import census_of, entry_of, head_of, task_of, unchanged_among
from oraculo.stores.sql.listing import one_list_a_status

PRUNED_TASKS = 5_000  # about so many in one transaction; commits go on in between
UPKEEP = 360  # times the limit of a call, for work on whole tables


class PostgresStore:
    """The store of a URL as libpq has it: `postgresql://user:password@host:port/database?sslmode=…`.

    Several hosts, separated by commas, with `target_session_attrs=read-write` follow a fail-over.
    """

    name = "postgresql"

    def __init__(self, url: str, *, connect_timeout: float = 5.0, call_timeout: float = 10.0) -> None:
        self._address = Address(url, connect_timeout=connect_timeout, call_timeout=call_timeout)
        self._writer = Lane(self._address)
        self._reader = Lane(self._address, engine_reads=True)
        self._browser = Lane(self._address)
        self._commits = queue_to(self._writer)
        self._is_open = False

    # -- opening and closing ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the store. An empty database gets its tables."""
        if self._is_open:
            return
        place = self._address.place
        if not await self._writer.run(partial(has_tables, place=place)):
            await self._writer.run(partial(migrate, place=place), statements=statements_of_an_empty_database())
        self._is_open = True

    async def migrate(self) -> Sequence[str]:
        done = await self._writer.run(partial(migrate, place=self._address.place), statements=UPKEEP)
        self._is_open = True
        return done

    async def close(self) -> None:
        self._is_open = False
        await self._commits.finish()
        for lane in (self._browser, self._reader, self._writer):
            await lane.close()

    async def look(self) -> str | None:
        place = self._address.place
        if await self._writer.run(partial(has_tables, place=place)):
            await self._writer.run(partial(require_rights, place=place))
            return None
        around = 2  # BEGIN and ROLLBACK
        statements = statements_of_an_empty_database() + around
        await self._writer.run(partial(try_to_migrate, place=place), statements=statements)
        return await self._writer.run(_version_of)

    async def check(self) -> str:
        try:
            await self._ask(self._writer, "prove_write")
            await self.next_due()
            return await self._lane(self._reader).run(_version_of)
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error

    def _lane(self, lane: Lane) -> Lane:
        if not self._is_open:
            raise StoreError(
                f"the store at {self._address.place} is not open: call start() first, and nothing after close()"
            )
        return lane

    async def _ask(self, lane: Lane, query: str, *parameters: Any) -> Sequence[Any]:
        return await self._lane(lane).run(lambda connection: connection.fetch(QUERIES[query], *parameters))

    # -- commits ------------------------------------------------------------------------------------------------

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        self._lane(self._writer)
        with translated(self._address.place):  # rows are built before the first await, because the run may change later
            job = PostgresJob(PostgresWrite, creations, changes)
        return await self._commits.commit(job)

    # -- reads of the engine ------------------------------------------------------------------------------------

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        found = await self._ask(self._reader, "created_with", idempotency_key, fingerprint)
        return found[0][0] if found else None

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        return snapshots_of(await self._ask(self._reader, "load", list(run_ids)))

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        heads = map(head_of, await self._ask(self._reader, "load_heads", list(run_ids)))
        return {head.id: head for head in heads}

    async def task(self, run_id: str, number: int) -> Task | None:
        found = await self._ask(self._reader, "load_task", run_id, number)
        return task_of(found[0]) if found else None

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        return unchanged_among(copies, await self.heads([copy.id for copy in copies]))

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        return [Due(run_id, task) for run_id, task in await self._ask(self._reader, "due", now, limit)]

    async def next_due(self) -> float | None:
        [(due_at,)] = await self._ask(self._reader, "next_due")
        return None if due_at is None else float(due_at)

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        run_id, task = after or ("", -1)
        rows = await self._ask(self._reader, "unsent", run_id, task, limit)
        return [Unsent(run_id, number, attempt) for run_id, number, attempt in rows]

    async def brokers_in_use(self) -> Sequence[str | None]:
        return [via for (via,) in await self._ask(self._reader, "brokers_in_use")]

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        query = "dead_letters_with" if dead_letters else "commands_with"
        return [run_id for (run_id,) in await self._ask(self._reader, query, via, after, limit)]

    async def forget_sent(self) -> int:
        return await self._lane(self._writer).run(_forget_sent, statements=UPKEEP)

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        return [name for (name,) in await self._ask(self._reader, "attend", engine, now, ttl)]

    async def depart(self, engine: str) -> None:
        await self._ask(self._reader, "depart", engine)

    async def engines(self, since: float) -> Sequence[str]:
        return [name for (name,) in await self._ask(self._reader, "engines", since)]

    async def clock(self) -> float | None:
        [(now,)] = await self._ask(self._reader, "clock")
        return float(now)

    async def installation(self) -> str:
        [(installation,)] = await self._ask(self._reader, "installation")
        return str(installation)

    async def note(self, fact: str) -> None:
        await self._ask(self._reader, "note", fact)

    async def noted(self, fact: str) -> bool:
        return bool(await self._ask(self._reader, "noted", fact))

    # -- reads for people ---------------------------------------------------------------------------------------

    async def runs(self, query: RunQuery) -> Page:
        before = read_cursor(query.cursor)
        if query.text and BETWEEN in query.text:
            return Page([], None)
        sql, parameters = _listing(query)
        limit = query.limit + 1
        rows = await self._lane(self._browser).run(lambda connection: connection.fetch(sql, before, limit, *parameters))
        page = rows[: query.limit]
        more = len(rows) > query.limit and bool(page)
        return Page([head_of(row[1:]) for row in page], make_cursor(page[-1][0]) if more else None)

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        return [entry_of(row) for row in await self._ask(self._browser, "history", run_id, after, limit)]

    async def census(self) -> dict[RunStatus, int]:
        return census_of(await self._ask(self._browser, "census"))

    # -- retention and pipelines --------------------------------------------------------------------------------

    async def prune(self, ended_before: float, limit: int) -> int:
        found = await self._ask(self._browser, "prunable", ended_before, limit)
        pruned = 0
        for part in slices(found, itemgetter(1), PRUNED_TASKS):
            [(count,)] = await self._ask(self._browser, "prune", [n for n, _ in part], ended_before)
            pruned += count
        return pruned

    async def pipelines(self) -> dict[str, bytes]:
        return dict(await self._ask(self._reader, "pipelines"))

    async def pipelines_mark(self) -> str:
        [(mark,)] = await self._ask(self._reader, "pipelines_mark")
        return str(mark)

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        await self._ask(self._browser, "put_pipeline", name, definition, now)

    async def delete_pipeline(self, name: str) -> bool:
        [(was_there,)] = await self._ask(self._browser, "delete_pipeline", name)
        return bool(was_there)


async def _version_of(connection: Connection) -> str:
    return version_of(connection)


async def _forget_sent(connection: Connection) -> int:
    async with connection.transaction():
        await connection.execute(QUERIES["without_time_limit"])
        tags = [await connection.execute(QUERIES[name]) for name in ("forget_commands", "forget_dead_letters")]
    return sum(int(words.removeprefix("UPDATE ")) for words in tags)


def _listing(query: RunQuery) -> tuple[str, list[object]]:
    given = {
        "with_name": query.name,
        "with_text": searched(query.text) if query.text else None,
        "created_since": query.since,
        "created_until": query.until,
    }
    filters = {name: value for name, value in given.items() if value is not None}
    names = [*filters, *("with_status" for _ in query.statuses)]
    words = [QUERIES[name].replace("$?", f"${number}") for number, name in enumerate(names, 3)]
    sql = one_list_a_status(QUERIES["list_runs"], " ".join(words[: len(filters)]), words[len(filters) :], "$2")
    return sql, [*filters.values(), *(status.value for status in query.statuses)]
