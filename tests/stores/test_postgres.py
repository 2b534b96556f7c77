"""The PostgreSQL store: the suite every store passes, and what is its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import pytest

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.core.run import Changes
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.store import Outcome, RunQuery, Store
from oraculo.stores.postgres import PostgresStore, commits, lanes, schema
from oraculo.stores.postgres import store as store_module
from oraculo.stores.postgres.lanes import QUERIES, Lane
from oraculo.stores.sql import migrations
from oraculo.testing.store_runs import (
    NOW,
    OK,
    UNWRITABLE,
    assert_stored,
    change,
    changed,
    create,
    creation,
    load,
    make_run,
    revived,
    succeeded,
)
from oraculo.testing.store_suite import StoreSuite
from tests.servers.fleet import Fleet
from tests.servers.process import free_port, freeze
from tests.stores.killed_writer import survives_kills
from tests.waiting import until

LABELS = [migration.label for migration in migrations("postgres")]


async def ask(url: str, sql: str, *parameters: object) -> list[asyncpg.Record]:
    async with connected(url) as connection:
        return await connection.fetch(sql, *parameters)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        connection.terminate()


async def somebody_waits(url: str) -> bool:
    """For a lock."""
    return bool(await ask(url, "SELECT 1 FROM pg_locks WHERE NOT granted"))


async def with_schema(url: str) -> str:
    """The URL of an empty schema in the server's database."""
    name = f"test_{os.urandom(6).hex()}"
    await ask(url, f"CREATE SCHEMA {name}")
    return with_option(url, search_path=name)


def with_option(url: str, **options: str) -> str:
    words = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{words}"


@pytest.fixture
async def url(fleet: Fleet) -> str:
    return await with_schema(fleet.url("postgres"))


@asynccontextmanager
async def opened(url: str, **options: float) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, **options)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


class TestPostgres(StoreSuite):
    @pytest.fixture(autouse=True)
    async def _schema(self, fleet: Fleet) -> None:
        self.url = await with_schema(fleet.url("postgres"))

    async def make_store(self) -> Store:
        store = PostgresStore(self.url)
        await store.start()
        return store


@pytest.mark.long
class TestInSlices(TestPostgres):
    """As if every commit were too large for one statement."""

    @pytest.fixture(autouse=True)
    def _small_slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commits, "SLICE_BYTES", 1_000)


@contextmanager
def told_of(lane: Lane) -> Iterator[list[str]]:
    """The statements that go over the lane's connection."""
    statements: list[str] = []

    def note(told: Any) -> None:
        statements.append(told.query)

    assert lane._connection is not None
    with lane._connection.query_logger(note):
        yield statements


@asynccontextmanager
async def held_up(lane: Lane) -> AsyncIterator[None]:
    """Whoever uses the lane waits until this ends."""
    gate, entered = asyncio.Event(), asyncio.Event()

    async def wait(_connection: object) -> None:
        entered.set()
        await gate.wait()

    holder = asyncio.ensure_future(lane.run(wait))
    await entered.wait()
    try:
        yield
    finally:
        gate.set()
        await holder


# -- the schema -----------------------------------------------------------------------------------------------------


async def test_an_empty_database_gets_its_schema_though_several_start_at_once(url: str) -> None:
    stores = [PostgresStore(url) for _ in range(8)]
    await asyncio.gather(*(store.start() for store in stores))
    for store in stores:
        await store.close()
    rows = await ask(url, "SELECT number FROM oraculo_migrations ORDER BY number")
    assert [number for (number,) in rows] == list(range(1, len(LABELS) + 1))


async def test_migrating_needs_no_start_and_is_done_once(url: str) -> None:
    stores = [PostgresStore(url) for _ in range(5)]
    done = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(map(list, done)) == [[], [], [], [], LABELS]
    await create(stores[0], make_run("a"))
    assert await stores[0].migrate() == []
    for store in stores:
        await store.close()


