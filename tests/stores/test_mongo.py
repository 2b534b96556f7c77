"""The MongoDB store: the suite every store passes, its documents, its indexes and its retention."""

import asyncio
import json
from typing import Any

import pytest

from oraculo.core.events import Answered, Cancelled, Progressed, Repeated, Sent
from oraculo.core.run import RunStatus
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Storage
from oraculo.stores.mongo import MongoStore, documents, maintenance, queries
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
from tests.stores.mongo_stage import OF_RUNS, counts, database, end_abandoned, opened, wide_run

url, new_url, of_module = stage.url, stage.new_url, stage.of_module  # fixtures


class TestConformance(StoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    async def make_store(self) -> Storage:
        store = MongoStore(self.url)
        await store.start()
        return store


# -- the documents, as another application reads them ---------------------------------------------------------------


async def test_a_run_its_tasks_and_its_history_are_documents_in_the_words_of_the_api(url: str) -> None:
    async with opened(url) as store, database(url) as found:
        run = make_run("video-1", name="promotional-video", payload=b'{"produto":"x"}')
        await create(store, run)
        result = b'{ "arquivo" : "v.mp4" }'
        events = (Sent(0, 1, at=NOW + 1), Progressed(0, 40.0, "renderizando"), Answered(1, 1, result))
        await change(store, changed(run, *events, failure(2), now=NOW + 2))
        document = await found.orquestracoes.find_one({"_id": "video-1"})
        assert (document["status"], document["pipeline"]) == ("em_execucao", "promotional-video")
        assert document["resumo"]["concluidas"] == document["resumo"]["erros"] == 1
        of_run = {"correlation_id": "video-1"}
        first, second, third = await found.orquestracoes_tarefas.find(of_run).sort("numero").to_list()
        assert (first["id"], first["fila"], first["status"]) == ("escavador_a", "escavador_a", "em_execucao")
        assert first["progresso"] == {"percentual": 40.0, "mensagem": "renderizando"}
        assert (second["status"], second["resultado"]) == ("concluida", result.decode())
        assert json.loads(second["resultado"]) == {"arquivo": "v.mp4"}
        assert (third["status"], third["motivo"]) == ("erro", "broken")
        assert second["concluida_em"] > document["iniciada_em"]
        history = await found.orquestracoes_historico.find(of_run).sort("seq").to_list()
        assert history[0]["evento"] == "orquestracao_iniciada"
        assert history[-1]["tarefa"] == "executador_c"
        assert document["payload"] == '{"produto":"x"}'
        await create(store, make_run("large", payload=b'{"x":"%s"}' % (b"x" * 8_000)))
        assert (await found.orquestracoes_entradas.find_one({"correlation_id": "large"}))["payload"].startswith('{"x":')


async def test_a_run_may_be_many_times_larger_than_a_document(url: str) -> None:
    async with opened(url) as store:
        run = wide_run("large", 20)
        run.definition += b" " * 20_000_000
        await create(store, run)
        big = b'"%s"' % (b"x" * 1_000_000)
        await change(store, changed(run, *(Answered(number, 1, big) for number in range(20))))
        await assert_stored(store, run)


async def test_a_text_is_cut_between_documents_within_a_character(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "INLINE_BYTES", 0)
    monkeypatch.setattr(documents, "PART_BYTES", 4)
    async with opened(url) as store:
        run = make_run("a", payload='{"x":"ação 🙂"}'.encode())
        await create(store, run)
        await assert_stored(store, run)


async def test_a_result_that_no_document_holds_is_refused_with_what_to_do(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 100_000)
    async with opened(url) as store:
        await create(store, run := make_run("a"))
        answered = changed(run, Answered(0, 1, b'"%s"' % (b"x" * 100_000)))
        with pytest.raises(StoreError, match=r"run a would be \d+ bytes.*ORACULO_OBJECTS_URL") as refusal:
            await store.commit([], [answered])
        assert not isinstance(refusal.value, StoreUnavailable)


# -- indexes and order ----------------------------------------------------------------------------------------------


async def test_what_is_asked_often_uses_an_index_and_sorts_nothing(url: str) -> None:
    async with opened(url) as store, database(url) as found:
        await create(store, *(make_run(f"run-{n}", now=NOW + n) for n in range(20)))
        runs, tasks = found.orquestracoes, found.orquestracoes_tarefas
        asked = {
            "due runs": runs.find({"interno.due_at": {"$lte": NOW}}).sort("interno.due_at"),
            "due tasks": tasks.find({"interno.due_at": {"$lte": NOW}}).sort("interno.due_at"),
            "unsent": tasks.find(queries.unsent_behind("000-a", 1)).sort([("ordem", 1), ("numero", 1)]),
            "dead letters": tasks.find({**queries.RESTING, "interno.via": "x", "ordem": {"$gt": "0"}}).sort("ordem"),
            "load": tasks.find({"correlation_id": {"$in": ["a", "b"]}}).sort([("correlation_id", 1), ("numero", 1)]),
            "prunable": runs.find({"interno.ended_at": {"$lt": NOW}}).sort("interno.ended_at"),
            "by status": runs.find({"status": "erro"}).sort("ordem", -1),
            "by name": runs.find({"pipeline": "x"}).sort("ordem", -1),
        }
        for name, cursor in asked.items():
            plan = json.dumps((await cursor.explain())["queryPlanner"]["winningPlan"], default=str)
            assert "IXSCAN" in plan, (name, plan)
            assert "COLLSCAN" not in plan, (name, plan)
            assert '"SORT"' not in plan, (name, plan)


async def test_a_text_that_no_regular_expression_holds(url: str) -> None:
    async with opened(url) as store:
        await create(store, make_run("a"))
        for text in ("\0", "x" * 40_000, "a\0", "(?i)a", "^a$"):
            assert (await store.runs(RunQuery(text=text))).heads == []


# -- retention ------------------------------------------------------------------------------------------------------


async def test_nothing_of_a_pruned_run_is_left(url: str) -> None:
    async with opened(url) as store:
        runs = [make_run("a"), wide_run("b"), make_run("c", payload=b'{"x":"%s"}' % (b"x" * 50_000))]
        await create(store, *runs)
        await change(store, *(succeeded(run) for run in runs))
        assert await store.prune(NOW + 100, 10) == 3
    assert await counts(url) == dict.fromkeys(OF_RUNS, 0)


async def test_a_history_too_long_for_a_transaction_is_deleted_ahead_of_its_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "DELETED_TOGETHER", 20)
    async with opened(url) as store:
        runs = [make_run("a"), wide_run("long", 30), make_run("b")]
        await create(store, *runs)
        await change(store, *(changed(run, Cancelled(), now=NOW + n) for n, run in enumerate(runs, 1)))
        assert await store.prune(NOW + 100, 10) == 3
    assert await counts(url) == dict.fromkeys(OF_RUNS, 0)


