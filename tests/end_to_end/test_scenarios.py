"""What the product does, on each real broker: the same meaning everywhere."""

import asyncio
import json
from pathlib import Path

import pytest

from oraculo.settings import Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.checkers import check_store
from oraculo.wire.timestamps import to_iso
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import VIDEO_QUEUES, Journal, answer, failing_app, recording_app
from tests.servers.fleet import BROKERS, Fleet
from tests.waiting import until


@pytest.fixture(params=BROKERS)
def settings(request: pytest.FixtureRequest, fleet: Fleet) -> Settings:
    return settings_for(fleet.url(request.param))


async def test_a_fan_out_is_gathered(settings: Settings) -> None:
    journal = Journal()
    async with Stage(settings, recording_app(journal, ("escavador_a", "escavador_b", "executador_c"))) as oraculo:
        aggregate = await oraculo.run({"destinos": ["escavador_a", "escavador_b", "executador_c"], "payload": {"n": 1}})
    assert (aggregate["status"], aggregate["versao"]) == ("concluida", 1)
    answers = [one.get("dados") or one["resultado"] for one in aggregate["resultados"].values()]
    assert sorted(one["tarefa"] for one in answers) == ["escavador_a", "escavador_b", "executador_c"]
    assert all(one["recebido"] == {"n": 1} for one in answers)


async def test_a_pipeline_keeps_its_order(settings: Settings) -> None:
    journal = Journal()
    async with Stage(settings, recording_app(journal, VIDEO_QUEUES)) as oraculo:
        aggregate = await oraculo.run({"pipeline": "promotional-video-full", "payload": {"produto": "café"}})
    assert aggregate["status"] == "concluida"
    video = journal.position("start", "PROMOTIONAL_VIDEO")
    for before in ("ENHANCED_IMAGES", "VIRAL_COPY", "VOICE_OVER", "CAPTIONS"):
        assert journal.position("end", before) < video


async def test_a_wide_run_is_answered_once_each(settings: Settings) -> None:
    wide = [{"id": f"t{n}", "fila": "executador_x"} for n in range(500)]
    async with Stage(settings, recording_app(Journal(), ("executador_x",))) as oraculo:
        aggregate = await oraculo.run({"destinos": wide, "payload": {}})
    assert aggregate["resumo"] == {
        "total": 500, "concluidas": 500, "erros": 0, "timeouts": 0, "ignoradas": 0, "canceladas": 0
    }  # fmt: skip


async def test_a_failure_is_tried_again(settings: Settings) -> None:
    journal = Journal()
    async with Stage(settings, failing_app("executador_x", failures=2, journal=journal)) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_x"], "payload": {}})
    assert aggregate["status"] == "concluida"
    assert [context.tentativa for context in journal.seen] == [1, 2, 3]


async def test_what_failed_for_good_rests_with_its_reason_and_is_redriven(settings: Settings) -> None:
    app = failing_app("executador_x", failures=None)
    async with Stage(settings, app) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_x"], "payload": {}})
        run_id = aggregate["correlation_id"]
        assert aggregate["status"] == "erro"
        letters = await until(lambda: oraculo.operations.dead_letters("executador_x", limit=10), saying="a dead letter")
        assert "broken at attempt 3" in letters[0].reason
        assert json.loads(letters[0].body)["correlation_id"] == run_id
        app.broken = False  # type: ignore[attr-defined]
        redrive = await oraculo.operations.redrive("executador_x")
        assert redrive.reopened == 1

        async def mended() -> bool:
            again = await oraculo.ended(run_id)
            return (again["status"], again["versao"]) == ("concluida", 2)

        await until(mended, saying="the run to end well")
        assert list(await oraculo.operations.dead_letters("executador_x", limit=10)) == []


