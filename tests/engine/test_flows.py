"""Every way to ask for a run, end to end in one process: through the API's door and through the queue."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from oraculo.errors import Conflict, IdempotencyKeyReused, InvalidInput
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import BatchCommitted, RunFinished
from oraculo.settings import BrokerSettings, RunSettings, Settings
from oraculo.testing.harness import Harness
from oraculo.wire.message import decode_message
from oraculo.worker import App, Client
from tests.engine.broker_stage import Told
from tests.engine.workers import VIDEO_QUEUES, Journal, answer, failing_app, recording_app
from tests.video_pipelines import VIDEO_PIPELINES
from tests.waiting import until

SOURCES = ("escavador_youtube", "escavador_blog", "executador_relatorio")
FAST_RETRY = Settings(runs=RunSettings(backoff=0.01))
THE_THREE_REQUESTS = [
    {"destinos": list(SOURCES), "payload": {"fonte": "x"}, "timeout": 30},
    {"tipo": "coleta_completa", "payload": {}},
    {"pipeline": "promotional-video-full", "payload": {"produto": "tênis"}},
]
PIPELINES = VIDEO_PIPELINES | {"coleta-execucao": list(SOURCES)}


def everyone(journal: Journal | None = None, pause: float = 0.0) -> App:
    return recording_app(journal or Journal(), (*SOURCES, *VIDEO_QUEUES), pause=pause)


def assert_whole(aggregate: dict[str, Any]) -> None:
    assert aggregate["status"] == "concluida"
    assert aggregate["versao"] == 1
    total = aggregate["resumo"]["total"]
    assert aggregate["resumo"] == {
        "total": total,
        "concluidas": total,
        "erros": 0,
        "timeouts": 0,
        "ignoradas": 0,
        "canceladas": 0,
    }
    assert len(aggregate["resultados"]) == total
    assert aggregate["falhas"] == {}
    assert aggregate["duracao_ms"] >= 0


@pytest.mark.parametrize("request_body", THE_THREE_REQUESTS)
async def test_the_three_requests_by_the_door(request_body: dict[str, Any]) -> None:
    async with Harness(everyone()) as oraculo:
        assert_whole(await oraculo.run(request_body))


@pytest.mark.parametrize("request_body", THE_THREE_REQUESTS)
async def test_the_three_requests_by_the_queue(request_body: dict[str, Any]) -> None:
    async with Harness(everyone()) as oraculo, Client(oraculo.broker) as client:
        aggregate = await client.run(request_body, timeout=30)
        assert_whole(aggregate)
        assert (await oraculo.operations.run(aggregate["correlation_id"])).head.status == "concluida"


@pytest.mark.parametrize(("name", "steps"), PIPELINES.items())
async def test_built_in_pipelines_respect_dependencies_and_overlap_the_rest(name: str, steps: list[str]) -> None:
    journal = Journal()
    async with Harness(everyone(journal, pause=0.05)) as oraculo:
        aggregate = await oraculo.run({"pipeline": name, "payload": {"produto": "tênis"}})
        definition, _ = oraculo.operations.pipeline(name)
    assert_whole(aggregate)
    assert sorted(aggregate["resultados"]) == sorted(steps)
    for step in definition.steps:
        for before in step.depends_on:
            assert journal.position("end", before) < journal.position("start", step.id)
    roots = [step.id for step in definition.steps if not step.depends_on]
    started = [journal.position("start", root) for root in roots]
    assert max(started) < min(journal.position("end", root) for root in roots)


async def test_a_step_receives_config_entry_and_the_results_it_depends_on() -> None:
    journal = Journal()
    async with Harness(everyone(journal)) as oraculo:
        aggregate = await oraculo.run({"pipeline": "coleta-execucao", "payload": {"parametros": {"canal": "c"}}})
    collect = aggregate["resultados"]["escavador_youtube"]["dados"]["recebido"]
    assert collect["fonte"] == "youtube"
    assert collect["parametros"]["canal"] == "c"
    assert collect["entrada"] == {"parametros": {"canal": "c"}}
    execute = aggregate["resultados"]["executador_relatorio"]["resultado"]["recebido"]
    assert execute["resultados"]["escavador_blog"] == aggregate["resultados"]["escavador_blog"]
    assert sorted(execute["resultados"]) == ["escavador_blog", "escavador_youtube"]


async def test_each_destination_gets_the_payload_as_it_is_or_its_own() -> None:
    async with Harness(everyone()) as oraculo:
        aggregate = await oraculo.run(
            {
                "destinos": [
                    "escavador_blog",
                    {"id": "um", "fila": "escavador_youtube", "payload": {"n": 1}},
                    {"id": "dois", "fila": "escavador_youtube", "payload": {"n": 2}},
                ],
                "payload": {"n": 0},
            }
        )
    received = {name: result["dados"]["recebido"]["n"] for name, result in aggregate["resultados"].items()}
    assert received == {"escavador_blog": 0, "um": 1, "dois": 2}


async def test_only_new_runs_are_counted_as_started() -> None:
    told = Told()
    body = json.dumps({"destinos": ["escavador_youtube"], "correlation_id": "um"}).encode()
    async with Harness(telemetry=told) as oraculo:
        for _ in range(2):
            await oraculo.operations.submit(body, idempotency_key="k")
        with pytest.raises(Conflict):
            await oraculo.operations.submit(body)
        with pytest.raises(IdempotencyKeyReused):
            await oraculo.operations.submit(b'{"destinos": ["escavador_blog"]}', idempotency_key="k")
    assert sum(record.created for record in told.records if isinstance(record, BatchCommitted)) == 1


async def test_a_destination_nobody_serves_times_out_without_blocking_the_others() -> None:
    async with Harness(everyone()) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_youtube", "escavador_ninguem"], "timeout": 0.5})

        async def one_left() -> bool:
            head = (await oraculo.operations.run(run_id)).head
            return head.succeeded == 1 and head.status == "em_execucao"

        await until(one_left)
        sentence = await oraculo.operations.explain(run_id)
        assert "escavador_ninguem" in sentence
        assert "nobody listens on queue escavador_ninguem" in sentence
        aggregate = await oraculo.ended(run_id)
    assert aggregate["status"] == "parcial"
    assert list(aggregate["resultados"]) == ["escavador_youtube"]
    assert aggregate["falhas"] == {
        "escavador_ninguem": {"status": "timeout", "motivo": "no answer in 0.5 s", "tentativas": 1}
    }
    assert aggregate["duracao_ms"] >= 500


async def test_a_destination_with_its_own_deadline_ends_before_the_run_does() -> None:
    async with Harness(everyone()) as oraculo:
        request = {"destinos": [{"fila": "escavador_ninguem", "timeout": 0.2}, "escavador_blog"], "timeout": 60}
        aggregate = await oraculo.run(request)
    assert aggregate["status"] == "parcial"
    assert aggregate["falhas"]["escavador_ninguem"]["motivo"] == "no answer in 0.2 s"
    assert aggregate["duracao_ms"] < 10_000


async def test_a_worker_that_fails_twice_succeeds_at_the_third_attempt() -> None:
    journal = Journal()
    async with Harness(failing_app("executador_x", failures=2, journal=journal), settings=FAST_RETRY) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})
        aggregate = await oraculo.ended(run_id)
        task = (await oraculo.operations.run(run_id)).tasks[0]
        told = [entry.what for entry in await oraculo.operations.history(run_id)]
    assert aggregate["status"] == "concluida"
    assert task.attempt == 3
    assert [context.tentativa for context in journal.seen] == [1, 2, 3]
    assert told.count("tentativa_falhou") == 2
    assert told.count("tarefa_enviada") == 3


async def test_one_that_always_fails_rests_in_the_dlq_and_a_redrive_completes_its_run() -> None:
    app = failing_app("executador_x", failures=None)
    async with Harness(app, everyone(), settings=FAST_RETRY) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x", "escavador_blog"]})
        first = await oraculo.ended(run_id)
        assert first["status"] == "parcial"
        assert first["falhas"]["executador_x"]["tentativas"] == 3
        assert "broken at attempt 3" in first["falhas"]["executador_x"]["motivo"]

        (letter,) = await until(lambda: oraculo.operations.dead_letters("executador_x"))
        assert "broken at attempt 3" in letter.reason
        command = decode_message(letter.body)
        assert (command.correlation_id, command.tarefa, command.tentativa) == (run_id, "executador_x", 3)

        app.broken = False  # type: ignore[attr-defined]
        assert (await oraculo.operations.redrive("executador_x")).reopened == 1
        second = await oraculo.ended(run_id)
        assert second["status"] == "concluida"
        assert second["versao"] == 2
        assert second["resultados"]["escavador_blog"] == first["resultados"]["escavador_blog"]
        assert not await oraculo.operations.dead_letters("executador_x")
        assert (await oraculo.operations.run(run_id)).tasks[0].attempt == 4


async def test_a_redrive_leaves_nothing_of_a_command_that_lies_twice_in_the_dlq() -> None:
    """Dead letters are sent at least once: again after a crash, and when a broker seems to have lost its memory."""
    app = failing_app("executador_x", failures=None, for_good=True)
    async with Harness(app, settings=FAST_RETRY) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})
        (letter,) = await until(lambda: oraculo.operations.dead_letters("executador_x"))
        await publish_all(oraculo.broker, [Outgoing("executador_x", letter.body, reason=letter.reason)])

        app.broken = False  # type: ignore[attr-defined]
        done = await oraculo.operations.redrive("executador_x")
        assert (done.moved, done.reopened, done.obsolete) == (0, 1, 1)
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        assert not await oraculo.operations.dead_letters("executador_x")


async def test_a_redrive_of_the_command_of_an_earlier_attempt_opens_nothing() -> None:
    async with Harness(failing_app("executador_x", failures=None), settings=FAST_RETRY) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})
        ended = await oraculo.ended(run_id)
        (last,) = await until(lambda: oraculo.operations.dead_letters("executador_x"))
        first = json.dumps(json.loads(last.body) | {"tentativa": 1}).encode()
        await publish_all(oraculo.broker, [Outgoing("executador_x", first, reason="put here by hand")])
        _, letter = await oraculo.operations.dead_letters("executador_x")
        done = await oraculo.operations.redrive("executador_x", [letter.id])
        assert (done.moved, done.reopened, done.obsolete) == (0, 0, 1)
        assert await oraculo.ended(run_id) == ended


async def test_a_redrive_puts_back_what_an_open_task_waits_for_and_what_no_task_does() -> None:
    """As when a worker without the SDK rejects its command: the task is as open as it was."""
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})
        consumer = await oraculo.broker.consume("executador_x", prefetch=3)
        (command,) = await consumer.take(1)
        await consumer.dead_letter(command, "not here")
        unknown = json.dumps(answer(run_id, tipo_evento="iniciar_execucao", tarefa="nenhuma", tentativa=1)).encode()
        await publish_all(oraculo.broker, [Outgoing("executador_x", unknown, reason="no such task")])

        done = await oraculo.operations.redrive("executador_x")
        assert (done.moved, done.reopened, done.obsolete) == (2, 0, 0)
        async with asyncio.timeout(5):
            assert [(await consumer.take(1))[0].body for _ in range(2)] == [command.body, unknown]


async def test_an_error_that_says_do_not_retry_is_not_retried() -> None:
    journal = Journal()
    app = failing_app("executador_x", failures=None, journal=journal, for_good=True)
    async with Harness(app, settings=FAST_RETRY) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_x"]})
    assert aggregate["status"] == "erro"
    assert aggregate["falhas"]["executador_x"]["tentativas"] == 1
    assert len(journal.seen) == 1


async def test_repetir_runs_again_only_what_failed() -> None:
    journal = Journal()
    app = failing_app("executador_x", failures=None)
    async with Harness(app, everyone(journal), settings=FAST_RETRY) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x", "escavador_blog"]})
        await oraculo.ended(run_id)
        app.broken = False  # type: ignore[attr-defined]
        await oraculo.operations.repeat(run_id)
        aggregate = await oraculo.ended(run_id)
    assert aggregate["status"] == "concluida"
    assert aggregate["versao"] == 2
    assert journal.lines.count(("start", "escavador_blog")) == 1


async def test_repetir_of_a_run_that_met_its_quorum_is_refused_in_words_that_name_it() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x", "escavador_blog"], "quorum": 1})
        failure = {"status": "erro", "repetir": False}
        await oraculo.publish("resultados", answer(run_id, tarefa="executador_x", payload=failure))
        await oraculo.publish("resultados", answer(run_id, tarefa="escavador_blog"))
        aggregate = await oraculo.ended(run_id)
        assert aggregate["falhas"]["executador_x"]["status"] == "erro"
        with pytest.raises(Conflict, match=f"run {run_id} has met its quorum of 1; .* can be redriven"):
            await oraculo.operations.repeat(run_id)
        assert await oraculo.ended(run_id) == aggregate


async def test_cancel_ends_the_run_and_what_comes_later_is_late() -> None:
    async with Harness(everyone(pause=0.2)) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_blog", "escavador_ninguem"]})
        await oraculo.operations.cancel(run_id)
        aggregate = await oraculo.ended(run_id)
        assert aggregate["status"] == "cancelada"
        assert aggregate["resumo"]["canceladas"] == 2

        async def late() -> int:
            return (await oraculo.operations.run(run_id)).head.late

        assert await until(late) == 1
        assert (await oraculo.ended(run_id)) == aggregate


async def test_a_run_during_which_the_clock_was_set_back_took_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    async with Harness(telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["ninguem"]})
        monkeypatch.setattr(SystemClock, "now", lambda _self: time.time() - 600)
        await oraculo.operations.cancel(run_id)
        assert [record.seconds for record in told.of(RunFinished)] == [0.0]  # type: ignore[attr-defined]


async def test_a_quorum_ends_the_run_and_cancels_the_rest() -> None:
    async with Harness(everyone()) as oraculo:
        aggregate = await oraculo.run(
            {"destinos": ["escavador_blog", "escavador_youtube", "escavador_ninguem"], "quorum": 2}
        )
    assert aggregate["status"] == "parcial"
    assert aggregate["resumo"]["concluidas"] == 2
    assert aggregate["falhas"]["escavador_ninguem"]["status"] == "cancelada"


async def test_a_late_answer_amends_the_aggregate_where_the_pipeline_asks_for_it() -> None:
    pipeline = {"name": "tardio", "timeout": 0.2, "onLate": "amend", "steps": [{"type": "escavador_lento"}]}
    async with Harness() as oraculo:
        await oraculo.operations.put_pipeline("tardio", json.dumps(pipeline).encode())
        aggregate = await oraculo.run({"pipeline": "tardio"})
        assert aggregate["status"] == "timeout"
        run_id = aggregate["correlation_id"]
        await oraculo.publish(
            "resultados", answer(run_id, tarefa="escavador_lento", payload={"status": "ok", "dados": 7})
        )

        async def amended() -> bool:
            return (await oraculo.operations.run(run_id)).head.edition == 2

        await until(amended)
        second = await oraculo.ended(run_id)
    assert second["status"] == "concluida"
    assert second["versao"] == 2
    assert second["resultados"] == {"escavador_lento": {"status": "ok", "dados": 7}}


async def test_a_pipeline_has_the_timeout_of_the_settings_however_it_came(tmp_path: Path) -> None:
    pipeline = {"steps": [{"type": "A", "queue": "executador_x"}]}
    (tmp_path / "p.json").write_text(json.dumps({"name": "pasta", **pipeline}))
    async with Harness(settings=Settings(runs=RunSettings(timeout=7), pipelines=str(tmp_path))) as oraculo:
        await oraculo.operations.put_pipeline("api", json.dumps(pipeline).encode())
        for request in ({"pipeline": "pasta"}, {"pipeline": "api"}, {"destinos": ["executador_x"]}):
            run = await oraculo.operations.run(await oraculo.submit(request))
            assert run.head.timeout == 7.0, request


async def test_priority_overtakes() -> None:
    journal = Journal()
    async with Harness() as oraculo:
        for name, priority in (("baixa", 0), ("alta", 9)):
            await oraculo.submit({"destinos": [{"id": name, "fila": "executador_x"}], "prioridade": priority})

        async def both_waiting() -> bool:
            return any(
                state.queue == "executador_x" and state.ready == 2 for state in await oraculo.operations.queues()
            )

        await until(both_waiting)
        app = recording_app(journal, ("executador_x",))
        worker = Harness(app, broker=oraculo.broker).workers[0]
        await worker.start()
        await until(lambda: len(journal.lines) == 4)
        await worker.stop()
    assert journal.position("start", "alta") < journal.position("start", "baixa")


async def test_a_prefix_stands_before_every_queue() -> None:
    settings = Settings(broker=BrokerSettings(prefix="loja."))
    async with Harness(everyone(), settings=settings) as oraculo, Client(oraculo.broker, prefix="loja.") as client:
        assert_whole(await client.run({"tipo": "coleta_completa"}, timeout=30))
        names = {state.queue for state in await oraculo.broker.queues()}
    assert {"loja.orquestrador", "loja.resultados", "loja.escavador_blog"} <= names
    assert all(name.startswith("loja.") for name in names)


async def test_many_runs_at_once_each_get_their_own_answers() -> None:
    async with Harness(everyone()) as oraculo:
        requests = [{"destinos": list(SOURCES), "payload": {"n": n}} for n in range(200)]
        aggregates = await asyncio.gather(*(oraculo.run(request) for request in requests))
    for number, aggregate in enumerate(aggregates):
        assert_whole(aggregate)
        assert aggregate["resultados"]["escavador_blog"]["dados"]["recebido"] == {"n": number}


async def test_a_worker_that_cannot_start_leaves_no_engine_behind() -> None:
    before = asyncio.all_tasks()
    with pytest.raises(InvalidInput, match="has no handlers"):
        async with Harness(App("empty")):
            pass
    await until(lambda: asyncio.all_tasks() == before)