async def test_pruning_while_the_runs_are_in_use(url: str) -> None:
    async with opened(url) as store, opened(url) as other:
        runs = [wide_run(f"w{n}", 20) if n % 2 else make_run(f"n{n}") for n in range(10)]
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


async def test_pruning_looks_again_at_a_run_that_was_opened_since(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url) as store:
        run = make_run("a")
        await create(store, run)
        await change(store, changed(run, Cancelled()))
        delete = maintenance.Maintenance._delete

        async def opened_before(*arguments: Any) -> int:
            await change(store, changed(run, Repeated()))
            return await delete(*arguments)

        monkeypatch.setattr(maintenance.Maintenance, "_delete", opened_before)
        assert await store.prune(NOW + 100, 10) == 0
        assert run.is_open
        await assert_stored(store, run)


# -- what was sent is forgotten -------------------------------------------------------------------------------------


async def test_an_engine_that_knows_nothing_of_it_does_not_undo_the_forgetting(url: str) -> None:
    async with opened(url) as store:
        run = make_run("a", destinos=[{"fila": "q", "id": f"t{n}"} for n in range(5)])
        await create(store, run)
        await change(store, changed(run, *(Sent(n, 1, via="redis") for n in range(5))))
        assert await store.forget_sent() == 5
        await change(store, changed(run, Progressed(0, 1.0, "on"), Answered(1, 1, OK)))
        assert [one.task for one in await store.unsent(10)] == [2, 3, 4]
        assert list(await store.held_by("redis", 10)) == ["a"]


async def test_forgetting_while_runs_change(url: str) -> None:
    async with opened(url) as store:
        runs = [make_run("a"), wide_run("b", 50)]
        await create(store, *runs)
        for number in range(10):
            commits = [changed(run, Sent(number % 3, 1, via="x"), Progressed(2, 1.0, str(number))) for run in runs]
            results = await asyncio.gather(store.commit([], commits), store.forget_sent())
            assert results[0].conflicts == frozenset()


# -- other engines --------------------------------------------------------------------------------------------------


async def test_runs_of_one_moment_are_listed_by_id_page_by_page(url: str) -> None:
    async with opened(url) as store:
        await store.commit([creation(make_run(name)) for name in ("run-5", "run-3", "run-9", "run-1")], [])
        first = await store.runs(RunQuery(limit=2))
        rest = await store.runs(RunQuery(limit=2, cursor=first.cursor))
        assert [head.id for head in (*first.heads, *rest.heads)] == ["run-9", "run-5", "run-3", "run-1"]


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.long)])
async def test_a_process_that_is_killed_leaves_every_run_whole(new_url: str, kills: int) -> None:
    await survives_kills(MongoStore, new_url, kills=kills)
    await end_abandoned(new_url)
