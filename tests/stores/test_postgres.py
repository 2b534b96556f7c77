"""The PostgreSQL store: the suite every store passes, and how it writes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.errors import StoreError
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Store
from oraculo.stores.postgres import PostgresStore, commits
from oraculo.stores.postgres import store as store_module
from oraculo.stores.postgres.connections import QUERIES, Lane
from oraculo.testing.store_runs import (
    NOW,
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
from tests.servers.fleet import Fleet
from tests.stores import postgres_stage as stage
from tests.stores.in_order_suite import InOrderSuite
from tests.stores.killed_writer import survives_kills
from tests.stores.postgres_stage import ask, connected, opened, somebody_waits, with_schema
from tests.waiting import until

url = stage.url  # a fixture


class TestPostgres(InOrderSuite):
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


async def test_a_process_that_is_killed_leaves_every_run_whole(url: str) -> None:
    await survives_kills(PostgresStore, url, kills=2)