async def test_an_older_schema_is_refused_until_it_is_migrated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations("postgres")
    next_one = known[0]._replace(
        number=len(known) + 1, name="colour", script="ALTER TABLE oraculo_runs ADD COLUMN colour text"
    )
    async with opened(url) as old:
        await create(old, before := make_run("before"))
        monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, next_one])
        new = PostgresStore(url)
        with pytest.raises(
            StoreError,
            match=rf"schema .* is {len(known)}, and this program needs {len(known) + 1}: run `oraculo migrate`",
        ) as refusal:
            await new.start()
        assert not isinstance(refusal.value, StoreUnavailable)
        assert await new.migrate() == [f"{len(known) + 1:04} colour"]
        await assert_stored(new, before)
        # The one that was running before the migration goes on.
        await change(old, changed(before, Sent(0, 1)))
        await create(old, make_run("after"))
        assert (await load(new, "before")).head == before.head
        await new.close()


async def test_a_newer_schema_is_refused_with_what_to_do(url: str) -> None:
    async with opened(url):
        pass
    await ask(url, "INSERT INTO oraculo_migrations (number, name) VALUES (99, 'tomorrow')")
    for open_it in (PostgresStore(url).start, PostgresStore(url).migrate):
        with pytest.raises(StoreError, match=r"newer ORÁCULO \(its schema is 99.*run that version") as refusal:
            await open_it()
        assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_migration_is_applied_whole_or_not_at_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations("postgres")
    bad = known[0]._replace(
        number=len(known) + 1, script="CREATE TABLE oraculo_half (x int); INSERT INTO nowhere VALUES (1);"
    )
    monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, bad])
    with pytest.raises(StoreError, match="nowhere"):
        await PostgresStore(url).start()
    assert await ask(url, "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace") == []


async def test_a_migration_may_take_longer_than_a_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations("postgres")
    slow = known[0]._replace(number=len(known) + 1, script="SELECT pg_sleep(2)")
    monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, slow])
    store = PostgresStore(url, call_timeout=1.0)
    assert len(await store.migrate()) == len(known) + 1
    await store.close()


async def test_the_tables_of_an_empty_database_may_take_longer_than_a_call(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations("postgres")
    slow = known[0]._replace(number=len(known) + 1, script="SELECT pg_sleep(2)")
    monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, slow])
    async with opened(url, call_timeout=1.0) as store:
        assert "PostgreSQL" in await store.check()


async def test_a_server_that_is_too_old_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "OLDEST_SERVER", 99)
    with pytest.raises(StoreError, match=r"is 1\d\.\d+; 99 or newer is needed") as refusal:
        await PostgresStore(url).start()
    assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_database_that_cannot_hold_every_text_is_refused(fleet: Fleet) -> None:
    name = f"latin_{os.urandom(4).hex()}"
    address = fleet.url("postgres")
    await ask(address, f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreError, match=r"LATIN1.*make one with ENCODING 'UTF8'"):
        await PostgresStore(address.replace("/postgres", f"/{name}")).start()


async def test_queries_use_an_index_and_lists_are_not_sorted(url: str) -> None:
    parameters: dict[str, tuple[object, ...]] = {
        "load": (["a"],),
        "load_heads": (["a"],),
        "next_due": (),
        "unsent": ("a", 1, 10),
        "brokers_in_use": (),
        "commands_with": ("b", "a", 10),
        "dead_letters_with": ("b", "a", 10),
        "history": ("a", 0, 10),
        "in_the_way": (["a"], ["k"]),
        "prunable": (NOW, 10),
    }
    async with opened(url) as store:
        for name, values in parameters.items():
            explain = f"EXPLAIN {QUERIES[name]}"
            plan = await store._reader.run(
                lambda connection, sql=explain, values=values: connection.fetch(sql, *values)
            )
            lines = [line for (line,) in plan]
            assert not [line for line in lines if "Seq Scan" in line], (name, lines)
            if name in ("next_due", "unsent", "commands_with", "history"):
                assert not [line for line in lines if "Sort" in line], (name, lines)


