"""The MongoDB store: the suite every store passes, and what is its own."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure

from oraculo.core.events import Answered, Cancelled, Progressed, Repeated, Sent
from oraculo.core.run import Run, RunStatus
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.store import Due, Outcome, RunQuery, Store, Unsent
from oraculo.stores.mongo import (
    MongoStore,
    changes,
    creations,
    documents,
    forgetting,
    history,
    housekeeping,
    layout,
    reading,
    writes,
)
from oraculo.stores.mongo import server as server_module
from oraculo.stores.mongo.faults import translated
from oraculo.testing.store_runs import (
    NOW,
    OK,
    assert_stored,
    change,
    changed,
    create,
    creation,
    failure,
    load,
    make_run,
    revived,
    succeeded,
)
from oraculo.testing.store_suite import StoreSuite
from tests.servers.fleet import Fleet
from tests.servers.mongo import Mongo
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.stores.killed_writer import survives_kills
from tests.waiting import until

SIDES = ("orquestracoes_blocos", "orquestracoes_historico", "orquestracoes_anexos", "orquestracoes_duvidosas")
Database = Any


def with_database(url: str) -> str:
    """The URL of an empty database on the server."""
    return urlsplit(url)._replace(path=f"/test_{os.urandom(6).hex()}").geturl()


@asynccontextmanager
async def database(url: str) -> AsyncIterator[Database]:
    """As another application sees it."""
    async with AsyncMongoClient(url) as client:
        yield client.get_default_database()


@pytest.fixture
async def url(fleet: Fleet) -> AsyncIterator[str]:
    address = with_database(fleet.url("mongodb"))
    yield address
    async with database(address) as found:
        await found.client.drop_database(found.name)


@asynccontextmanager
async def opened(url: str, **options: float) -> AsyncIterator[MongoStore]:
    store = MongoStore(url, **options)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def counts(url: str, *names: str) -> dict[str, int]:
    async with database(url) as found:
        return {name: await found[name].count_documents({}) for name in names or ("orquestracoes", *SIDES)}


def wide_run(run_id: str, width: int = 200, **fields: Any) -> Run:
    return make_run(run_id, destinos=[{"fila": "q", "id": f"t{n}", **fields} for n in range(width)])


class TestConformance(StoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    async def make_store(self) -> Store:
        store = MongoStore(self.url)
        await store.start()
        return store


def keep_everything_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every run were too wide, every text too large and every history too long for the run's own document."""
    monkeypatch.setattr(writes, "EMBEDDED_TASKS", 0)
    for module in (writes, changes, forgetting, reading):
        monkeypatch.setattr(module, "BLOCK_TASKS", 2)
    for module in (writes, history):
        monkeypatch.setattr(module, "HISTORY_BLOCK", 2)
    monkeypatch.setattr(writes, "INLINE_ENTRIES", 1)
    monkeypatch.setattr(documents, "INLINE_BYTES", 1)
    monkeypatch.setattr(documents, "PART_BYTES", 100_000)


class TestEverythingApart(TestConformance):
    @pytest.fixture(autouse=True)
    def _apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keep_everything_apart(monkeypatch)


@pytest.fixture(scope="module")
def replica_set(fleet: Fleet) -> Iterator[str]:
    fleet.url("mongodb")  # skips when there is none to be had
    with Mongo(replicated=True) as server:
        yield server.url


@pytest.mark.long
class TestReplicaSet(TestConformance):
    @pytest.fixture(autouse=True)
    def _url(self, replica_set: str) -> None:
        self.url = with_database(replica_set)


# -- the document, as another application reads it ------------------------------------------------------------------


