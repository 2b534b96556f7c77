"""The MongoDB store: the suite every store passes, and its documents."""

import asyncio
import json
from typing import Any

import pytest

from oraculo.core.events import Answered, Cancelled, Progressed, Repeated, Sent
from oraculo.core.run import RunStatus
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Due, Store
from oraculo.stores.mongo import (
    MongoStore,
    changes,
    documents,
    forgetting,
    history,
    housekeeping,
    portions,
    reading,
    writes,
)
from oraculo.testing.store_runs import (
    NOW,
    OK,
    assert_stored,
    change,
    changed,
    create,
    creation,
    failure,
    make_run,
    succeeded,
)
from oraculo.testing.store_suite import StoreSuite
from tests.stores import mongo_stage as stage
from tests.stores.killed_writer import survives_kills
from tests.stores.mongo_stage import SIDES, counts, database, opened, wide_run

url = stage.url  # a fixture


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


async def cut_short(store: MongoStore, found: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The document of a run with 3,000 entries in an attachment, before anything of it is moved."""
    with monkeypatch.context() as patch:
        patch.setattr(store._housekeeping, "spill_history", lambda _: None)
        run = wide_run("wide", 3_000)
        await create(store, run)
        await change(store, changed(run, Cancelled()))
    document: dict[str, Any] = await found.orquestracoes.find_one({"correlation_id": "wide"})
    [attached] = document["historico_anexos"]
    assert attached["ate"] == run.head.entries
    assert attached["ate"] % writes.HISTORY_BLOCK
    return document


async def test_a_page_of_the_history_reads_only_the_attachments_that_it_needs(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as store, database(url) as found:
        document = await cut_short(store, found, monkeypatch)
        entries = list(await store.history("wide", limit=10_000))
        await store._housekeeping._spill_history(["wide"])
        before = {name: document.get(name, []) for name in ("historico", "historico_anexos")}
        await found.orquestracoes.update_one({"correlation_id": "wide"}, {"$set": before})  # as if killed in between
        reads: list[str] = []

        async def read_all(server: Any, collection: Any, *asked: Any) -> list[Any]:
            reads.append(collection.name)
            return await portions.read_all(server, collection, *asked)

        monkeypatch.setattr(history, "read_all", read_all)
        in_blocks = len(entries) // writes.HISTORY_BLOCK * writes.HISTORY_BLOCK
        for after in range(0, in_blocks, 500):
            limit = min(500, in_blocks - after)
            assert list(await store.history("wide", after=after, limit=limit)) == entries[after : after + limit]
        assert set(reads) == {"orquestracoes_historico"}
        assert list(await store.history("wide", after=in_blocks - 1)) == entries[in_blocks - 1 :]
        assert reads.count("orquestracoes_anexos") == 1


async def test_what_an_attachment_has_beyond_the_last_block_comes_into_the_document_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as store, database(url) as found:
        document = await cut_short(store, found, monkeypatch)
        entries = list(await store.history("wide", limit=10_000))
        for _ in range(2):  # two engines that read it before either wrote
            await store._housekeeping._spill([document])
        document = await found.orquestracoes.find_one({"correlation_id": "wide"})
        assert document["historico_anexos"] == []
        rest = len(entries) % writes.HISTORY_BLOCK
        assert [entry["seq"] for entry in document["historico"]] == [entry.seq for entry in entries[-rest:]]
        assert list(await store.history("wide", limit=10_000)) == entries


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


# -- other engines --------------------------------------------------------------------------------------------------


async def test_a_process_that_is_killed_leaves_every_run_whole(url: str) -> None:
    await survives_kills(MongoStore, url, kills=6)