# -- writing together -----------------------------------------------------------------------------------------------


async def test_a_batch_is_one_round_trip(url: str) -> None:
    async with opened(url) as store:
        await create(store, make_run("first"))  # the connection learns the types
        runs = [make_run(f"run-{n}") for n in range(300)]
        with told_of(store._writer) as statements:
            await create(store, *runs)
            await change(store, *(changed(run, Sent(0, 1), Sent(1, 1)) for run in runs))
        assert statements == [QUERIES["commit"]] * 2


async def test_commits_that_wait_are_written_in_one_transaction(url: str) -> None:
    async with opened(url) as store:
        await create(store, make_run("first"))  # the connection learns the types
        runs = [make_run(f"run-{n}") for n in range(100)]
        with told_of(store._writer) as statements:
            async with held_up(store._writer):
                all_done = asyncio.gather(*(store.commit([creation(run)], []) for run in runs))
                await asyncio.sleep(0)
            await all_done
        # The first to come finds the writer free, the rest have queued up behind it.
        assert len(statements) <= 2
        assert [run.head.version for run in runs] == [1] * 100


async def test_successive_changes_of_one_run_wait_for_each_other(url: str) -> None:
    async with opened(url) as store:
        run = make_run("a")
        await create(store, run)
        first = store.commit([], [changed(run, Progressed(0, 1.0, "first"))])
        run.head.version = 2  # an engine so sure of itself that it does not wait
        second = changed(run, Progressed(0, 2.0, "second"))
        run.head.version = 1
        results = await asyncio.gather(first, store.commit([], [second]))
        assert [result.conflicts for result in results] == [frozenset(), frozenset()]
        snapshot = await load(store, "a")
        assert (snapshot.head.version, snapshot.tasks[0].note) == (3, "second")


async def test_a_creation_whose_rival_in_the_commit_was_refused(url: str) -> None:
    """The first with the id cannot be written, because its key is another run's: the second can."""
    async with opened(url) as store:
        await store.commit([creation(make_run("x"), key="k")], [])
        rivals = [creation(make_run("a"), key="k", fingerprint="other"), creation(second := make_run("a"))]
        created = (await store.commit(rivals, [])).created
        assert [(each.outcome, each.run_id) for each in created] == [(Outcome.KEY_REUSED, "x"), (Outcome.CREATED, "a")]
        await assert_stored(store, second)


async def test_a_nul_in_a_reason_does_not_stop_a_commit(url: str) -> None:
    async with opened(url) as store:
        run = make_run("a", webhook="https://example.org")
        await create(store, run)
        changes = changed(run, Answered(0, 1, b"{}", failed=True, reason="bro\0ken"), Progressed(1, 1.0, "\0"))
        run.head.deliveries[0].error = "HTTP \0"
        await change(store, changes)
        snapshot = await load(store, "a")
        assert (snapshot.tasks[0].reason, snapshot.tasks[1].note) == ("bro␀ken", "␀")
        assert snapshot.head.deliveries[0].error == "HTTP \0"
        assert "bro␀ken" in str([entry.detail for entry in await store.history("a")])


async def test_a_large_commit_goes_in_slices_and_is_all_or_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "SLICE_BYTES", 50_000)
    async with opened(url) as store:
        runs = [make_run(f"run-{n}", payload=b'{"x":"%s"}' % (b"x" * 20_000)) for n in range(10)]
        with told_of(store._writer) as statements:
            await create(store, *runs)
        assert statements.count(QUERIES["write_heads"]) >= 4
        big = b'"%s"' % (b"y" * 30_000)
        answers = [changed(run, *(Answered(n, 1, big) for n in range(3))) for run in runs]
        answers[-1].history[-1] = answers[-1].history[0]  # the last row of the last slice is there already
        before = [await load(store, run.id) for run in runs]
        with pytest.raises(StoreError, match="duplicate key"):
            await store.commit([], answers)
        assert [await load(store, run.id) for run in runs] == before
        again = [revived(snapshot) for snapshot in before]
        await change(store, *(changed(run, *(Answered(n, 1, big) for n in range(3))) for run in again))
        for run in again:
            await assert_stored(store, run)