async def test_a_command_that_rests_while_its_run_waits_is_told_of(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On RabbitMQ it cannot be looked for without taking the dead letters from others meanwhile."""
    monkeypatch.setattr("oraculo.core.explain._SLOW", 0.0)
    async with Stage(settings) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"], "payload": {}, "timeout": 60})
        consumer = await oraculo.broker.consume(oraculo.engine.parts.queues.names.physical("executador_x"), prefetch=1)
        [command] = await consumer.take(1)
        await consumer.dead_letter(command, "delivered too often")

        async def is_told() -> bool:
            told = await oraculo.operations.explain(run_id)
            return ", and its command is in executador_x.dlq: delivered too often; " in told or (
                not oraculo.broker.capabilities.peeks and "executador_x.dlq, which has 1 dead letter: " in told
            )

        await until(is_told, saying="the dead letter to be told of")


async def test_nobody_who_answers_is_a_timeout(settings: Settings) -> None:
    async with Stage(settings, recording_app(Journal(), ("escavador_a",))) as oraculo:
        aggregate = await oraculo.run({"destinos": ["escavador_a", "escavador_ninguem"], "payload": {}, "timeout": 1})
    assert aggregate["status"] == "parcial"
    assert aggregate["falhas"]["escavador_ninguem"]["status"] == "timeout"
    reason, _, seen = aggregate["falhas"]["escavador_ninguem"]["motivo"].partition("; ")
    assert reason == "no answer in 1 s"
    assert not seen or "queue escavador_ninguem" in seen  # such a short run may end before a look


async def test_a_run_is_asked_for_and_answered_by_message(settings: Settings) -> None:
    request = {
        "correlation_id": "por-mensagem",
        "tipo_evento": "iniciar_orquestracao",
        "timestamp": to_iso(0.0),
        "payload": {"destinos": ["escavador_a"], "payload": {}, "responder_em": "respostas"},
    }
    async with Stage(settings, recording_app(Journal(), ("escavador_a",))) as oraculo:
        await oraculo.publish("orquestrador", request)
        async with asyncio.timeout(20):
            message = json.loads((await oraculo.next_on("respostas")).body)
    assert (message["tipo_evento"], message["correlation_id"]) == ("orquestracao_concluida", "por-mensagem")
    assert message["payload"]["status"] == "concluida"


@pytest.mark.parametrize("queue", ["resultados", "orquestrador"])
async def test_garbage_goes_to_the_dead_letters_with_a_reason(settings: Settings, queue: str) -> None:
    async with Stage(settings, recording_app(Journal(), ("escavador_a",))) as oraculo:
        await oraculo.publish(queue, b"\xff\x00 not JSON")
        letters = await until(lambda: oraculo.operations.dead_letters(queue, limit=10), saying="a dead letter")
        assert letters[0].body == b"\xff\x00 not JSON"
        assert letters[0].reason.startswith("not UTF-8: byte 0 cannot be read")
        assert (await oraculo.run({"destinos": ["escavador_a"], "payload": {}}))["status"] == "concluida"


async def test_repeated_and_late_answers_change_nothing(settings: Settings) -> None:
    async with Stage(settings) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a", "escavador_b"], "payload": {}, "timeout": 20})

        async def send(task: str, value: int) -> None:
            await oraculo.publish("resultados", answer(run_id, tarefa=task, payload={"valor": value}))

        await send("escavador_a", 1)
        await send("escavador_a", 2)
        await send("escavador_b", 3)
        aggregate = await oraculo.ended(run_id)
        assert aggregate["resultados"] == {"escavador_a": {"valor": 1}, "escavador_b": {"valor": 3}}
        await send("escavador_b", 4)

        async def told() -> bool:
            history = await oraculo.operations.history(run_id)
            return [entry.what.value for entry in history].count("resposta_repetida") == 2

        await until(told, saying="both repeats in the history")
        assert await oraculo.ended(run_id) == aggregate


async def test_a_run_outlives_the_engine_that_began_it(settings: Settings, tmp_path: Path) -> None:
    path = str(tmp_path / "oraculo.db")
    async with Stage(settings, store=SqliteStore(path)) as before:
        run_id = await before.submit({"pipeline": "promotional-video-full", "payload": {}, "timeout": 60})

        async def sent() -> bool:
            return [entry.what.value for entry in await before.operations.history(run_id)].count("tarefa_enviada") == 2

        await until(sent, saying="the first commands to be sent")
    async with Stage(settings, recording_app(Journal(), VIDEO_QUEUES), store=SqliteStore(path)) as after:
        aggregate = await after.ended(run_id)
    assert aggregate["status"] == "concluida"
    store = SqliteStore(path)
    await store.start()
    assert await check_store(store) == []
    await store.close()


async def test_it_is_told_what_waits_in_a_queue_and_what_is_gone_from_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the broker tells: NATS not who listens, RabbitMQ not what others have in work."""
    monkeypatch.setattr("oraculo.core.explain._SLOW", 0.0)
    async with Stage(settings) as oraculo:
        counts = oraculo.broker.capabilities.counts_consumers
        runs = [await oraculo.submit({"destinos": ["executador_x"], "payload": {}}) for _ in range(3)]

        async def is_told(words: str) -> None:
            async def of_sent() -> bool:
                return f"ago, and {words});" in await oraculo.operations.explain(runs[0])

            await until(of_sent, saying=words)

        nobody, waiting = "nobody listens on queue executador_x", "messages wait in queue executador_x"
        await is_told(nobody if counts else f"3 {waiting}, and nobody seems to take them")
        consumer = await oraculo.listen_on("executador_x")
        taken = await consumer.take(1)
        await is_told(f"2 {waiting}{', where 1 listens' if counts else ''}")
        for _ in range(2):
            await consumer.ack(taken)
            taken = await consumer.take(1)
        await consumer.ack(taken)
        lost = ": whoever took it is at work, or gone, or the queue was emptied"
        await is_told(f"no longer in queue executador_x{lost}")
        await consumer.close()
        await is_told(
            f"{nobody}, and it is no longer there{lost}" if counts else f"no longer in queue executador_x{lost}"
        )
