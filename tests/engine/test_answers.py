"""Answers of every kind: plain workers, repeats, strays and garbage. Nothing is lost and nothing loops."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from oraculo.core.machine import Verdict
from oraculo.core.run import Changes, Run
from oraculo.errors import StoreUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import DeadLetter
from oraculo.ports.store import Committed, Creation
from oraculo.ports.telemetry import AnswerTaken, DeadLettered
from oraculo.settings import RunSettings, Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from oraculo.wire.message import decode_message
from oraculo.worker import App
from tests.engine.broker_stage import QUICK, Told
from tests.engine.workers import answer
from tests.waiting import until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TWO = {"destinos": ["escavador_youtube", "escavador_blog"]}
DEEP = json.loads("[" * 127 + "]" * 127)


async def sent(oraculo: Harness, run_id: str) -> Run:
    """The run, once all its commands are out."""

    async def run() -> Run | None:
        found = await oraculo.operations.run(run_id)
        return found if all(task.status == "em_execucao" for task in found.tasks) else None

    return await until(run)


async def letters(oraculo: Harness, count: int, queue: str = "resultados") -> Sequence[DeadLetter]:
    async def all_are_there() -> Sequence[DeadLetter] | None:
        found = await oraculo.operations.dead_letters(queue)
        return found if len(found) >= count else None

    found = await until(all_are_there)
    assert len(found) == count
    return found


async def one_letter(oraculo: Harness, queue: str = "resultados") -> DeadLetter:
    return (await letters(oraculo, 1, queue))[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"tarefa": "escavador_youtube"},
        {"payload": {"fonte": "youtube"}},
        {"payload": {"destino": "escavador_youtube"}},
        {"payload": {"tarefa": "escavador_youtube"}},
        {"tarefa": "outra", "payload": {"fonte": "youtube"}},
    ],
)
async def test_a_plain_worker_is_a_full_citizen(fields: dict[str, Any]) -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO)
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id, **fields))

        async def done() -> bool:
            return (await oraculo.operations.run(run_id)).head.succeeded == 1

        await until(done)
        # The last one may even leave its name out: it is the only one awaited.
        await oraculo.publish("resultados", answer(run_id, payload={"resultado": "ok", "arquivo": "r.pdf"}))
        aggregate = await oraculo.ended(run_id)
    assert aggregate["status"] == "concluida"
    assert aggregate["resultados"]["escavador_youtube"] == fields.get("payload", {"status": "ok"})
    assert aggregate["resultados"]["escavador_blog"] == {"resultado": "ok", "arquivo": "r.pdf"}


async def test_the_log_of_a_dead_letter_names_its_run_when_the_message_does() -> None:
    bodies = [
        answer("c1", tipo_evento="outro"),
        answer("c2", timestamp="yesterday"),
        answer("c" * 129),
        b'{"correlation_id": ["c3"]}',
        b"no JSON",
    ]
    told = Told()
    async with Harness(telemetry=told) as oraculo:
        for body in bodies:
            await oraculo.publish("resultados", body)
        await until(lambda: len(told.of(DeadLettered)) == len(bodies), saying="the dead letters")
    buried = [record for record in told.records if isinstance(record, DeadLettered)]
    assert {letter.run_id for letter in buried} == {"c1", "c2", None}
    assert [letter.queue for letter in buried] == ["resultados"] * len(bodies)


async def test_an_answer_to_no_run_is_counted_as_unknown() -> None:
    told = Told()
    async with Harness(telemetry=told) as oraculo:
        await oraculo.publish("resultados", answer("nobody-knows-it"))
        await one_letter(oraculo)
    assert told.of(AnswerTaken) == [AnswerTaken("nobody-knows-it", "unknown", "resultado_coleta")]


async def test_an_answer_to_no_run_is_counted_once_however_often_the_store_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, failures, commit = Told(), [StoreUnavailable("away")] * 2, SqliteStore.commit

    async def fails(store: SqliteStore, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        if failures:
            raise failures.pop()
        return await commit(store, creations, changes)

    async with Harness(telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_blog"]})
        await sent(oraculo, run_id)
        monkeypatch.setattr(SqliteStore, "commit", fails)
        await publish_all(
            oraculo.broker,
            [
                Outgoing("resultados", json.dumps(body).encode())
                for body in (answer("nobody-knows-it"), answer(run_id, tarefa="escavador_blog"))
            ],
        )
        await oraculo.ended(run_id)
        await one_letter(oraculo)
    assert not failures
    assert [record.run_id for record in told.records if isinstance(record, AnswerTaken)].count("nobody-knows-it") == 1


async def test_an_answer_that_fits_two_tasks_rests_in_the_dlq_and_says_which_were_open() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO)
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id))
        letter = await one_letter(oraculo)
        assert "escavador_youtube" in letter.reason
        assert "escavador_blog" in letter.reason
        assert (await oraculo.operations.run(run_id)).head.succeeded == 0
        history = await oraculo.operations.history(run_id)
        assert [entry.detail for entry in history if entry.what == "resposta_recusada"] == [letter.reason]
        assert f"; an answer was refused ({letter.reason}; see resultados.dlq)" in await oraculo.operations.explain(
            run_id
        )
        await oraculo.publish("resultados", answer(run_id))
        await letters(oraculo, 2)
        assert "; answers were refused, the last of them (no task of run" in await oraculo.operations.explain(run_id)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xff\xfe not utf-8", "UTF-8"),
        (b"", "JSON"),
        (b"not json", "JSON"),
        (b"[]", "object"),
        (b"{}", "correlation_id"),
        (b'{"correlation_id": "x", "tipo_evento": "resultado_coleta", "payload": {}}', "timestamp"),
        (
            b'{"correlation_id":"x","tipo_evento":"resultado_coleta","payload":[],"timestamp":"2026-01-01T00:00:00Z"}',
            "payload",
        ),
        (b'{"correlation_id":"x","tipo_evento":"resultado_coleta","payload":{},"timestamp":"ontem"}', "timestamp"),
        (
            b'{"correlation_id":"x","tipo_evento":"outro","payload":{},"timestamp":"2026-01-01T00:00:00Z"}',
            "tipo_evento",
        ),
        (
            b'{"correlation_id":"x","tipo_evento":"resultado_coleta","payload":{},"timestamp":"2026-01-01T00:00:00Z"}',
            "no run",
        ),
        (b"[" * 20_000 + b"]" * 20_000, "nested"),
        (b'{"correlation_id":"a\\u0000b"}', "NUL"),
    ],
)
@pytest.mark.parametrize("queue", ["resultados", "orquestrador"])
async def test_garbage_rests_in_the_dlq_with_a_reason(queue: str, body: bytes, reason: str) -> None:
    if queue == "orquestrador" and reason == "no run":
        reason = "tipo_evento"
    async with Harness() as oraculo:
        await oraculo.publish(queue, body)
        letter = await one_letter(oraculo, queue)
        assert reason in letter.reason
        assert letter.body == body
        states = {state.queue: state for state in await oraculo.operations.queues()}
        assert (states[queue].ready, states[queue].unacked) == (0, 0)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({}, "payload.destinos: exactly one of"),
        ({"pipeline": "promotional-video-ful"}, "payload.pipeline: there is no pipeline 'promotional-video-ful'; did"),
        ({"destinos": []}, "payload.destinos: is empty"),
        ({"destinos": ["a"], "payload": []}, "payload.payload: expected `object`, got `array`"),
        ({"destinos": ["a"], "payload": {"a": "x" * 1024**2}}, "payload.payload: 1048584 bytes, over the limit"),
        ({"destinos": ["a"], "payload": {"a": DEEP}}, "payload: nested deeper than 128 levels"),
        ({"destinos": ["a"], "correlation_id": "outro"}, "payload.correlation_id: differs"),
        ({"destinos": ["a"], "correlation_id": ".."}, "payload.correlation_id: must not be '.'"),
    ],
)
async def test_a_bad_request_by_the_queue_rests_in_its_dlq(payload: dict[str, Any], reason: str) -> None:
    async with Harness() as oraculo:
        message = answer("r1", tipo_evento="iniciar_orquestracao", payload=payload)
        await oraculo.publish("orquestrador", message)
        assert (await one_letter(oraculo, "orquestrador")).reason.startswith(reason)
        assert await oraculo.store.load(["r1"]) == {}


@pytest.mark.parametrize(
    ("told", "handed_on"), [(TRACE, TRACE), ("not a trace", None), (f"{TRACE}-{'x' * 1000}", None)]
)
async def test_a_broken_trace_of_a_request_by_the_queue_is_ignored(told: str, handed_on: str | None) -> None:
    async with Harness() as oraculo:
        request = {"tipo_evento": "iniciar_orquestracao", "payload": {"destinos": ["escavador_a"]}, "traceparent": told}
        await oraculo.publish("orquestrador", answer("r1", **request))
        consumer = await oraculo.broker.consume("escavador_a", prefetch=1)
        [command] = await consumer.take(1)
        assert decode_message(command.body).traceparent == handed_on


async def test_progress_of_an_attempt_that_failed_is_not_shown_as_the_next_ones() -> None:
    told = Told()
    async with Harness(settings=QUICK, telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id, tentativa=1, payload={"erros": ["x"]}))
        await until(lambda: AnswerTaken(run_id, Verdict.APPLIED, "resultado_coleta") in told.records)
        assert (await sent(oraculo, run_id)).tasks[0].attempt == 2
        progress = {"tipo_evento": "progresso", "payload": {"percentual": 90}}
        await oraculo.publish("resultados", answer(run_id, tentativa=1, **progress))
        await until(lambda: AnswerTaken(run_id, Verdict.LATE, "progresso") in told.records)
        assert "90 %" not in await oraculo.operations.explain(run_id)
        assert await oraculo.operations.dead_letters("resultados") == []


async def test_a_request_whose_message_has_an_id_that_none_may_have_is_told_so() -> None:
    async with Harness() as oraculo:
        message = answer("..", tipo_evento="iniciar_orquestracao", payload={"destinos": ["a"]})
        await oraculo.publish("orquestrador", message)
        assert (await one_letter(oraculo, "orquestrador")).reason.startswith("correlation_id: must not be '.'")


async def test_a_bad_answer_that_names_a_run_is_explained_there() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO | {"timeout": 0.5})
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id, tarefa="escavador_blog", tentativa="1"))
        letter = await one_letter(oraculo)
        assert letter.reason.startswith("tentativa: expected `int")
        told = f"; an answer was refused ({letter.reason}; see resultados.dlq)"
        assert told in await oraculo.operations.explain(run_id)
        await oraculo.ended(run_id)
        assert told in await oraculo.operations.explain(run_id)  # nothing came in time, as far as the run knows


async def test_a_refused_answer_is_a_reason_only_while_its_task_waits() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO | {"timeout": 30})
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id, tarefa="escavador_blog", payload=[1]))
        await one_letter(oraculo)
        assert "an answer was refused" in await oraculo.operations.explain(run_id)
        await oraculo.publish("resultados", answer(run_id, tarefa="escavador_blog"))

        async def blog_is_done() -> bool:
            return (await oraculo.operations.run(run_id)).tasks[1].status == "concluida"

        await until(blog_is_done)
        assert "refused" not in await oraculo.operations.explain(run_id)
        [refusal] = [entry for entry in await oraculo.operations.history(run_id) if entry.what == "resposta_recusada"]
        assert refusal.task == 1


async def test_what_was_refused_before_a_run_was_repeated_is_history() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_blog"], "timeout": 0.3})
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id, payload=[1]))
        await oraculo.ended(run_id)
        assert "an answer was refused" in await oraculo.operations.explain(run_id)
        await oraculo.operations.repeat(run_id)
        assert "refused" not in await oraculo.operations.explain(run_id)


@pytest.mark.parametrize(("inside", "reason"), [(b"\\u0000", "holds a NUL"), (b"\xe7", "not UTF-8: byte")])
async def test_so_is_one_that_most_cannot_read(inside: bytes, reason: str) -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO)
        await sent(oraculo, run_id)
        message = answer(run_id, tarefa="escavador_blog", payload={"texto": "INSIDE"})
        await oraculo.publish("resultados", json.dumps(message).encode().replace(b"INSIDE", inside))
        letter = await one_letter(oraculo)
        assert letter.reason.startswith(reason)
        assert f"; an answer was refused ({letter.reason}" in await oraculo.operations.explain(run_id)


async def test_a_worker_gone_mad_does_not_fill_the_history_with_refused_answers() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO)
        await sent(oraculo, run_id)
        for _ in range(1000):
            await oraculo.publish("resultados", answer(run_id))
        await oraculo.publish("resultados", answer(run_id, tipo_evento="progresso", tarefa="escavador_blog"))

        async def progress() -> list[int]:
            entries = await oraculo.operations.history(run_id)
            return [entry.seq for entry in entries if entry.what == "progresso"]

        assert await until(progress) == [601]


async def test_progress_that_fits_no_task_is_not_told_as_an_answer() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO)
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id, tipo_evento="progresso"))
        await one_letter(oraculo)
        assert "refused" not in await oraculo.operations.explain(run_id)


async def test_an_answer_of_the_wrong_kind_is_told_the_right_one() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a", "executador_b"]})
        await sent(oraculo, run_id)
        await oraculo.publish("resultados", answer(run_id, tipo_evento="resultado_coleta"))
        assert "open tasks answer with resultado_execucao" in (await one_letter(oraculo)).reason


async def test_the_same_request_twice_by_the_queue_is_one_run() -> None:
    async with Harness() as oraculo:
        message = answer("r1", tipo_evento="iniciar_orquestracao", payload={"destinos": ["escavador_a"]})
        for _ in range(3):
            await oraculo.publish("orquestrador", message)
        other = answer("r1", tipo_evento="iniciar_orquestracao", payload={"destinos": ["escavador_b"]})
        await oraculo.publish("orquestrador", other)
        assert "another run's already" in (await one_letter(oraculo, "orquestrador")).reason
        (state,) = await oraculo.broker.queues(["escavador_a"])
        assert state.ready == 1


async def test_repeated_and_late_answers_are_counted_and_change_nothing() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_youtube"]})
        await sent(oraculo, run_id)
        for number in range(5):
            message = answer(run_id, tarefa="escavador_youtube", payload={"status": "ok", "dados": number})
            await oraculo.publish("resultados", message)

        async def repeats() -> bool:
            return (await oraculo.operations.run(run_id)).head.duplicates == 4

        await until(repeats)
        aggregate = await oraculo.ended(run_id)
        told = [entry.what for entry in await oraculo.operations.history(run_id)]
    assert aggregate["resultados"]["escavador_youtube"]["dados"] == 0
    assert aggregate["versao"] == 1
    assert told.count("resposta_repetida") == 4


async def test_progress_is_seen_in_the_run_and_in_its_history() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit(TWO)
        await sent(oraculo, run_id)
        progress = {"percentual": 40, "mensagem": "na metade"}
        await oraculo.publish(
            "resultados", answer(run_id, tipo_evento="progresso", tarefa="escavador_blog", payload=progress)
        )

        async def percent() -> float | None:
            return (await oraculo.operations.run(run_id)).tasks[1].percent

        assert await until(percent) == 40
        entries = await oraculo.operations.history(run_id)
        assert entries[-1].detail == "40 % na metade"
        assert "40 % done" in await oraculo.operations.explain(run_id)


async def test_payloads_come_out_exactly_as_they_went_in() -> None:
    raw = (
        b'{"status" : "ok", "dados":{"n":12345678901234567890123,"f":1.10,"u":"\\u00e9\xc3\xa9","e":[],"d":{"a":null}}}'
    )
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_youtube"]})
        await sent(oraculo, run_id)
        head = answer(run_id)
        body = b'{"correlation_id":"%s","tipo_evento":"resultado_coleta","timestamp":"%s","payload":%s}'
        await oraculo.publish("resultados", body % (run_id.encode(), head["timestamp"].encode(), raw))
        aggregate = await oraculo.operations.wait(run_id, 10)
    assert aggregate is not None
    assert raw in aggregate


async def test_a_step_that_fails_in_the_batch_that_began_it_leaves_a_dead_letter_and_no_command() -> None:
    steps = [{"type": "a", "queue": "q-a"}, {"type": "b", "queue": "q-b", "dependsOn": ["a"]}]
    async with Harness() as oraculo:
        await oraculo.operations.put_pipeline("p", json.dumps({"name": "p", "steps": steps}).encode())
        run_id = await oraculo.submit({"pipeline": "p"})
        command, *_ = await (await oraculo.broker.consume("q-a", prefetch=1)).take(1)
        assert json.loads(command.body)["tarefa"] == "a"
        failure = {"status": "erro", "erros": ["x"], "repetir": False}
        answers = [
            answer(run_id, tarefa="a", tipo_evento="resultado_execucao"),
            answer(run_id, tarefa="b", tipo_evento="resultado_execucao", payload=failure),
        ]
        await publish_all(oraculo.broker, [Outgoing("resultados", json.dumps(one).encode()) for one in answers])
        assert (await oraculo.ended(run_id))["status"] == "erro"
        await one_letter(oraculo, "q-b")
        (state,) = await oraculo.broker.queues(["q-b"])
        assert (state.ready, state.unacked, state.dead_letters) == (0, 0, 1)


@pytest.mark.parametrize(
    ("returned", "attempts"),
    [
        ({"status": "erro", "erros": ["sem estoque"]}, 2),
        ({"erros": ["sem estoque"]}, 2),
        ({"status": "erro", "erros": ["sem estoque"], "repetir": False}, 1),
    ],
)
async def test_a_handler_that_returns_a_failure_has_failed(returned: dict[str, Any], attempts: int) -> None:
    app = App("returns")
    app.executador("x")(lambda payload: returned)
    settings = Settings(runs=RunSettings(max_attempts=2, backoff=0.01))
    async with Harness(app, settings=settings) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_x"]})
        assert aggregate["status"] == "erro"
        assert aggregate["falhas"] == {
            "executador_x": {"status": "erro", "motivo": "sem estoque", "tentativas": attempts}
        }
        await letters(oraculo, 1, "executador_x")