async def test_closing_waits_for_every_group(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "GROUP_BYTES", 1)
    async with opened(url) as store:
        all_done = asyncio.gather(*(store.commit([creation(make_run(f"run-{n}"))], []) for n in range(10)))
        await asyncio.sleep(0)
    await all_done
    assert await ask(url, "SELECT count(*) FROM oraculo_runs") == [(10,)]


async def test_a_long_list_holds_up_neither_commits_nor_loads(url: str) -> None:
    async with opened(url) as store:
        async with held_up(store._browser):
            listing = asyncio.ensure_future(store.runs(RunQuery()))
            await create(store, run := make_run("a"))
            await assert_stored(store, run)
            assert not listing.done()
        assert (await listing).heads == [run.head]


async def test_a_reader_who_gives_up_leaves_the_connection_as_it_was(url: str) -> None:
    async with opened(url) as store, connected(url) as other:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        connection = store._reader._connection
        async with other.transaction():
            await other.execute("LOCK TABLE oraculo_runs IN ACCESS EXCLUSIVE MODE")
            reading = asyncio.ensure_future(store.load(["a"]))
            await until(lambda: somebody_waits(url), saying="the reader's wait for the table")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert reading.cancelled()
        await assert_stored(store, run)
        assert store._reader._connection is connection


# -- pruning --------------------------------------------------------------------------------------------------------