async def test_a_run_is_one_document_in_the_words_of_the_wire(url: str) -> None:
    async with opened(url) as store, database(url) as found:
        run = make_run("video-1", name="promotional-video", payload=b'{"produto":"x"}')
        await create(store, run)
        result = b'{ "arquivo" : "v.mp4" }'
        events = (Sent(0, 1, at=NOW + 1), Progressed(0, 40.0, "renderizando"), Answered(1, 1, result))
        await change(store, changed(run, *events, failure(2), now=NOW + 2))
        document = await found.orquestracoes.find_one({"correlation_id": "video-1"})
        assert (document["status"], document["pipeline"]) == ("em_execucao", "promotional-video")
        assert document["resumo"]["concluidas"] == document["resumo"]["erros"] == 1
        first, second, third = document["tarefas"]
        assert (first["id"], first["fila"], first["status"]) == ("escavador_a", "escavador_a", "em_execucao")
        assert first["progresso"] == {"percentual": 40.0, "mensagem": "renderizando"}
        assert (second["status"], second["resultado"]) == ("concluida", result.decode())
        assert json.loads(second["resultado"]) == {"arquivo": "v.mp4"}
        assert (third["status"], third["motivo"]) == ("erro", "broken")
        assert second["concluida_em"] > document["iniciada_em"]
        assert document["historico"][0]["evento"] == "orquestracao_iniciada"
    assert await counts(url, *SIDES) == dict.fromkeys(SIDES, 0)


async def test_a_delivery_that_was_written_before_it_could_name_a_broker_is_read(url: str) -> None:
    async with opened(url) as store, database(url) as found:
        run = make_run("old", responder_em="respostas")
        await create(store, run)
        await found.orquestracoes.update_one({"correlation_id": "old"}, {"$unset": {"entregas.0.interno.via": ""}})
        await assert_stored(store, run)


async def test_the_blocks_of_a_wide_run_are_named_by_its_document(url: str) -> None:
    async with opened(url) as store, database(url) as found:
        run = wide_run("wide")
        await create(store, run)
        await change(store, changed(run, Answered(150, 1, OK)))
        document = await found.orquestracoes.find_one({"correlation_id": "wide"})
        names = [entry["bloco"] for entry in document["blocos"]]
        blocks = {block["_id"]: block async for block in found.orquestracoes_blocos.find({"_id": {"$in": names}})}
        tasks = [task for name in names for task in blocks[name]["tarefas"]]
        assert [task["id"] for task in tasks] == [f"t{n}" for n in range(200)]
        assert tasks[150]["resultado"] == OK.decode()


# -- sizes ----------------------------------------------------------------------------------------------------------


async def test_a_result_on_a_wide_run_writes_a_handful_of_documents(url: str) -> None:
    async with opened(url) as store:
        run = wide_run("wide", 10_000)
        await create(store, run)
        before = await counts(url)
        async with database(url) as found:
            written = (await found.client.admin.command("serverStatus"))["opcounters"]
            await change(store, changed(run, Answered(5_000, 1, OK)))
            await store._housekeeping.finish()
            now = (await found.client.admin.command("serverStatus"))["opcounters"]
        assert sum(now[kind] - written[kind] for kind in ("insert", "update", "delete")) <= 5
        after = await counts(url)
        assert after["orquestracoes_blocos"] == before["orquestracoes_blocos"] + 1
        await assert_stored(store, run)


async def test_a_run_may_be_many_times_larger_than_a_document(url: str) -> None:
    async with opened(url) as store:
        big = b'"%s"' % (b"x" * 1_000_000)
        run = make_run("big", destinos=[{"fila": "q", "id": f"t{n}"} for n in range(40)])
        await create(store, run)
        for start in range(0, 40, 8):
            await change(store, changed(run, *(Answered(n, 1, big) for n in range(start, start + 8))))
        await assert_stored(store, run)


async def test_a_definition_larger_than_a_document(url: str) -> None:
    async with opened(url) as store:
        run = wide_run("large", 300)
        run.definition += b" " * 20_000_000
        await create(store, run)
        await assert_stored(store, run)


async def test_the_end_of_a_wide_run_in_one_commit(url: str) -> None:
    async with opened(url) as store:
        run = wide_run("wide", 3_000)
        await create(store, run)
        changes_ = changed(run, Cancelled())
        told = len(changes_.history)
        await change(store, changes_)
        await assert_stored(store, run)
        entries = await store.history("wide", limit=10_000)
        assert [entry.seq for entry in entries] == list(range(1, run.head.entries + 1))
        assert told > writes.INLINE_ENTRIES
        await store._housekeeping.finish()
        assert await store.history("wide", limit=10_000) == entries


# -- history --------------------------------------------------------------------------------------------------------


