"""The SQLite store: the suite every store passes, and what is its own."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from oraculo.core.events import Sent
from oraculo.core.run import RunStatus
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import CreationOutcome, Store
from oraculo.stores.migrations import Migration
from oraculo.stores.sql import migrations, named_queries, parse_queries
from oraculo.stores.sqlite import SqliteStore, connection_threads, connections
from oraculo.stores.sqlite import store as store_module
from oraculo.testing.store_runs import (
    NOW,
    UNWRITABLE,
    assert_stored,
    change,
    changed,
    create,
    creation,
    make_run,
    succeeded,
)
from tests.stores import sqlite_stage as stage
from tests.stores.in_order_suite import InOrderSuite
from tests.stores.killed_writer import survives_kills
from tests.stores.sqlite_stage import look, opened
from tests.waiting import until

path = stage.path  # a fixture


class OnFile(InOrderSuite):
    inline = False

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = str(tmp_path / "a folder?" / "100% #1.db")

    async def make_store(self) -> Store:
        store = SqliteStore(self.path, inline=self.inline)
        await store.start()
        return store


class TestAtOnce(OnFile):
    """Small commits in the event loop's thread, as long as they are quick."""


class TestThreaded(OnFile):
    @pytest.fixture(autouse=True)
    def _threaded(self, by_thread: None) -> None:
        pass


class TestInline(OnFile):
    inline = True


@pytest.fixture
def by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit goes to the writer's thread, however small."""
    monkeypatch.setattr(connection_threads, "AT_ONCE_ROWS", -1)


def exists(path: str) -> bool:
    return Path(path).exists()


@asynccontextmanager
async def traced(store: SqliteStore) -> AsyncIterator[list[str]]:
    """The statements that the writer runs."""
    statements: list[str] = []
    await store._writer.run(lambda connection: connection.set_trace_callback(statements.append))
    yield statements
    await store._writer.run(lambda connection: connection.set_trace_callback(None))


# -- the file -------------------------------------------------------------------------------------------------------


