"""Commits of the MongoDB store that lose, or are cut short, and what they leave."""

import asyncio
from typing import Any

import pytest
from pymongo.asynchronous.collection import AsyncCollection

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.errors import StoreUnavailable
from oraculo.ports.store import CreationOutcome, Due
from oraculo.stores.mongo import changes, creations, housekeeping, reading, writes
from oraculo.testing.store_runs import (
    NOW,
    OK,
    assert_stored,
    change,
    changed,
    create,
    creation,
    load,
    make_run,
    revived,
)
from tests.stores import mongo_stage as stage
from tests.stores.mongo_stage import SIDES, counts, database, opened, wide_run

url = stage.url  # a fixture


# -- commits that lose, and what they leave -------------------------------------------------------------------------


async def test_a_lost_race_leaves_no_side_documents(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        await create(one, wide_run("wide"))
        for round_ in range(5):
            rivals = [(store, revived(await load(store, "wide"))) for store in (one, other) for _ in range(3)]
            big = b'"%s"' % (str(round_).encode() * 20_000)
            commits = [
                store.commit([], [changed(run, Progressed(number, 1.0, f"{number}"), Answered(10 + round_, 1, big))])
                for number, (store, run) in enumerate(rivals)
            ]
            results = await asyncio.gather(*commits)
            assert sorted(len(result.conflicts) for result in results) == [0, 1, 1, 1, 1, 1]
            winner = next(run for (_, run), result in zip(rivals, results, strict=True) if not result.conflicts)
            await assert_stored(one, winner)
        for store in (one, other):
            await store._housekeeping.finish()
        async with database(url) as found:
            assert await found.orquestracoes_blocos.count_documents({"superado_em": {"$exists": False}}) == 7
        assert (await counts(url))["orquestracoes_anexos"] == 5  # the results


async def test_a_creation_that_loses_leaves_no_side_documents(url: str) -> None:
    async with opened(url) as store:
        rivals = [creation(wide_run(f"run-{n}"), key="k") for n in range(6)]
        results = await asyncio.gather(*(store.commit([each], []) for each in rivals))
        assert [result.created[0].outcome for result in results].count(CreationOutcome.CREATED) == 1
        await store._housekeeping.finish()
    async with database(url) as found:
        [run] = await found.orquestracoes.find().to_list()
        for side in SIDES[:3]:
            assert await found[side].distinct("run") in ([], [run["_id"]])
    assert (await counts(url))["orquestracoes_duvidosas"] == 0


async def test_what_a_killed_process_left_of_a_creation_is_deleted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url) as store, database(url) as found:
        await create(store, kept := wide_run("kept"))
        await store._housekeeping.finish()
        before = await counts(url)
        births = [writes.Birth(creation(wide_run("half")), changes.ObjectId())]
        keys = [births[0].run_key, (await found.orquestracoes.find_one())["_id"]]
        await store._housekeeping.doubt(keys)
        await found.orquestracoes_blocos.insert_many(births[0].blocks)
        await store.prune(NOW, 10)
        assert (await counts(url))["orquestracoes_duvidosas"] == 2, "somebody may still be at it"
        monkeypatch.setattr(housekeeping, "DOUBTFUL_SECONDS", -1.0)
        await store.prune(NOW, 10)
        assert await counts(url) == before
        await assert_stored(store, kept)