async def test_a_long_history_moves_out_of_the_document(url: str) -> None:
    async with opened(url) as store, database(url) as found:
        run = make_run("a")
        first = creation(run)
        told = list(first.changes.history)
        await store.commit([first], [])
        for number in range(200):
            told += (one := changed(run, Progressed(0, 1.0, str(number)), now=NOW + number)).history
            await change(store, one)
        await store._housekeeping.finish()
        document = await found.orquestracoes.find_one({"correlation_id": "a"})
        assert len(document["historico"]) < 64
        assert await counts(url, "orquestracoes_historico") == {"orquestracoes_historico": 3}
        assert list(await store.history("a")) == told
        assert list(await store.history("a", after=60, limit=10)) == told[60:70]
        assert list(await store.history("a", after=100, limit=1_000)) == told[100:]


async def test_an_entry_that_is_in_both_places_is_told_once(url: str) -> None:
    """As after a kill between the two writes that move it."""
    async with opened(url) as store, database(url) as found:
        run = make_run("a")
        await create(store, run)
        for number in range(70):
            await change(store, changed(run, Progressed(0, 1.0, str(number)), now=NOW + number))
        await store._housekeeping.finish()
        entries = list(await store.history("a"))
        [block] = await found.orquestracoes_historico.find().to_list()
        push = {"$push": {"historico": {"$each": block["entradas"], "$position": 0}}}
        await found.orquestracoes.update_one({"correlation_id": "a"}, push)
        assert list(await store.history("a")) == entries
        for number in range(70):
            await change(store, changed(run, Progressed(0, 1.0, str(number)), now=NOW + number))
        await store._housekeeping.finish()
        assert [entry.seq for entry in await store.history("a")] == list(range(1, 142))


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
        assert [result.created[0].outcome for result in results].count(Outcome.CREATED) == 1
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

    async def cut_short(collection: Any, inserted: Any) -> set[int]:
        if collection.name == "orquestracoes":
            raise StoreUnavailable("cut short")
        return await insert_missing(collection, inserted)

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
    with pytest.raises(StoreUnavailable, match="too often"):
        mine.was_written({"revisao": 20, "gravacoes": [other] * 8})


async def test_a_creation_whose_rival_in_the_commit_was_refused(url: str) -> None:
    """The first with the id cannot be written, because its key is another run's: the second can."""
    async with opened(url) as store:
        await store.commit([creation(make_run("x"), key="k")], [])
        rivals = [creation(make_run("a"), key="k", fingerprint="other"), creation(second := make_run("a"))]
        created = (await store.commit(rivals, [])).created
        assert [(each.outcome, each.run_id) for each in created] == [(Outcome.KEY_REUSED, "x"), (Outcome.CREATED, "a")]
        await assert_stored(store, second)


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


# -- timers, lists, plans -------------------------------------------------------------------------------------------


async def test_the_timers_of_wide_and_narrow_runs_come_in_one_order(url: str) -> None:
    async with opened(url) as store:
        seconds = {n: 500 - n for n in range(300)}
        wide = make_run(
            "w", destinos=[{"fila": "q", "id": f"{n}", "timeout": s} for n, s in seconds.items()], timeout=600
        )
        narrow = make_run("n", destinos=[{"fila": "q", "timeout": 300.5}], timeout=700)
        await create(store, wide, narrow)
        order = sorted([(300.5, Due("n", 0)), *((s, Due("w", n)) for n, s in seconds.items())], key=lambda one: one[0])
        assert list(await store.due(NOW + 500, 1_000)) == [one for _, one in order]
        assert list(await store.due(NOW + 500, 150)) == [one for _, one in order][:150]
        assert await store.next_due() == NOW + 201
        await change(store, changed(wide, Answered(299, 1, OK)))
        assert await store.next_due() == NOW + 202


async def test_what_is_asked_often_uses_an_index_and_sorts_nothing(url: str) -> None:
    async with opened(url) as store, database(url) as found:
        await create(store, *(make_run(f"run-{n}") for n in range(20)))
        runs = found.orquestracoes
        asked = {
            "due": runs.find({"agenda.toca_em": {"$lte": NOW}}).sort("agenda.toca_em"),
            "next_due": runs.find({"agenda.toca_em": {"$exists": True}}).sort("agenda.toca_em"),
            "unsent": runs.find({"agenda.a_enviar": True, "_id": {"$gte": ""}}).sort(
                [("agenda.a_enviar", 1), ("_id", 1)]
            ),
            "load": runs.find({"correlation_id": {"$in": ["a", "b"]}}),
            "prune": runs.find({"agenda.apagavel": {"$lt": NOW}}).sort("agenda.apagavel"),
            "by status": runs.find({"status": "erro"}).sort("_id", -1),
            "by name": runs.find({"pipeline": "x"}).sort("_id", -1),
            "letters": runs.find({"agenda.cartas_com": {"$exists": True, "$elemMatch": {"$eq": "x"}}}).sort("_id"),
        }
        for name, cursor in asked.items():
            plan = json.dumps((await cursor.explain())["queryPlanner"]["winningPlan"], default=str)
            assert "IXSCAN" in plan, (name, plan)
            assert "COLLSCAN" not in plan, (name, plan)
            assert '"SORT"' not in plan or name == "letters", (name, plan)  # those are few


