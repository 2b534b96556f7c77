"""The SQLite store: the suite every store passes, and what is its own."""

import asyncio
import os
import re
import resource
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from oraculo.core.events import Sent
from oraculo.core.run import Changes, RunStatus
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.ports.store import Outcome, RunQuery, Store
from oraculo.stores.sql import migrations, named_queries, parse_queries
from oraculo.stores.sqlite import SqliteStore, connections, lanes
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
from tests.stores.in_order_suite import InOrderSuite
from tests.stores.killed_writer import survives_kills
from tests.stores.started import started
from tests.waiting import until


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
    monkeypatch.setattr(lanes, "AT_ONCE_ROWS", -1)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "oraculo.db")


def opened(path: str, *, inline: bool = False) -> AbstractAsyncContextManager[SqliteStore]:
    return started(SqliteStore(path, inline=inline))


def look(path: str, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


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
    monkeypatch.setattr(lanes, "GROUP_ROWS", 1)
    async with opened(path) as store:
        commits = [asyncio.ensure_future(store.commit([creation(make_run(f"run-{n}"))], [])) for n in range(10)]
        await asyncio.sleep(0)
    await asyncio.gather(*commits)
    assert look(path, "SELECT count(*) FROM runs") == [(10,)]


async def test_a_small_commit_is_written_before_anything_else_happens(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_SLOW", 60.0)  # however slow this machine's disk is just now
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
    monkeypatch.setattr(lanes, "_SLOW", -1.0)
    async with opened(path) as store:
        at_once = []
        for n in range(2 * (lanes._SPARED + 1)):
            commit = asyncio.ensure_future(store.commit([creation(make_run(f"run-{n}"))], []))
            await asyncio.sleep(0)
            at_once.append(commit.done())
            await commit
        assert at_once == [True, *[False] * lanes._SPARED] * 2


async def test_the_log_is_folded_into_the_file_however_small_the_commits_are(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WAL_PAGES", 50)
    pages = []
    async with opened(path) as store:
        for n in range(3 * lanes._IN_A_ROW):
            await store.commit([creation(make_run(f"run-{n}"))], [])
            pages.append(os.stat(f"{path}-wal").st_size / 4096)
    assert max(pages) < 20 * lanes._IN_A_ROW


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
        assert created.outcome is Outcome.CREATED


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
    transaction = connections.transaction

    @contextmanager
    def noticed(connection: sqlite3.Connection) -> Iterator[None]:
        waited.set()
        with transaction(connection):
            yield

    monkeypatch.setattr(connections, "transaction", noticed)
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
    await survives_kills(SqliteStore, path, kills=3)
    assert look(path, "PRAGMA integrity_check") == [("ok",)]


# -- what can go wrong with a file ----------------------------------------------------------------------------------


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere: for as long as this lasts, be nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Unlike tmp_path, one that nobody may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def make_read_only(folder: Path) -> None:
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)


async def test_a_read_only_file_says_so(open_folder: Path) -> None:
    path = str(open_folder / "oraculo.db")
    async with opened(path, inline=True):
        pass
    make_read_only(open_folder)
    with without_privileges(), pytest.raises(StoreError, match=r"oraculo\.db: .*readonly"):
        await SqliteStore(path, inline=True).start()


async def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = SqliteStore(str(tmp_path / "file" / "folder" / "x.db"))
    with pytest.raises(StoreError, match=r"folder .*file/folder .*cannot be made"):
        await store.start()
    (tmp_path / "file").unlink()
    await store.start()  # once it is mended
    await store.close()


async def test_a_path_that_is_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{tmp_path}: unable to open"):
        await SqliteStore(str(tmp_path)).start()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(b"this is no database, but it is long enough to look into\n" * 100)
    with pytest.raises(StoreError, match="not a database") as refusal:
        await SqliteStore(str(path)).start()
    assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_full_disk_loses_nothing_and_is_worth_a_retry(path: str) -> None:
    async with opened(path) as store:
        await create(store, run := make_run("a"))
        await store._writer.run(lambda connection: connection.execute("PRAGMA max_page_count = 1").fetchall())
        big = make_run("big", payload=b'{"x":"' + b"x" * 500_000 + b'"}')
        with pytest.raises(StoreRefuses, match="full"):
            await store.commit([creation(big)], [])
        await assert_stored(store, run)
        await store._writer.run(lambda connection: connection.execute("PRAGMA max_page_count = 100000").fetchall())
        await change(store, changed(run, Sent(0, 1)))
        await assert_stored(store, run)


async def test_a_quota_that_is_used_up_is_no_fault_of_what_is_committed(path: str) -> None:
    big = make_run("big", payload=b'{"x":"' + b"x" * 500_000 + b'"}')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with opened(path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))  # as a quota, it is EFBIG and not ENOSPC
        try:
            with pytest.raises(StoreRefuses, match="disk I/O error"):
                await store.commit([creation(big)], [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await create(store, big)
        await assert_stored(store, big)


async def refuses(store: SqliteStore) -> bool:
    try:
        await store.check()
    except StoreRefuses:
        return True
    return False


async def assert_refused(store: SqliteStore, name: str) -> None:
    await until(lambda: refuses(store), within=1.0)
    words = f"{re.escape(name)} was deleted, replaced or made unreachable while it was open: put it back"
    for ask in (store.check, lambda: store.load(["first"])):
        with pytest.raises(StoreRefuses, match=words):
            await ask()
    runs = [make_run(f"run-{n}") for n in range(3)]
    commits = (store.commit([creation(run)], []) for run in runs)
    for refusal in await asyncio.gather(*commits, return_exceptions=True):
        with pytest.raises(StoreRefuses, match=words):
            raise refusal  # type: ignore[misc]
    assert [run.head.version for run in runs] == [0] * 3


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("at_once_rows", [lanes.AT_ONCE_ROWS, -1], ids=["at once", "threaded"])
async def test_nothing_is_written_to_a_file_that_was_taken_away_until_it_is_put_back(
    path: str, suffix: str, at_once_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "AT_ONCE_ROWS", at_once_rows)
    async with opened(path) as store:
        await create(store, run := make_run("first"))
        await assert_stored(store, run)
        os.rename(f"{path}{suffix}", f"{path}.aside")
        await assert_refused(store, f"{path}{suffix}")
        os.rename(f"{path}.aside", f"{path}{suffix}")
        assert await store.check()
        await create(store, *(make_run(f"run-{n}") for n in range(3)))
    assert look(path, "SELECT count(*) FROM runs") == [(4,)]


async def test_nothing_is_written_to_a_file_that_another_took_the_place_of(path: str) -> None:
    async with opened(path) as store:
        await create(store, run := make_run("first"))
        await assert_stored(store, run)
        os.link(path, f"{path}.aside")
        shutil.copy(path, f"{path}.backup")
        os.replace(f"{path}.backup", path)
        await assert_refused(store, path)
        os.replace(f"{path}.aside", path)
        assert await store.check()


async def test_a_file_is_known_again_by_another_name_and_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "elsewhere" / "oraculo.db")
    monkeypatch.chdir(tmp_path)
    async with opened("link.db") as store:
        monkeypatch.chdir("elsewhere")
        await create(store, run := make_run("first"))
        await assert_stored(store, run)
        os.rename("oraculo.db-wal", "aside")
        await assert_refused(store, f"{tmp_path}/elsewhere/oraculo.db-wal")
        os.rename("aside", "oraculo.db-wal")
        assert await store.check()


async def test_a_store_that_is_not_open_says_so(path: str) -> None:
    store = SqliteStore(path)
    with pytest.raises(StoreError, match="not open"):
        await store.load(["a"])
    with pytest.raises(StoreError, match="not open"):
        await store.commit([], [Changes(make_run("a"))])


async def test_an_engine_that_died_before_the_clock_was_set_back_is_forgotten(path: str) -> None:
    """All who use the file have one clock: it would count as alive until that is as far again."""
    async with started(SqliteStore(path)) as store:
        await store.attend("dead", NOW, 5)
        assert await store.attend("alive", NOW - 600, 5) == ["alive"]
        await store.attend("other", NOW - 599, 5)
        assert await store.attend("alive", NOW - 598, 5) == ["alive", "other"]
