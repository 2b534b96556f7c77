"""Commits of the MongoDB store that meet others, or of which the driver did not hear the outcome."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import AutoReconnect

from oraculo.core.events import Progressed, Sent
from oraculo.errors import StoreUnavailable
from oraculo.ports.store import CreationOutcome, Storage
from oraculo.stores.mongo import server
from oraculo.testing.store_runs import assert_stored, change, changed, create, creation, load, make_run, revived
from tests.servers.fleet import Fleet
from tests.stores import mongo_stage as stage
from tests.stores.mongo_stage import OF_RUNS, counts, end_abandoned, opened, wide_run

url, of_module = stage.url, stage.of_module  # fixtures


async def test_engines_that_change_the_same_runs_in_another_order_are_all_served(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        names = [f"run-{n}" for n in range(8)]
        await create(one, *map(make_run, names))
        written = dict.fromkeys(names, 1)

        async def write(store: Storage, order: list[str]) -> None:
            for number in range(3):
                loaded = await store.load(order)
                runs = [revived(loaded[name]) for name in order]
                changes = [changed(run, Progressed(0, float(number))) for run in runs]
                conflicts = (await store.commit([], changes)).conflicts
                for name in set(order) - conflicts:
                    written[name] += 1

        await asyncio.gather(write(one, names), write(other, names[::-1]), write(other, names[2:6]))
        for name in names:
            snapshot = await load(one, name)
            assert snapshot.head.version == written[name] > 1
            assert len(await one.history(name, limit=1_000)) == snapshot.head.entries


async def test_a_run_is_read_whole_while_it_changes(url: str) -> None:
    async with opened(url) as store, opened(url) as reader:
        run = wide_run("wide", 50)
        await create(store, run)
        done = asyncio.Event()

        async def read() -> int:
            read = 0
            while not done.is_set():
                snapshot = await load(reader, "wide")
                notes = {task.note for task in snapshot.tasks}
                assert notes == {None if snapshot.head.version == 1 else str(snapshot.head.version)}
                read += 1
            return read

        reading = asyncio.ensure_future(read())
        for version in range(2, 8):
            await change(store, changed(run, *(Progressed(n, 1.0, str(version)) for n in range(50))))
        done.set()
        assert await reading > 0


async def test_a_creation_that_loses_leaves_nothing(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        rivals = [creation(wide_run(f"run-{n}", 20), key="k") for n in range(6)]
        stores = (one, other) * 3
        results = await asyncio.gather(*(store.commit([each], []) for store, each in zip(stores, rivals, strict=True)))
        assert [result.created[0].outcome for result in results].count(CreationOutcome.CREATED) == 1
    assert await counts(url) == dict(zip(OF_RUNS, (1, 0, 20, 1), strict=True))


# -- outcomes that were not heard -----------------------------------------------------------------------------------


@asynccontextmanager
async def unheard_commits(monkeypatch: pytest.MonkeyPatch, times: int) -> AsyncIterator[list[str]]:
    """The server does what a commit asks, and the driver loses its answer, so many times."""
    finish = AsyncClientSession._finish_transaction
    lost: list[str] = []

    async def unheard(session: AsyncClientSession, connection: Any, command: str) -> Any:
        answer = await finish(session, connection, command)
        if command == "commitTransaction" and len(lost) < times:
            lost.append(command)
            raise AutoReconnect("the answer was lost")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(AsyncClientSession, "_finish_transaction", unheard)
        yield lost


async def test_a_commit_whose_outcome_was_lost_is_asked_for_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url) as store:
        await create(store, run := make_run("a"))
        async with unheard_commits(monkeypatch, times=5) as lost:
            committed = await store.commit([creation(new := make_run("b"))], [changed(run, Sent(0, 1))])
        assert len(lost) == 5
        assert committed.conflicts == frozenset()
        assert [created.outcome for created in committed.created] == [CreationOutcome.CREATED]
        for each in (run, new):
            await assert_stored(store, each)


async def test_a_commit_whose_outcome_stays_unknown_is_neither_a_failure_nor_a_conflict(
    url: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as store, opened(url, call_seconds=0.5 * fleet.mongo_slowness()) as impatient:
        await create(store, run := make_run("a"))
        async with unheard_commits(monkeypatch, times=1_000_000):
            with pytest.raises(StoreUnavailable):
                await impatient.commit([creation(make_run("b"))], [changed(run, Sent(0, 1))])
        # It was written, and whoever tries again finds that out.
        again = await store.commit([creation(make_run("b"))], [changed(revived(await load(store, "a")), Sent(1, 1))])
        assert [created.outcome for created in again.created] == [CreationOutcome.SAME]
        assert again.conflicts == frozenset()
        snapshot = await load(store, "a")
        assert snapshot.head.version == 3
        assert [task.unsent for task in snapshot.tasks] == [False, False, True]
    await end_abandoned(url)


# -- processes that were killed -------------------------------------------------------------------------------------


@asynccontextmanager
async def abandoned_transaction(url: str, run_id: str, application: str) -> AsyncIterator[None]:
    """A transaction has the run locked, and its client says nothing more."""
    async with AsyncMongoClient(url, appname=application) as client, client.start_session() as session:
        await session.start_transaction()
        runs = client.get_default_database().orquestracoes
        await runs.update_one({"_id": run_id}, {"$set": {"prioridade": 9}}, session=session)
        yield


async def test_what_a_killed_process_had_locked_is_free_in_seconds(url: str) -> None:
    async with opened(url) as store:
        await create(store, run := make_run("a"))
        async with abandoned_transaction(url, "a", "oraculo"):
            await change(store, changed(run, Progressed(0, 1.0)))
        await assert_stored(store, run)


async def test_the_transactions_of_other_applications_are_left_alone(
    url: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ABANDONED_SECONDS", 0.1)
    async with opened(url) as store, opened(url, call_seconds=0.5 * fleet.mongo_slowness()) as impatient:
        await create(store, run := make_run("a"))
        async with abandoned_transaction(url, "a", "loja"):
            with pytest.raises(StoreUnavailable):
                await impatient.commit([], [changed(run, Progressed(0, 1.0))])
        again = revived(await load(store, "a"))
        await change(store, changed(again, Progressed(0, 2.0)))
        await assert_stored(store, again)
    await end_abandoned(url)