async def test_a_creation_that_is_cut_short_is_noted_before_its_first_side_document(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert_missing = creations.insert_missing

    async def cut_short(server: Any, collection: Any, inserted: Any) -> set[int]:
        if collection.name == "orquestracoes":
            raise StoreUnavailable("cut short")
        return await insert_missing(server, collection, inserted)

    async with opened(url) as store:
        monkeypatch.setattr(creations, "insert_missing", cut_short)
        with pytest.raises(StoreUnavailable):
            await store.commit([creation(wide_run("half"))], [])
        assert (await counts(url))["orquestracoes_blocos"] == 7
        monkeypatch.setattr(housekeeping, "DOUBTFUL_SECONDS", -1.0)
        await store.prune(NOW, 10)
    assert await counts(url) == dict.fromkeys(("orquestracoes", *SIDES), 0)


async def test_a_run_is_read_whole_while_its_blocks_are_replaced_and_deleted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def delete_at_once(keeper: housekeeping.Housekeeping, blocks: Any, _attachments: Any) -> None:
        await keeper._server.blocks.delete_many({"_id": {"$in": blocks}})

    monkeypatch.setattr(housekeeping.Housekeeping, "_discard", delete_at_once)
    async with opened(url) as store, opened(url) as reader:
        run = wide_run("wide", 300)
        await create(store, run)
        done = asyncio.Event()

        async def read() -> int:
            read = 0
            while not done.is_set():
                snapshot = await load(reader, "wide")
                notes = {task.note for task in snapshot.tasks}
                assert notes == {None if snapshot.head.version == 1 else str(snapshot.head.version)}
                await reader.due(NOW + 1_000, 1_000)
                await reader.unsent(1_000)
                read += 1
            return read

        reading_ = asyncio.ensure_future(read())
        for version in range(2, 25):
            await change(store, changed(run, *(Progressed(n, 1.0, str(version)) for n in range(300))))
        done.set()
        assert await reading_ > 0


@pytest.mark.parametrize("ask", ["load", "due", "unsent"])
async def test_a_block_that_is_gone_is_looked_for_in_the_run_as_it_is_now(
    url: str, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    async with opened(url) as store, database(url) as found:
        run = wide_run("wide", 100, timeout=50)
        await create(store, run)
        read_blocks, calls = reading.read_blocks, 0

        async def overtaken(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:  # the run's document was read; now the run moves on, and time passes
                await change(store, changed(run, *(Answered(n, 1, OK) for n in range(90))))
                await store._housekeeping.finish()
                await found.orquestracoes_blocos.delete_many({"superado_em": {"$exists": True}})
            return await read_blocks(*arguments)

        monkeypatch.setattr(reading, "read_blocks", overtaken)
        if ask == "load":
            await assert_stored(store, run)
        elif ask == "due":
            assert list(await store.due(NOW + 55, 1_000)) == [Due("wide", n) for n in range(90, 100)]
        else:
            assert [one.task for one in await store.unsent(1_000)] == list(range(90, 100))
        assert calls == 2


async def test_an_outcome_that_the_server_does_not_tell_is_found_out(url: str) -> None:
    """It counts what a batch matched and does not say which: who wrote a version is told by the run."""
    async with opened(url) as store:
        runs = [make_run(f"run-{n}") for n in range(10)]
        await create(store, *runs)
        stale = [revived(await load(store, run.id)) for run in runs]
        await change(store, *(changed(run, Sent(0, 1)) for run in runs[::2]))
        committed = await store.commit([], [changed(run, Sent(1, 1)) for run in stale])
        assert committed.conflicts == {run.id for run in runs[::2]}


def test_a_commit_is_known_after_others_have_followed_it() -> None:
    run = make_run("a")
    creation(run)
    run.head.version = 1
    mine = writes.Update(changed(run, Sent(0, 1)), changes.ObjectId())
    other = changes.ObjectId()
    assert mine.was_written({"revisao": 4, "gravacoes": [other, mine.commit, other, other]})
    assert not mine.was_written({"revisao": 4, "gravacoes": [other, other, mine.commit, other]})
    assert not mine.was_written({"revisao": 1, "gravacoes": [mine.commit]})
    assert not mine.was_written(None)
    assert mine.was_written({"revisao": 20, "gravacoes": [other] * 8}) is None


async def test_a_commit_that_many_have_followed_before_it_is_looked_for_is_not_called_a_conflict(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as store:
        runs = [make_run("overtaken"), make_run("stale")]
        await create(store, *runs)
        stale = revived(await load(store, "stale"))
        await change(store, changed(runs[1], Sent(0, 1)))
        bulk_write = AsyncCollection.bulk_write

        async def overtaken(*arguments: Any, **options: Any) -> Any:
            done = await bulk_write(*arguments, **options)
            monkeypatch.undo()
            run = revived(await load(store, "overtaken"))
            for number in range(20):
                await change(store, changed(run, Progressed(0, float(number))))
            return done

        monkeypatch.setattr(AsyncCollection, "bulk_write", overtaken)
        with pytest.raises(StoreUnavailable, match="too often"):
            await store.commit([], [changed(runs[0], Sent(0, 1)), changed(stale, Sent(1, 1))])
        assert (await load(store, "overtaken")).tasks[0].sent_at is not None, "it was written"


# -- what was sent is forgotten -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [3, 200])
async def test_an_engine_that_knows_nothing_of_it_does_not_undo_the_forgetting(url: str, width: int) -> None:
    async with opened(url) as store:
        run = wide_run("a", width)
        await create(store, run)
        await change(store, changed(run, *(Sent(n, 1, via="redis") for n in range(width))))
        assert await store.unsent(10) == []
        assert await store.forget_sent() == width
        # It changes one task, and remembers the others as sent.
        for note in ("once", "twice"):
            await change(store, changed(run, Progressed(0, 1.0, note), Answered(1, 1, OK)))
            expected = [n for n in range(width) if n not in (0, 1)]
            assert [one.task for one in await store.unsent(1_000)] == expected
        assert list(await store.held_by("redis", 10)) == ["a"]
        assert await store.prune(NOW + 10_000, 10) == 0


async def test_forgetting_while_runs_change(url: str) -> None:
    async with opened(url) as store:
        runs = [make_run("a"), wide_run("b", 100)]
        await create(store, *runs)
        for number in range(10):
            commits = [changed(run, Sent(number % 3, 1, via="x"), Progressed(2, 1.0, str(number))) for run in runs]
            results = await asyncio.gather(store.commit([], commits), store.forget_sent())
            assert results[0].conflicts == frozenset()
        for run in runs:
            unsent = [task.number for task in (await load(store, run.id)).tasks if task.unsent]
            assert [one.task for one in await store.unsent(1_000) if one.run_id == run.id] == unsent


async def test_forgetting_again_while_a_run_changes_is_no_conflict(url: str) -> None:
    """Each forgetting marks the run anew, also between two looks of one commit."""
    async with opened(url) as store:
        run = make_run("a")
        await create(store, run)
        for number in range(60):
            commit = changed(run, Sent(number % 3, 1, via="x"), Progressed(2, 1.0, str(number)))
            results = await asyncio.gather(store.commit([], [commit]), *(store.forget_sent() for _ in range(4)))
            assert results[0].conflicts == frozenset(), number
