"""What can go wrong with a file of SQLite."""

import asyncio
import os
import re
import resource
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from oraculo.core.events import Sent
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.stores.sqlite import SqliteStore, connection_threads
from oraculo.stores.sqlite.connections import ours
from oraculo.testing.store_runs import (
    assert_stored,
    change,
    changed,
    create,
    creation,
    make_run,
)
from tests.stores import sqlite_stage as stage
from tests.stores.sqlite_stage import damage, look, opened, root_page
from tests.waiting import until

path = stage.path  # a fixture


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


async def test_a_folder_that_is_made_for_it_is_its_owners_alone(open_folder: Path) -> None:
    made, shared = open_folder / ".oraculo", open_folder / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    for folder in (made, shared):
        async with opened(str(folder / "oraculo.db"), inline=True):
            pass
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (made, shared)] == [0o700, 0o750]


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


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("ALTER TABLE tasks RENAME TO tarefas", "no such table"),
        ("ALTER TABLE runs RENAME COLUMN ended_at TO fim", "no such column"),
        ("ALTER TABLE history RENAME COLUMN detail TO detalhe", "has no column named"),
    ],
)
async def test_a_schema_that_was_changed_underneath_is_no_fault_of_what_is_committed(
    path: str, statement: str, told: str
) -> None:
    async with opened(path) as store:
        await create(store, run := make_run("a"))
        look(path, statement)
        with pytest.raises(StoreRefuses, match=told):
            await store.commit([], [changed(run, Sent(0, 1))])


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("SELEC 1", StoreError),
        ("INSERT INTO one VALUES (NULL)", StoreError),
        ("SELECT * FROM another", StoreRefuses),
        ("ROLLBACK", StoreError),
    ],
)
def test_what_is_wrong_with_a_statement_is_not_waited_for(statement: str, kind: type[StoreError]) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE one (n INTEGER NOT NULL)")
        with pytest.raises(sqlite3.Error) as caught:
            connection.execute(statement)
    assert type(ours(caught.value, "oraculo.db")) is kind


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


async def test_a_start_without_room_for_the_index_of_the_log_tells_that_the_disk_may_be_full(path: str) -> None:
    async with opened(path) as store:
        await create(store, run := make_run("a"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = SqliteStore(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(StoreError, match=r"disk I/O error \(SQLITE_IOERR_SHMSIZE\): is the disk full"):
            await store.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await store.close()
    async with opened(path) as store:
        await assert_stored(store, run)


@pytest.mark.parametrize("place", ["FSYNC", "DIR_FSYNC", "TRUNCATE", "SHMOPEN", "SHMMAP"])
def test_a_disk_that_is_full_is_no_fault_of_what_is_committed_wherever_it_shows(place: str) -> None:
    """A network disk, and one that is promised more than there is, tells it when the file is synced."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = f"SQLITE_IOERR_{place}"
    error.sqlite_errorcode = getattr(sqlite3, error.sqlite_errorname)
    told = ours(error, "o.db")
    assert isinstance(told, StoreRefuses)
    assert str(told).startswith(f"SQLite file o.db: disk I/O error (SQLITE_IOERR_{place}): is the disk full")


async def test_a_damaged_page_is_no_fault_of_what_is_committed(path: str) -> None:
    async with opened(path) as store:
        await create(store, run := make_run("a"))
        damage(path, root_page(path, "tasks"))
        for ask in (lambda: store.commit([], [changed(run, Sent(0, 1))]), lambda: store.load(["a"])):
            with pytest.raises(StoreRefuses, match="malformed"):
                await ask()


async def test_a_file_whose_beginning_is_damaged_is_no_fault_of_what_is_committed(path: str) -> None:
    async with opened(path) as store:
        await create(store, run := make_run("a"))
        damage(path, 1)
        with pytest.raises(StoreRefuses, match="not a database"):
            await store.commit([], [changed(run, Sent(0, 1))])
        with pytest.raises(StoreRefuses, match="not a database"):
            await store.check()


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
@pytest.mark.parametrize("at_once_rows", [connection_threads.AT_ONCE_ROWS, -1], ids=["at once", "threaded"])
async def test_nothing_is_written_to_a_file_that_was_taken_away_until_it_is_put_back(
    path: str, suffix: str, at_once_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_threads, "AT_ONCE_ROWS", at_once_rows)
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