async def test_runs_of_one_moment_are_listed_in_the_order_of_their_creation(url: str) -> None:
    async with opened(url) as store:
        names = [f"run-{n}" for n in (5, 3, 9, 1)]
        await create(store, *map(make_run, names))
        assert [head.id for head in (await store.runs(RunQuery())).heads] == names[::-1]


async def test_a_text_that_no_regular_expression_holds(url: str) -> None:
    async with opened(url) as store:
        await create(store, make_run("a"))
        for text in ("\0", "x" * 40_000, "a\0", "(?i)a", "^a$"):
            assert (await store.runs(RunQuery(text=text))).heads == []


# -- pruning --------------------------------------------------------------------------------------------------------


async def test_nothing_of_a_pruned_run_is_left(url: str) -> None:
    async with opened(url) as store:
        runs = [make_run("a"), wide_run("b"), make_run("c", payload=b'{"x":"%s"}' % (b"x" * 50_000)), make_run("d")]
        await create(store, *runs)
        for number in range(70):
            await change(store, changed(runs[3], Progressed(0, 1.0, str(number))))
        await change(store, *(succeeded(run) for run in runs))
        await store._housekeeping.finish()
        assert await store.prune(NOW + 100, 10) == 4
        await store._housekeeping.finish()
    async with database(url) as found:
        left = {"superado_em": {"$exists": False}}
        assert await found.orquestracoes_blocos.count_documents(left) == 0
    assert await counts(url, "orquestracoes", *SIDES) == dict.fromkeys(("orquestracoes", *SIDES), 0)


async def test_pruning_while_the_runs_are_in_use(url: str) -> None:
    async with opened(url) as store, opened(url) as other:
        runs = [wide_run(f"w{n}", 70) if n % 2 else make_run(f"n{n}") for n in range(10)]
        await create(store, *runs)
        await change(store, *(changed(run, *map(failure, range(len(run.tasks)))) for run in runs))
        sent = [changed(run, *(Sent(n, 1, dead_letter=True) for n in range(len(run.tasks)))) for run in runs]
        await change(store, *sent)
        again = [changed(run, Repeated()) for run in runs]
        committed, pruned = await asyncio.gather(store.commit([], again), other.prune(NOW + 100, 100))
        assert len(committed.conflicts) == pruned
        loaded = await store.load([run.id for run in runs])
        assert set(loaded) == {run.id for run in runs} - committed.conflicts
        for snapshot in loaded.values():
            assert snapshot.head.status is RunStatus.RUNNING
            assert len(snapshot.tasks) == snapshot.head.total
            assert len(await store.history(snapshot.head.id)) == snapshot.head.entries