async def test_pruning_goes_in_parts_and_deletes_everything(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PRUNED_TASKS", 6)
    async with opened(url) as store:
        runs = [make_run(f"run-{n}") for n in range(5)]
        await create(store, *runs)
        await change(store, *(succeeded(run) for run in runs))
        await store.census()
        with told_of(store._browser) as statements:
            assert await store.prune(NOW + 100, 10) == 5
        assert statements.count(QUERIES["prune"]) == 3
    for table in ("runs", "inputs", "tasks", "history"):
        assert await ask(url, f"SELECT count(*) FROM oraculo_{table}") == [(0,)]


async def test_pruning_neither_waits_for_a_run_in_use_nor_deletes_it(url: str) -> None:
    async with opened(url) as store, connected(url) as other:
        runs = [make_run(f"run-{n}") for n in range(3)]
        await create(store, *runs)
        await change(store, *(succeeded(run) for run in runs))
        async with other.transaction():
            await other.execute("UPDATE oraculo_runs SET ended_at = NULL WHERE id = 'run-1'")
            assert await store.prune(NOW + 100, 10) == 2
        assert await store.prune(NOW + 100, 10) == 0
        await load(store, "run-1")


async def test_pruning_looks_again_once_it_has_the_run(url: str) -> None:
    """Between finding a run and deleting it, a dead letter of it became one to send again."""
    async with opened(url) as store:
        await create(store, run := make_run("a"))
        await change(store, succeeded(run))
        [(n,)] = await ask(url, "SELECT n FROM oraculo_runs")
        await ask(url, "UPDATE oraculo_tasks SET unsent = true WHERE number = 1")
        assert await ask(url, QUERIES["prune"], [n], NOW + 100) == [(0,)]
        await ask(url, "UPDATE oraculo_tasks SET unsent = false")
        assert await ask(url, QUERIES["prune"], [n], NOW + 100) == [(1,)]


# -- other engines --------------------------------------------------------------------------------------------------


async def test_runs_are_locked_in_one_order(url: str) -> None:
    """So that engines that change the same ones wait for each other, and do not lock each other out."""
    async with opened(url) as store, connected(url) as other:
        runs = [make_run(name) for name in ("c", "a", "d", "b")]
        await create(store, *runs)
        async with other.transaction():
            await other.execute("SELECT 1 FROM oraculo_runs WHERE id = 'c' FOR UPDATE")
            commit = asyncio.ensure_future(store.commit([], [changed(run, Progressed(0, 1.0)) for run in runs]))
            await until(lambda: somebody_waits(url), saying="the commit's wait for the third run")
            free = await ask(url, "SELECT id FROM oraculo_runs ORDER BY id FOR UPDATE SKIP LOCKED")
            assert [run_id for (run_id,) in free] == ["d"]
        assert (await commit).conflicts == frozenset()


async def test_a_deadlock_is_tried_again_at_once(url: str) -> None:
    async with opened(url) as store, connected(url) as other:
        runs = [make_run("a"), make_run("b")]
        await create(store, *runs)
        await other.execute("SET deadlock_timeout = '60s'")  # let the store be the one that gives way
        with told_of(store._writer) as statements:
            async with other.transaction():
                await other.execute("SELECT 1 FROM oraculo_runs WHERE id = 'b' FOR UPDATE")
                commit = asyncio.ensure_future(store.commit([], [changed(run, Sent(0, 1)) for run in runs]))
                await until(lambda: somebody_waits(url), saying="the commit's wait for the second run")
                await other.execute("SELECT 1 FROM oraculo_runs WHERE id = 'a' FOR UPDATE")
            assert (await commit).conflicts == frozenset()
        assert len(statements) > 1
        for run in runs:
            await assert_stored(store, run)


async def test_noting_an_engine_waits_for_nobody(url: str) -> None:
    async with opened(url) as store, connected(url) as other:
        assert list(await store.attend("b", NOW, 10)) == ["b"]
        async with other.transaction():
            await other.execute("SELECT 1 FROM oraculo_engines FOR UPDATE")
            assert list(await asyncio.wait_for(store.attend("a", NOW + 100, 10), 5)) == ["a"]
        assert list(await store.attend("a", NOW + 101, 10)) == ["a"]
        await store.depart("a")
        assert await ask(url, "SELECT name FROM oraculo_engines") == []


async def test_the_mark_moves_with_every_change_of_the_pipelines(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        marks = [await one.pipelines_mark()]
        await one.put_pipeline("p", b"{}", NOW)
        marks.append(await other.pipelines_mark())
        await one.put_pipeline("p", b"{}", NOW)
        marks.append(await other.pipelines_mark())
        await one.delete_pipeline("p")
        marks.append(await other.pipelines_mark())
        assert len(set(marks)) == 4
        await one.delete_pipeline("p")
        assert await other.pipelines_mark() == marks[-1]


async def test_a_process_that_is_killed_leaves_every_run_whole(url: str) -> None:
    await survives_kills(url, kills=5)


# -- trouble --------------------------------------------------------------------------------------------------------


async def cut_connections(url: str) -> None:
    """On the server's side, as an administrator or a fail-over does."""
    [(schema_name,)] = await ask(url, "SELECT current_schema()")
    await ask(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = $1 AND pid <> pg_backend_pid()",
        f"oraculo-{schema_name}",
    )


@pytest.fixture
async def named_url(url: str) -> str:
    """With connections that can be told from those of other tests."""
    [(schema_name,)] = await ask(url, "SELECT current_schema()")
    return with_option(url, application_name=f"oraculo-{schema_name}")


async def test_connections_that_were_cut_while_idle_are_made_again(named_url: str) -> None:
    async with opened(named_url) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        await store.runs(RunQuery())
        connections = [lane._connection for lane in (store._writer, store._reader, store._browser)]
        await cut_connections(named_url)
        await until(lambda: all(c is not None and c.is_closed() for c in connections), saying="the end of all three")
        await change(store, changed(run, Sent(0, 1)))
        await assert_stored(store, run)
        assert (await store.runs(RunQuery())).heads == [run.head]


async def test_a_connection_whose_end_is_half_read_is_made_again(
    named_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(named_url) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        ends, fetch = store._reader._connection, asyncpg.Connection.fetch

        async def fetch_if_well(connection: asyncpg.Connection, *arguments: object) -> object:
            if connection is ends:
                raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
            return await fetch(connection, *arguments)

        monkeypatch.setattr(asyncpg.Connection, "fetch", fetch_if_well)
        assert (await load(store, "a")).head == run.head
        assert store._reader._connection is not ends


async def test_a_connection_that_is_cut_in_the_middle_is_unavailable_once(named_url: str) -> None:
    async with opened(named_url) as store, connected(named_url.split("&")[0]) as other:
        await create(store, run := make_run("a"))
        before = await load(store, "a")
        idle = store._reader._connection
        async with other.transaction():
            await other.execute("SELECT 1 FROM oraculo_runs FOR UPDATE")
            commit = asyncio.ensure_future(store.commit([], [changed(run, Sent(0, 1))]))
            await until(lambda: somebody_waits(named_url), saying="the commit's wait for the run")
            await cut_connections(named_url)
            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:\d+"):
                await commit
        await until(lambda: idle is not None and idle.is_closed(), saying="the end of the idle one, too")
        assert await load(store, "a") == before
        again = revived(before)
        await change(store, changed(again, Sent(0, 1)))
        await assert_stored(store, again)


async def test_a_server_that_is_killed_and_restarted_loses_nothing_confirmed(fleet: Fleet) -> None:
    server = fleet.breakable("postgres")
    url = await with_schema(server.url)
    async with opened(url, call_timeout=5.0) as store:
        confirmed: dict[str, int] = {}
        troubles: list[StoreUnavailable] = []
        stopping = asyncio.Event()

        async def work(name: str) -> None:
            await create(store, make_run(name))
            confirmed[name] = 1
            while not stopping.is_set():
                try:
                    run = revived(await load(store, name))
                    committed = await store.commit([], [changed(run, Progressed(0, 1.0, str(run.head.version)))])
                    assert not committed.conflicts
                    confirmed[name] = run.head.version
                except StoreUnavailable as trouble:
                    troubles.append(trouble)
                    await asyncio.sleep(0.01)

        workers = [asyncio.ensure_future(work(f"run-{n}")) for n in range(5)]
        for restart in range(1, 4):
            await until(lambda least=restart: len(confirmed) == 5 and min(confirmed.values()) > 5 * least)
            await asyncio.to_thread(server.kill)
            seen = len(troubles)
            await until(lambda seen=seen: len(troubles) > seen, saying="a call that says that the server is away")
            await asyncio.to_thread(server.start)
            reached = min(confirmed.values())
            await until(lambda reached=reached: min(confirmed.values()) > reached + 5, saying="work after the restart")
        stopping.set()
        await asyncio.gather(*workers)
        assert all(f"127.0.0.1:{server.port}" in str(trouble) for trouble in troubles)
        for name, version in confirmed.items():
            snapshot = await load(store, name)
            assert snapshot.head.version >= version
            assert len(await store.history(name, limit=100_000)) == snapshot.head.entries


async def test_a_frozen_server_is_unavailable_in_bounded_time(fleet: Fleet) -> None:
    server = fleet.breakable("postgres")
    url = await with_schema(server.url)
    async with opened(url, call_timeout=1.0, connect_timeout=1.0) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        server.freeze()
        try:
            lost = changed(run, Sent(0, 1))
            calls = [store.commit([], [lost]), store.load(["a"]), store.runs(RunQuery()), store.check()]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
            assert [type(result) for result in results] == [StoreUnavailable] * 4
            assert f"127.0.0.1:{server.port}" in str(results[0])
            with pytest.raises(StoreUnavailable):  # and so is a connection that must be made anew
                await asyncio.wait_for(store.load(["a"]), 10)
        finally:
            server.thaw()
        snapshot = await load(store, "a")
        assert snapshot.head.version in (1, 2)  # what was given up may have been written
        await change(store, changed(revived(snapshot), Progressed(0, 5.0)))
        assert "PostgreSQL" in await store.check()


async def test_a_connection_that_is_dead_without_saying_so_is_replaced(fleet: Fleet) -> None:
    url = with_option(await with_schema(fleet.breakable("postgres").url), application_name="dead")
    async with opened(url, call_timeout=1.0) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        found = await ask(url, "SELECT pid FROM pg_stat_activity WHERE application_name = 'dead' AND state = 'idle'")
        try:
            for (pid,) in found:
                freeze(pid)
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await store.load(["a"])
            await assert_stored(store, run)
        finally:
            for (pid,) in found:
                os.kill(pid, signal.SIGCONT)


async def test_a_call_does_not_wait_for_its_turn_for_ever(url: str) -> None:
    async with opened(url, call_timeout=1.0) as store:
        async with store._browser._turn:
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await asyncio.wait_for(store.runs(RunQuery()), 5)
        assert (await store.runs(RunQuery())).heads == []


async def test_a_client_that_is_frozen_in_a_transaction_keeps_no_locks(url: str) -> None:
    async with opened(url) as store, opened(url, call_timeout=0.3) as frozen:
        await create(store, run := make_run("a"))
        connection = frozen._writer._connection
        assert connection is not None
        await connection.execute("BEGIN; SELECT 1 FROM oraculo_runs FOR UPDATE")  # and then nothing
        await change(store, changed(run, Sent(0, 1)))


async def test_a_statement_that_takes_too_long_is_ended_on_the_server_too(named_url: str) -> None:
    async with opened(named_url, call_timeout=1.0) as store, connected(named_url.split("&")[0]) as other:
        await create(store, run := make_run("a"))
        async with other.transaction():
            await other.execute("SELECT 1 FROM oraculo_runs FOR UPDATE")
            with pytest.raises(StoreUnavailable):
                await store.commit([], [changed(run, Sent(0, 1))])

            async def nobody_waits() -> bool:
                return not await somebody_waits(named_url)

            await until(nobody_waits, saying="the end of the statement on the server")


async def test_what_is_wrong_with_the_address_is_said_without_the_password(fleet: Fleet) -> None:
    right = fleet.server("postgres").url
    port = free_port()
    wrong = {
        right.replace("segredo", "errado-123"): "password authentication failed",
        right.replace("127.0.0.1", "no-such-host.invalid"): "no-such-host.invalid",
        f"postgresql://oraculo:errado-123@127.0.0.1:{port}/x": f"127.0.0.1:{port}",
        right.replace("/postgres", "/nowhere"): "nowhere",
        with_option(right, sslmode="require"): "SSL",
    }
    for url, reason in wrong.items():
        with pytest.raises(StoreUnavailable, match=reason) as trouble:
            await PostgresStore(url, connect_timeout=2.0).start()
        assert "errado" not in str(trouble.value)
        assert "segredo" not in str(trouble.value)


async def test_an_address_that_makes_no_sense_is_refused_for_good(fleet: Fleet) -> None:
    with pytest.raises(StoreError, match="sslmode") as refusal:
        await PostgresStore(with_option(fleet.url("postgres"), sslmode="sometimes")).start()
    assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_server_without_a_connection_left_is_worth_a_retry(fleet: Fleet) -> None:
    server = fleet.server("postgres")
    name = f"crowd_{os.urandom(4).hex()}"
    await ask(server.url, f"CREATE ROLE {name} LOGIN PASSWORD 'segredo' CONNECTION LIMIT 0")
    with pytest.raises(StoreUnavailable, match="too many connections"):
        await PostgresStore(server.url.replace("oraculo:", f"{name}:")).start()


async def test_a_server_that_takes_no_writes_is_worth_a_retry(url: str) -> None:
    """As a standby, after a fail-over."""
    async with opened(url) as store:
        await create(store, run := make_run("a"))
    async with opened(with_option(url, default_transaction_read_only="on")) as store:
        await assert_stored(store, run)
        with pytest.raises(StoreUnavailable, match="read-only"):
            await store.commit([creation(make_run("b"))], [])
        with pytest.raises(StoreUnavailable, match="read-only"):
            await store.check()


# -- looking ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def looked_at(url: str) -> AsyncIterator[str | None]:
    store = PostgresStore(url)
    try:
        yield await store.look()
    finally:
        await store.close()


async def with_user(server: str, url: str, *rights: str) -> str:
    """The URL for a new user, who may use the schema and has these rights in it."""
    user, schema = f"user_{os.urandom(4).hex()}", url.partition("search_path=")[2]
    await ask(server, f"CREATE ROLE {user} LOGIN PASSWORD 'segredo'")
    for right in ("USAGE ON SCHEMA {schema}", *rights):
        await ask(server, f"GRANT {right} TO {user}".replace("{schema}", schema))
    return url.replace("oraculo:", f"{user}:")


async def test_looking_at_an_empty_database_makes_no_tables(url: str) -> None:
    async with looked_at(url) as told:
        assert told is not None
        assert told.startswith("PostgreSQL ")
    assert await ask(url, "SELECT 1 FROM pg_tables WHERE schemaname = current_schema()") == []
    async with opened(url), looked_at(url) as told:
        assert told is None


async def test_looking_tells_that_the_tables_cannot_be_made(fleet: Fleet, url: str) -> None:
    with pytest.raises(StoreError, match="permission denied for schema"):
        async with looked_at(await with_user(fleet.server("postgres").url, url)):
            pass


async def test_looking_names_the_rights_that_are_missing(fleet: Fleet, url: str) -> None:
    server = fleet.server("postgres").url
    async with opened(url):
        pass
    tables = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}"
    user = await with_user(server, url, tables, "USAGE ON ALL SEQUENCES IN SCHEMA {schema}")
    async with looked_at(user) as told:
        assert told is None
    reader = await with_user(server, url, "SELECT ON ALL TABLES IN SCHEMA {schema}", "INSERT ON {schema}.oraculo_tasks")
    with pytest.raises(StoreError) as refusal:
        async with looked_at(reader):
            pass
    assert "INSERT, UPDATE, DELETE on oraculo_runs; USAGE on oraculo_runs_n_seq;" in str(refusal.value)
    assert "UPDATE, DELETE on oraculo_tasks: GRANT that" in str(refusal.value)
    assert "oraculo_migrations" not in str(refusal.value)


async def test_a_bad_text_is_refused_and_the_connection_goes_on(url: str) -> None:
    async with opened(url) as store:
        connection = store._writer._connection
        bad = creation(make_run("a"))
        bad.changes.tasks[0].note = UNWRITABLE
        with pytest.raises(StoreError) as refusal:
            await store.commit([bad], [])
        assert not isinstance(refusal.value, StoreUnavailable)
        await create(store, run := make_run("b"))
        await change(store, changed(run, Answered(0, 1, OK)))
        assert store._writer._connection is connection


async def test_a_store_that_is_not_open_says_so(url: str) -> None:
    store = PostgresStore(url)
    with pytest.raises(StoreError, match="not open"):
        await store.load(["a"])
    with pytest.raises(StoreError, match="not open"):
        await store.commit([], [Changes(make_run("a"))])


async def test_a_fault_of_the_database_is_waited_for_and_not_blamed_on_the_run(url: str) -> None:
    """A table that is being restored, a right that was taken away: answers must not end as dead letters."""
    store = PostgresStore(url)
    await store.start()
    try:
        await create(store, run := make_run("a"))
        await ask(url, "ALTER TABLE oraculo_tasks RENAME TO oraculo_tasks_aside")
        with pytest.raises(StoreUnavailable):
            await store.commit([], [changed(run, Progressed(0, 1.0))])
        with pytest.raises(StoreUnavailable):
            await store.load(["a"])
        await ask(url, "ALTER TABLE oraculo_tasks_aside RENAME TO oraculo_tasks")
        run = revived(await load(store, "a"))
        await change(store, changed(run, Progressed(0, 1.0)))
    finally:
        await store.close()