async def test_the_file_is_durable_and_shared(path: str) -> None:
    async with opened(path) as store:
        names = ("journal_mode", "synchronous", "busy_timeout")
        values = await store._writer.run(
            lambda connection: [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
        )
        assert values == ["wal", 2, connections.BUSY_SECONDS * 1000]


async def test_readers_cannot_write(path: str) -> None:
    async with opened(path) as store:
        for lane in (store._reader, store._browser):
            assert lane is not store._writer
            with pytest.raises(StoreRefuses, match="readonly"):
                await lane.run(lambda connection: connection.execute("DELETE FROM runs"))


async def test_closing_folds_the_log_into_the_file(path: str) -> None:
    async with opened(path) as store:
        await create(store, make_run("a"))
        assert exists(f"{path}-wal")
    assert not exists(f"{path}-wal")


async def test_a_relative_path_is_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened("made/here/x.db") as store:
        assert await store.check() == f"SQLite {sqlite3.sqlite_version}"
    assert (tmp_path / "made" / "here" / "x.db").exists()


@pytest.mark.parametrize("inline", [False, True])
async def test_a_store_in_memory(inline: bool) -> None:
    async with opened(":memory:", inline=inline) as store:
        runs = [make_run(f"run-{n}") for n in range(20)]
        await asyncio.gather(*(store.commit([creation(run)], []) for run in runs), store.runs(RunQuery()))
        await change(store, succeeded(runs[0]))
        await assert_stored(store, runs[0])
        assert (await store.census())[RunStatus.SUCCEEDED] == 1
    assert not exists(":memory:")


async def test_inline_uses_no_thread(path: str) -> None:
    before = threading.active_count()
    async with opened(path, inline=True) as store:
        commit = store.commit([creation(make_run("a"))], [])
        with pytest.raises(StopIteration):
            commit.send(None)  # it is done before it would wait for anything
        assert threading.active_count() == before


# -- the schema -----------------------------------------------------------------------------------------------------


async def test_migrations_are_recorded_and_applied_once(path: str) -> None:
    for _ in range(2):
        async with opened(path):
            pass
        assert look(path, "PRAGMA user_version") == [(len(migrations("sqlite")),)]


async def test_a_migration_is_applied_whole_or_not_at_all(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = migrations("sqlite")
    bad = good[0]._replace(number=len(good) + 1, step="CREATE TABLE half (x);\nINSERT INTO nowhere VALUES (1);\n")
    monkeypatch.setattr(connections, "migrations", lambda dialect: [*good, bad])
    with pytest.raises(StoreError, match="nowhere"):
        await SqliteStore(path).start()
    assert look(path, "SELECT name FROM sqlite_master") == []
    assert look(path, "PRAGMA user_version") == [(0,)]


async def test_a_newer_file_is_refused_with_what_to_do(path: str) -> None:
    async with opened(path):
        pass
    look(path, "PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=r"newer ORÁCULO \(its schema is 99.*run that version") as refusal:
        await SqliteStore(path).start()
    assert not isinstance(refusal.value, StoreUnavailable)
    assert look(path, "PRAGMA user_version") == [(99,)]


LATER = Migration(len(migrations("sqlite")) + 1, "later", "CREATE TABLE later (x);\n")


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, stores are opened by a version that has one more migration."""
    known = [*migrations("sqlite"), LATER]
    return lambda: monkeypatch.setattr(connections, "migrations", lambda _dialect: known)


async def test_a_file_is_not_migrated_under_a_process_that_has_it_open(
    path: str, next_version: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BUSY_SECONDS", 0.05)
    async with opened(path) as store:
        await create(store, run := make_run("a"))
        next_version()
        newer = SqliteStore(path)
        with pytest.raises(StoreError, match=r"must be migrated, but another process has it open: stop all others"):
            await newer.start()
        await change(store, changed(run, Sent(0, 1)))
        assert look(path, "SELECT name FROM sqlite_master WHERE name = 'later'") == []
    assert await newer.migrate() == [LATER.label]
    await assert_stored(newer, run)
    await newer.close()


async def test_several_of_the_next_version_may_start_at_once_on_a_file_of_the_version_before(
    path: str, next_version: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path):
        pass
    next_version()
    stores = [SqliteStore(path) for _ in range(6)]
    all_found_it_older, migrated_alone = threading.Barrier(len(stores), timeout=10), connections._migrated_alone

    def together(path: str) -> list[str]:
        all_found_it_older.wait()
        return migrated_alone(path)

    monkeypatch.setattr(connections, "_migrated_alone", together)
    done = await asyncio.gather(*(store.migrate() for store in stores))
    assert [label for labels in done for label in labels] == [LATER.label]
    for store in stores:
        await create(store, make_run(str(id(store))))
        await store.close()


def test_queries_are_read_by_name() -> None:
    text = "-- about the file\n\n-- name: one\nSELECT 1;\n\n-- why\n-- name: two\nSELECT '-- x'\nFROM y;\n"
    assert parse_queries(text) == {"one": "SELECT 1", "two": "SELECT '-- x'\nFROM y"}
    with pytest.raises(StoreError, match="one name"):
        parse_queries("-- name: a\nSELECT 1;\n-- name: a\nSELECT 2;\n")


async def test_no_query_scans_a_table_or_sorts(path: str) -> None:
    async with opened(path):
        pass
    connection = sqlite3.connect(path)
    parameters = dict.fromkeys(("now", "limit", "n", "number", "id", "ids", "numbers", "after"), 1)
    parameters["ended_before"] = 1
    hot = ("stored_runs", "used_keys", "load_runs", "load_tasks", "due", "next_due", "unsent", "history", "prunable")
    for name in hot:
        sql = named_queries("sqlite")[name].replace("/* values */", ":id, :id")
        plan = connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()
        steps = [step for *_, step in plan]
        assert not [step for step in steps if "TEMP B-TREE" in step or step.startswith(("SCAN runs", "SCAN tasks"))]
    connection.close()


# -- writing together -----------------------------------------------------------------------------------------------


async def test_commits_that_wait_are_written_in_one_transaction(path: str) -> None:
    async with opened(path) as store, traced(store) as statements:
        runs = [make_run(f"run-{n}") for n in range(100)]
        gate = threading.Event()
        held = asyncio.ensure_future(store._writer.run(lambda _: gate.wait(10)))
        commits = [asyncio.ensure_future(store.commit([creation(run)], [])) for run in runs]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, *commits)
        # The first to come finds the writer free, the rest have queued up behind it.
        assert statements.count("COMMIT") <= 2
        assert [run.head.version for run in runs] == [1] * 100


@pytest.mark.usefixtures("by_thread")
async def test_a_bad_commit_fails_alone_in_its_group(path: str) -> None:
    async with opened(path) as store, traced(store) as statements:
        runs = [make_run(f"run-{n}") for n in range(5)]
        creations = [creation(run) for run in runs]
        creations[3].changes.tasks[1].note = UNWRITABLE
        results = await asyncio.gather(*(store.commit([each], []) for each in creations), return_exceptions=True)
        assert [isinstance(result, StoreError) for result in results] == [False, False, False, True, False]
        assert "surrogates" in str(results[3])
        assert statements.count("ROLLBACK") == 2  # of the group, and of the bad one by itself
        assert [run.head.version for run in runs] == [1, 1, 1, 0, 1]


async def test_a_batch_takes_few_statements(path: str) -> None:
    """Each statement gives up the interpreter's lock, and a busy event loop is slow to give it back."""
    async with opened(path) as store, traced(store) as statements:
        runs = [make_run(f"run-{n}") for n in range(300)]
        await create(store, *runs)
        await change(store, *(changed(run, Sent(0, 1), Sent(1, 1)) for run in runs))
        assert len(statements) < 25


@pytest.mark.usefixtures("by_thread")
async def test_closing_waits_for_every_group(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_threads, "GROUP_ROWS", 1)
    async with opened(path) as store:
        commits = [asyncio.ensure_future(store.commit([creation(make_run(f"run-{n}"))], [])) for n in range(10)]
        await asyncio.sleep(0)
    await asyncio.gather(*commits)
    assert look(path, "SELECT count(*) FROM runs") == [(10,)]


async def test_a_small_commit_is_written_before_anything_else_happens(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_threads, "_SLOW", 60.0)  # however slow this machine's disk is just now
    async with opened(path) as store:
        await create(store, make_run("first"))
        commit = store.commit([creation(make_run("a"))], [])
        with pytest.raises(StopIteration):  # it ended without waiting for anything
            commit.send(None)
        assert look(path, "SELECT id FROM runs ORDER BY n") == [("first",), ("a",)]


async def test_a_small_commit_waits_its_turn_behind_a_large_one(path: str) -> None:
    async with opened(path) as store, traced(store) as statements:
        gate = threading.Event()
        held = asyncio.ensure_future(store._writer.run(lambda _: gate.wait(10)))
        await asyncio.sleep(0)
        small = asyncio.ensure_future(store.commit([creation(make_run("a"))], []))
        await asyncio.sleep(0)
        assert "COMMIT" not in statements
        gate.set()
        await asyncio.gather(held, small)
        assert statements.count("COMMIT") == 1


async def test_who_gives_up_on_the_writer_leaves_it_busy_until_it_is_free(path: str) -> None:
    async with opened(path) as store:
        gate = threading.Event()
        held = asyncio.ensure_future(store._writer.run(lambda _: gate.wait(10)))
        await asyncio.sleep(0)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        small = asyncio.ensure_future(store.commit([creation(make_run("a"))], []))
        await asyncio.sleep(0)
        assert not small.done()
        gate.set()
        await small


async def test_a_slow_disk_is_left_to_the_thread_for_a_while(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_threads, "_SLOW", -1.0)
    async with opened(path) as store:
        at_once = []
        for n in range(2 * (connection_threads._SPARED + 1)):
            commit = asyncio.ensure_future(store.commit([creation(make_run(f"run-{n}"))], []))
            await asyncio.sleep(0)
            at_once.append(commit.done())
            await commit
        assert at_once == [True, *[False] * connection_threads._SPARED] * 2


async def test_the_log_is_folded_into_the_file_however_small_the_commits_are(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WAL_PAGES", 50)
    pages = []
    async with opened(path) as store:
        for n in range(3 * connection_threads._IN_A_ROW):
            await store.commit([creation(make_run(f"run-{n}"))], [])
            pages.append(os.stat(f"{path}-wal").st_size / 4096)
    assert max(pages) < 20 * connection_threads._IN_A_ROW


async def test_a_long_list_holds_up_neither_commits_nor_loads(path: str) -> None:
    async with opened(path) as store:
        gate = threading.Event()
        slow = asyncio.ensure_future(store._browser.run(lambda _: gate.wait(10)))
        listing = asyncio.ensure_future(store.runs(RunQuery()))
        await create(store, run := make_run("a"))
        await assert_stored(store, run)
        assert not listing.done()
        gate.set()
        assert await slow
        await listing


async def test_pruning_lets_commits_in_between(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PRUNED_TASKS", 6)
    async with opened(path) as store:
        runs = [make_run(f"run-{n}") for n in range(5)]
        await create(store, *runs)
        await change(store, *(succeeded(run) for run in runs))
        async with traced(store) as statements:
            assert await store.prune(NOW + 100, 10) == 5
        assert statements.count("COMMIT") == 3
        for table in ("runs", "inputs", "tasks", "history"):
            assert look(path, f"SELECT count(*) FROM {table}") == [(0,)]


# -- other processes ------------------------------------------------------------------------------------------------


async def test_a_file_that_another_holds_is_waited_for_beside_the_event_loop(path: str) -> None:
    async with opened(path) as store:
        await create(store, make_run("first"))  # from here on at once
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        commit = asyncio.ensure_future(store.commit([creation(make_run("a"))], []))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not commit.done()
        holder.execute("COMMIT")
        await commit
        holder.close()
        assert look(path, "SELECT count(*) FROM runs") == [(2,)]


async def test_a_file_that_another_holds_is_unavailable_and_then_available(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BUSY_SECONDS", 0.05)
    async with opened(path) as store:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        run = make_run("a")
        first = creation(run)
        with pytest.raises(StoreUnavailable, match="locked"):
            await store.commit([first], [])
        with pytest.raises(StoreUnavailable, match="locked"):
            await store.check()
        assert run.head.version == 0
        assert await store.load(["a"]) == {}  # reading goes on
        holder.close()
        [created] = (await store.commit([first], [])).created
        assert created.outcome is CreationOutcome.CREATED


@pytest.fixture
def new_file_held(path: str) -> Iterator[sqlite3.Connection]:
    """As it is while another process makes it: SQLite lets nobody else change how it is kept, and does not wait."""
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    yield holder
    holder.close()


async def test_a_new_file_that_another_is_making_is_waited_for(
    path: str, new_file_held: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = threading.Event()
    transaction = connections.Transaction

    @contextmanager
    def noticed(connection: sqlite3.Connection) -> Iterator[None]:
        waited.set()
        with transaction(connection):
            yield

    monkeypatch.setattr(connections, "Transaction", noticed)
    store = SqliteStore(path)
    start = asyncio.ensure_future(store.start())
    await until(lambda: start.done() or waited.is_set())
    assert not start.done()
    new_file_held.execute("COMMIT")
    await start
    await create(store, make_run("a"))
    await store.close()
    assert look(path, "PRAGMA journal_mode") == [("wal",)]


@pytest.mark.usefixtures("new_file_held")
async def test_a_new_file_is_not_waited_for_without_end(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BUSY_SECONDS", 0.05)
    with pytest.raises(StoreError, match="locked"):
        await SqliteStore(path).start()


async def test_a_process_that_is_killed_leaves_every_run_whole(path: str) -> None:
    await survives_kills(SqliteStore, path, kills=2)
    assert look(path, "PRAGMA integrity_check") == [("ok",)]