@pytest.mark.parametrize("width", [3, 100])
async def test_pruning_looks_again_at_a_run_that_was_opened_since(
    url: str, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    async with opened(url) as store:
        run = wide_run("a", width)
        await create(store, run)
        await change(store, changed(run, Cancelled()))
        delete = housekeeping.Housekeeping._delete

        async def opened_before(keeper: housekeeping.Housekeeping, keys: Any, where: Any) -> int:
            if keys:
                await change(store, changed(run, Repeated()))
            return await delete(keeper, keys, where)

        monkeypatch.setattr(housekeeping.Housekeeping, "_delete", opened_before)
        assert await store.prune(NOW + 100, 10) == 0
        assert run.is_open
        await assert_stored(store, run)


# -- the layout -----------------------------------------------------------------------------------------------------


async def test_an_empty_database_gets_its_layout_though_several_start_at_once(url: str) -> None:
    stores = [MongoStore(url) for _ in range(6)]
    await asyncio.gather(*(store.start() for store in stores))
    for store in stores:
        await store.close()
    async with database(url) as found:
        assert (await found.oraculo_meta.find_one({"_id": "layout"}))["numero"] == len(layout.MIGRATIONS)


async def test_an_older_layout_is_refused_until_it_is_migrated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def colour(server: server_module.Server) -> None:
        await server.runs.update_many({}, {"$set": {"cor": "azul"}})

    async with opened(url) as old, database(url) as found:
        await create(old, before := make_run("before"))
        known = layout.MIGRATIONS
        monkeypatch.setattr(layout, "MIGRATIONS", (*known, layout.Migration(len(known) + 1, "colour", colour)))
        new = MongoStore(url)
        with pytest.raises(StoreError, match=r"is 1, and this program needs 2: run `oraculo migrate`") as refusal:
            await new.start()
        assert not isinstance(refusal.value, StoreUnavailable)
        assert await new.migrate() == ["0002 colour"]
        assert await new.migrate() == []
        assert (await found.orquestracoes.find_one())["cor"] == "azul"
        await assert_stored(new, before)
        await new.close()


async def test_migrating_needs_no_start(url: str) -> None:
    store = MongoStore(url)
    assert await store.migrate() == ["0001 runs"]
    await create(store, make_run("a"))
    await store.close()


async def test_a_newer_layout_is_refused_with_what_to_do(url: str) -> None:
    async with opened(url):
        pass
    async with database(url) as found:
        await found.oraculo_meta.update_one({"_id": "layout"}, {"$set": {"numero": 99}})
    for open_it in (MongoStore(url).start, MongoStore(url).migrate):
        with pytest.raises(StoreError, match=r"newer ORÁCULO \(its layout is 99.*run that version") as refusal:
            await open_it()
        assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_server_that_is_too_old_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "OLDEST_MONGODB", (99, 0))
    with pytest.raises(StoreError, match=r"too old: 99\.0 or newer") as refusal:
        await MongoStore(url).start()
    assert not isinstance(refusal.value, StoreUnavailable)


# -- other engines --------------------------------------------------------------------------------------------------


async def test_a_process_that_is_killed_leaves_every_run_whole(url: str) -> None:
    await survives_kills(url, kills=4)


# -- a server in trouble --------------------------------------------------------------------------------------------


def test_a_driver_that_takes_a_lone_server_for_a_set_is_worth_another_try() -> None:
    """It does so now and then when that server was just restarted."""
    with pytest.raises(StoreUnavailable, match="retryable writes"), translated("place"):
        raise OperationFailure("This MongoDB deployment does not support retryable writes.", 20)


async def test_a_server_that_is_killed_and_restarted_loses_nothing_confirmed(fleet: Fleet) -> None:
    server = fleet.breakable("mongodb")
    async with opened(with_database(server.url), connect_seconds=0.5, call_seconds=3) as store:
        runs = [make_run(f"run-{n}") for n in range(4)] + [wide_run("wide", 100)]
        await create(store, *runs)
        confirmed = {run.id: 1 for run in runs}
        stopping = asyncio.Event()
        troubles: list[StoreError] = []

        async def write(run_id: str) -> None:
            number = 0
            while not stopping.is_set():
                number += 1
                try:
                    run = revived(await load(store, run_id))
                    events = [Progressed(task.number, 1.0, str(run.head.version + 1)) for task in run.tasks]
                    if (await store.commit([], [changed(run, *events)])).conflicts:
                        raise AssertionError(f"{run_id}: a conflict, though nobody else writes")
                    confirmed[run_id] = run.head.version
                except StoreUnavailable as trouble:
                    troubles.append(trouble)

        writers = [asyncio.ensure_future(write(run.id)) for run in runs]

        async def go_on() -> None:
            """All of them; one that ended tells why."""
            before = dict(confirmed)

            def all_have() -> bool:
                for writer in writers:
                    if writer.done():
                        writer.result()
                return all(confirmed[one] > before[one] + 3 for one in before)

            await until(all_have, within=30, saying=f"each run to be written; the last trouble: {troubles[-1:]}")

        for _ in range(2):
            await go_on()
            troubles.clear()
            server.kill()
            await until(lambda: troubles, within=20, saying="trouble")
            await asyncio.to_thread(server.start)
        await go_on()
        stopping.set()
        await asyncio.gather(*writers)
        for run_id, version in confirmed.items():
            snapshot = await load(store, run_id)
            assert snapshot.head.version >= version
            assert {task.note for task in snapshot.tasks} == {str(snapshot.head.version)}
            entries = await store.history(run_id, limit=100_000)
            assert [entry.seq for entry in entries] == list(range(1, snapshot.head.entries + 1))


async def test_a_frozen_server_is_unavailable_in_bounded_time(fleet: Fleet) -> None:
    server = fleet.breakable("mongodb")
    async with opened(with_database(server.url), connect_seconds=0.5, call_seconds=1) as store:
        run = make_run("a")
        await create(store, run)
        stale = revived(await load(store, "a"))
        server.freeze()
        try:
            for call in (
                lambda: store.load(["a"]),
                lambda: store.commit([], [changed(stale, Sent(0, 1))]),
                lambda: store.check(),
                lambda: store.due(NOW, 10),
            ):
                with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}"):
                    await asyncio.wait_for(call(), 10)
        finally:
            server.thaw()
        await until(lambda: _answers(store), within=20)
        again = revived(await load(store, "a"))
        await change(store, changed(again, Progressed(1, 1.0, "on")))
        await assert_stored(store, again)


async def _answers(store: MongoStore) -> bool:
    try:
        return bool(await store.check())
    except StoreUnavailable:
        return False


async def test_connections_that_are_cut_are_made_again(fleet: Fleet) -> None:
    server = fleet.breakable("mongodb")
    with Proxy(server.url) as proxy:
        async with opened(with_database(proxy.url), connect_seconds=2, call_seconds=3) as store:
            await create(store, run := make_run("a"))
            proxy.cut()
            await until(lambda: _answers(store), within=20)
            await assert_stored(store, run)
            proxy.swallows = True
            commit = asyncio.ensure_future(store.commit([], [changed(run, Progressed(0, 1.0, "cut"))]))
            await asyncio.sleep(0.05)
            proxy.cut()
            proxy.swallows = False
            with pytest.raises(StoreUnavailable):
                await commit
            await until(lambda: _answers(store), within=20)
            again = revived(await load(store, "a"))
            await change(store, changed(again, Sent(1, 1)))
            await assert_stored(store, again)


async def test_a_server_that_cannot_be_reached_is_named_without_the_password() -> None:
    for host in (f"127.0.0.1:{free_port()}", "nowhere.invalid:27017"):
        store = MongoStore(f"mongodb://user:s3cret@{host}/x", connect_seconds=0.3, call_seconds=2)
        with pytest.raises(StoreUnavailable, match=f"MongoDB at {host}/x") as refusal:
            await store.start()
        assert "s3cret" not in str(refusal.value)


async def test_an_address_that_makes_no_sense_is_refused_for_good() -> None:
    for url in ("mongodb://", "mongodb://h:x/y"):
        with pytest.raises(StoreError) as refusal:
            await MongoStore(url, connect_seconds=0.2, call_seconds=1).start()
        assert not isinstance(refusal.value, StoreUnavailable), url


async def test_passwords(fleet: Fleet) -> None:
    fleet.url("mongodb")
    with Mongo(user="oraculo", password="s3cret") as server:
        async with opened(with_database(server.url)) as store:
            await create(store, make_run("a"))
        wrong = MongoStore(with_database(server.url).replace("s3cret", "gu3ss"))
        with pytest.raises(StoreUnavailable, match="Authentication failed") as refusal:
            await wrong.start()
        assert "gu3ss" not in str(refusal.value)


async def test_a_store_that_is_not_open_says_so(url: str) -> None:
    store = MongoStore(url)
    for call in (store.load(["a"]), store.commit([], []), store.prune(NOW, 1), store.runs(RunQuery())):
        with pytest.raises(StoreError, match="not open"):
            await call


async def test_a_timer_and_a_command_of_a_wide_run_are_found_by_the_block(url: str) -> None:
    async with opened(url) as store:
        run = wide_run("wide", 100, timeout=50)
        await create(store, run)
        await change(store, changed(run, *(Sent(n, 1) for n in range(100) if n != 77)))
        assert list(await store.unsent(10)) == [Unsent("wide", 77, 1)]
        assert list(await store.unsent(10, ("wide", 76))) == [Unsent("wide", 77, 1)]
        assert list(await store.unsent(10, ("wide", 77))) == []
