"""A step runs as a job of BullMQ, on unmodified Node workers: `bullmq://queue`."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bullmq import Queue

from oraculo.ports.broker import Outgoing, publish_all
from oraculo.settings import Settings
from oraculo.wire.message import Message, decode_message, encode_message
from tests.bridges.node.processes import expect_node
from tests.bridges.node.stage import BullStage, bull_settings, journal, node_worker, working
from tests.servers.fleet import Fleet
from tests.waiting import until

QUEUE = "images-queue"
TO = f"bullmq://{QUEUE}"

Make = Callable[..., Settings]


@pytest.fixture
def make(fleet: Fleet) -> Make:
    """Make settings for the shared servers."""
    expect_node(fleet)
    return lambda **bullmq: bull_settings(fleet.url("redis"), fleet.url("redis"), **bullmq)


@pytest.fixture
def settings(make: Make) -> Settings:
    return make()


def only(to: str = TO, **payload: Any) -> dict[str, Any]:
    """Return a request for a run of one step."""
    return {"destinos": [{"id": "passo", "fila": to}], "payload": payload, "timeout": 60}


async def test_a_job_gets_the_payload_exactly_and_its_value_comes_back(settings: Settings, tmp_path: Path) -> None:
    payload = {
        "texto": "coração ❤ \u2028",
        "aninhado": {"lista": [1, 2.5, None, True, {"vazio": {}}]},
        "grande": 9007199254740991,
        "negativo": -0.001,
    }
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        aggregate = await oraculo.run(only(**payload))
    assert aggregate["status"] == "concluida", aggregate
    expected = {"recebido": payload, "nome": "passo"}
    assert aggregate["resultados"]["passo"] == {"status": "ok", "resultado": expected}
    assert [line["dados"] for line in journal(tmp_path)] == [payload]


async def test_whatever_a_worker_returns_comes_back(settings: Settings, tmp_path: Path) -> None:
    values = [None, 0, False, "", "texto", [], [1, "dois"], {"a": {"b": 1}}]
    payloads = {f"t{number}": {"faz": "devolve", "valor": value} for number, value in enumerate(values)}
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        aggregate = await oraculo.run({"destinos": _each(payloads), "payload": {}, "timeout": 60})
    found = [aggregate["resultados"][step] for step in payloads]
    assert found == [{"status": "ok", "resultado": value} for value in values]
    assert [type(one["resultado"]) for one in found] == [type(value) for value in values]  # 0 is not False


def _each(payloads: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": step, "fila": TO, "payload": payload} for step, payload in payloads.items()]


async def test_a_wide_run_over_two_queues(settings: Settings, tmp_path: Path) -> None:
    destinations = [
        {"id": f"t{n}", "fila": f"bullmq://fila-{n % 2}", "payload": {"faz": "devolve", "valor": n}} for n in range(300)
    ]
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, "fila-0", "fila-1")):
        aggregate = await oraculo.run({"destinos": destinations, "payload": {}, "timeout": 60}, wait=60)
    assert aggregate["status"] == "concluida", aggregate["resumo"]
    assert {step: one["resultado"] for step, one in aggregate["resultados"].items()} == {f"t{n}": n for n in range(300)}
    assert len(journal(tmp_path)) == 300


async def test_a_failure_comes_after_bullmqs_own_attempts(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await _put(oraculo, retry=1, attempts=3)
        aggregate = await oraculo.run({"pipeline": "p", "payload": {"faz": "falha"}})
    assert aggregate["status"] == "erro"
    assert aggregate["falhas"]["PASSO"]["motivo"] == "não deu"
    assert aggregate["falhas"]["PASSO"]["tentativas"] == 1
    assert len(journal(tmp_path)) == 3


@pytest.mark.parametrize("thrown", ["um texto", {"codigo": 7}])
async def test_whoever_throws_no_error_gave_no_reason(thrown: object, settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        aggregate = await oraculo.run(only(f"{TO}?attempts=1", faz="joga", valor=thrown))
    assert aggregate["falhas"]["passo"]["motivo"].startswith("the job failed and did not say why")


async def _put(oraculo: BullStage, *, retry: int, attempts: int) -> None:
    step = {"type": "PASSO", "queue": f"{TO}?attempts={attempts}", "retry": {"maxAttempts": retry, "backoff": 0.01}}
    await oraculo.operations.put_pipeline("p", json.dumps({"name": "p", "steps": [step]}).encode())


async def test_attempts_inside_bullmq_are_no_failures(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await _put(oraculo, retry=1, attempts=3)
        aggregate = await oraculo.run({"pipeline": "p", "payload": {"faz": "eco"}})
        assert aggregate["resultados"]["PASSO"]["resultado"]["nome"] == "PASSO"
        aggregate = await oraculo.run(only(f"{TO}?attempts=3", faz="falha_duas_vezes"))
    assert aggregate["resultados"]["passo"] == {"status": "ok", "resultado": {"tentativas": 3}}


async def test_our_retry_policy_follows_bullmqs(settings: Settings, tmp_path: Path) -> None:
    """Each attempt of ours is a job of its own. After an UnrecoverableError there is no other attempt."""
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await _put(oraculo, retry=2, attempts=2)
        aggregate = await oraculo.run({"pipeline": "p", "payload": {"faz": "falha"}})
        assert aggregate["falhas"]["PASSO"]["tentativas"] == 2
        assert len(journal(tmp_path)) == 4
        assert len({line["id"] for line in journal(tmp_path)}) == 2
        aggregate = await oraculo.run({"pipeline": "p", "payload": {"faz": "irrecuperavel"}})
    assert aggregate["falhas"]["PASSO"]["tentativas"] == 1
    assert aggregate["falhas"]["PASSO"]["motivo"] == "nunca vai dar"
    assert len(journal(tmp_path)) == 5


async def test_progress_comes_back(settings: Settings, tmp_path: Path) -> None:
    expected: list[tuple[object, dict[str, Any]]] = [
        (42, {"percentual": 42.0, "mensagem": None}),
        ({"percent": 12.5, "message": "quase"}, {"percentual": 12.5, "mensagem": "quase"}),
        ("começou", {"percentual": None, "mensagem": "começou"}),
        ({"fase": 2}, {"percentual": None, "mensagem": '{"fase":2}'}),
    ]
    payloads = {
        f"t{number}": {"faz": "progride_e_pendura", "progressos": [progress]}
        for number, (progress, _) in enumerate(expected)
    }
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        run_id = await oraculo.submit({"destinos": _each(payloads), "payload": {}, "timeout": 60})

        async def progress() -> list[object]:
            return [(await oraculo.task(run_id, step))["progresso"] for step in payloads]

        async def is_there() -> bool:
            return None not in await progress()

        await until(is_there, saying="progress of each")
        assert await progress() == [shown for _, shown in expected]


async def test_a_job_that_is_removed_is_a_failure(settings: Settings) -> None:
    async with BullStage(settings) as oraculo:
        run_id = await oraculo.submit(only(faz="eco"))
        [job_id] = await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        bull = Queue(QUEUE, {"connection": oraculo.redis, "prefix": settings.bullmq.prefix})
        assert await bull.remove(job_id)
        aggregate = await oraculo.ended(run_id, wait=10)
    assert aggregate["falhas"]["passo"]["motivo"].startswith("removed: ")
    assert aggregate["falhas"]["passo"]["tentativas"] == 1


async def test_a_queue_that_is_obliterated_fails_its_jobs(settings: Settings) -> None:
    """BullMQ has no event for that: only the sweep finds out."""
    async with BullStage(settings) as oraculo:
        run_id = await oraculo.submit(only(faz="eco"))
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        keys = await oraculo.redis.keys(f"{settings.bullmq.prefix}:{QUEUE}*")
        await oraculo.redis.delete(*keys)
        await oraculo.bridge.stop()
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()  # it sweeps at once
        aggregate = await oraculo.ended(run_id, wait=10)
        assert aggregate["falhas"]["passo"]["motivo"].startswith("removed: the job is no longer in images-queue")
        # The queue works again, though the stream of its events began anew.
        again = await oraculo.submit(only(faz="eco"))
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job of the next run")
        [job_id] = await oraculo.job_ids(QUEUE)
        event = {"event": "completed", "jobId": job_id, "returnvalue": '"feito"'}
        await oraculo.redis.xadd(oraculo.key(QUEUE, "events"), event)
        aggregate = await oraculo.ended(again, wait=10)
    assert aggregate["resultados"]["passo"]["resultado"] == "feito"


async def test_results_of_workers_that_keep_no_jobs(settings: Settings, tmp_path: Path) -> None:
    """With removeOnComplete only the event is left. The bridge reads it, or finds it later."""
    worker = node_worker(settings, tmp_path, QUEUE, options={"removeOnComplete": {"count": 0}})
    async with BullStage(settings) as oraculo:
        async with working(worker):
            aggregate = await oraculo.run(only(faz="eco", n=1))
            assert aggregate["status"] == "concluida"
            assert await oraculo.job_ids(QUEUE) == []
        run_id = await oraculo.submit(only(faz="eco", n=2))
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        await oraculo.bridge.stop()
        # Another reader takes the event and dies with it.
        group = f"oraculo-{settings.broker.prefix}"
        async with working(worker):
            await until(lambda: _none(oraculo), saying="the job to be done and gone")
        await oraculo.redis.xgroup_setid(oraculo.key(QUEUE, "events"), group, "$")
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        aggregate = await oraculo.ended(run_id, wait=10)
    assert aggregate["resultados"]["passo"]["resultado"]["recebido"] == {"faz": "eco", "n": 2}


async def _none(oraculo: BullStage) -> bool:
    return await oraculo.job_ids(QUEUE) == []


@pytest.mark.parametrize("keeps", [True, False], ids=["job kept", "job removed"])
async def test_a_repeated_command_adds_no_second_job_and_is_answered_again(
    keeps: bool, settings: Settings, tmp_path: Path
) -> None:
    options = {} if keeps else {"removeOnComplete": {"count": 0}}
    async with BullStage(settings) as oraculo:
        await oraculo.bridge.stop()
        run_id = await oraculo.submit(only(faz="devolve", valor=7))
        command = await _command(oraculo)
        command.responder_em = f"{settings.broker.prefix}respostas"
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        answers = await oraculo.broker.consume(command.responder_em, prefetch=10)
        async with working(node_worker(settings, tmp_path, QUEUE, options=options)):
            for _ in range(3):
                await _send(oraculo, command)
                [answer] = await asyncio.wait_for(answers.take(1), 20)
                message = decode_message(answer.body)
                assert (message.correlation_id, message.tarefa, message.tentativa) == (run_id, "passo", 1)
                assert json.loads(bytes(message.payload)) == {"status": "ok", "resultado": 7}
                await answers.ack([answer])
    assert len(journal(tmp_path)) == 1


async def _command(oraculo: BullStage) -> Message:
    """Take the next command for the bridge out of its queue."""
    consumer = await oraculo.broker.consume(oraculo.engine.parts.queues.names.physical("ponte-bullmq"), prefetch=1)
    [delivery] = await consumer.take(1)
    await consumer.ack([delivery])
    await consumer.close()
    return decode_message(delivery.body)


async def _send(oraculo: BullStage, command: Message) -> None:
    queue = oraculo.engine.parts.queues.names.physical("ponte-bullmq")
    await publish_all(oraculo.broker, [Outgoing(queue, encode_message(command))])


async def test_a_repeated_command_for_a_job_in_work_changes_nothing(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo:
        await oraculo.bridge.stop()
        run_id = await oraculo.submit(only(faz="demora", ms=700))
        command = await _command(oraculo)
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        async with working(node_worker(settings, tmp_path, QUEUE)):
            for _ in range(3):
                await _send(oraculo, command)
            aggregate = await oraculo.ended(run_id)
    assert aggregate["resultados"]["passo"]["resultado"] == {"demorou": 700}
    assert len(journal(tmp_path)) == 1


async def test_a_job_that_nobody_began_is_taken_away_at_its_deadline(settings: Settings, tmp_path: Path) -> None:
    """A worker that comes back late does no stale work."""
    async with BullStage(settings) as oraculo:
        run_id = await oraculo.submit({**only(faz="eco"), "timeout": 1})
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        aggregate = await oraculo.ended(run_id, wait=10)
        assert aggregate["falhas"]["passo"]["status"] == "timeout"
        await oraculo.bridge.stop()
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        await until(lambda: _none(oraculo), saying="the job to be gone")
        async with working(node_worker(settings, tmp_path, QUEUE)):
            aggregate = await oraculo.run(only(faz="eco"))
    assert len(journal(tmp_path)) == 1


async def test_a_job_that_nobody_began_in_time_is_answered_once(settings: Settings, tmp_path: Path) -> None:
    """The event of its removal, by the bridge itself, is no second answer."""
    async with BullStage(settings) as oraculo:
        run_id = await oraculo.submit({**only(faz="eco"), "timeout": 1})
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        await oraculo.ended(run_id, wait=10)
        await oraculo.bridge.stop()
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        await until(lambda: _none(oraculo), saying="the job to be gone")
        async with working(node_worker(settings, tmp_path, QUEUE)):
            await oraculo.run(only(faz="eco"))  # whose events come after that of the removal

        async def late_answers() -> int:
            return (await oraculo.store.heads([run_id]))[run_id].late

        await until(late_answers, saying="the answer that comes late")
        assert await late_answers() == 1
        history = [entry.detail for entry in await oraculo.operations.history(run_id)]
        assert not any("somebody took the job out" in (detail or "") for detail in history), history


async def test_ended_jobs_are_forgotten_in_time(make: Make, tmp_path: Path) -> None:
    settings = make(keep=0.001)
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await oraculo.run(only(faz="eco"))
        # The run ends with the answer. The ledger notes the answer a moment later, and only then begins to forget it.
        ended = f"oraculo:{settings.broker.prefix}ponte-bullmq:ended"
        await until(lambda: oraculo.redis.zcard(ended), saying="the end of the job to be noted")
        await oraculo.bridge.stop()
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        await until(lambda: _none(oraculo), saying="the job to be gone")

        async def left() -> list[str]:
            keys = await oraculo.redis.keys(f"oraculo:{settings.broker.prefix}*")
            return [key for key in keys if not key.endswith((":used", ":turn"))]

        await until(lambda: _is_empty(left), saying="nothing left of it in Redis")


async def test_a_queue_without_open_jobs_is_forgotten_and_heard_again_when_it_is_used(
    make: Make, tmp_path: Path
) -> None:
    settings = make()
    used, other = f"oraculo:{settings.broker.prefix}ponte-bullmq:used", f"{QUEUE}-de-outros"
    async with BullStage(settings) as oraculo:
        async with working(node_worker(settings, tmp_path, QUEUE)):
            await oraculo.run(only(faz="eco"))
        await oraculo.submit({"destinos": [f"bullmq://{other}"], "payload": {}})
        await until(lambda: oraculo.redis.zscore(used, other), saying="the job to be added")
        await oraculo.bridge.stop()
        await oraculo.redis.zadd(used, {QUEUE: 1, other: 1})  # long ago
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()

        async def is_forgotten() -> bool:
            return await oraculo.redis.zrange(used, 0, -1) == [other]

        await until(is_forgotten, saying="the queue without jobs to be forgotten, and it alone")
        async with working(node_worker(settings, tmp_path, QUEUE)):
            aggregate = await oraculo.run(only(faz="eco"))
        assert aggregate["status"] == "concluida", aggregate


async def _is_empty(ask: Callable[[], Any]) -> bool:
    return not await ask()


async def test_commands_for_named_queues_of_ours_go_on_to_their_namesakes(make: Make, tmp_path: Path) -> None:
    settings = make(queues=("images-queue", "escavador_fotos"))
    worker = node_worker(settings, tmp_path, "images-queue", "escavador_fotos")
    async with BullStage(settings) as oraculo, working(worker):
        aggregate = await oraculo.run(
            {"destinos": ["images-queue", "escavador_fotos"], "payload": {"n": 1}, "timeout": 30}
        )
    assert aggregate["status"] == "concluida", aggregate
    assert aggregate["resultados"] == {
        "images-queue": {"status": "ok", "resultado": {"recebido": {"n": 1}, "nome": "images-queue"}},
        "escavador_fotos": {"status": "ok", "dados": {"recebido": {"n": 1}, "nome": "escavador_fotos"}},
    }


@pytest.mark.parametrize(
    ("ponte", "reason"),
    [
        (None, "ponte: must say where the command goes on"),
        ({"tipo": "celery", "alvo": "x"}, "ponte: must name a BullMQ queue"),
        ({"tipo": "bullmq", "alvo": "a:b"}, "ponte: must name a BullMQ queue"),
    ],
)
async def test_a_command_that_cannot_go_on_is_a_dead_letter(
    ponte: dict[str, str] | None, reason: str, settings: Settings
) -> None:
    command = {
        "correlation_id": "x",
        "tipo_evento": "iniciar_execucao",
        "payload": {},
        "timestamp": "2025-10-14T12:00:00Z",
    } | ({"ponte": ponte} if ponte else {})
    async with BullStage(settings) as oraculo:
        await oraculo.publish("ponte-bullmq", command)
        letters = await until(lambda: oraculo.operations.dead_letters("ponte-bullmq"), saying="a dead letter")
    assert letters[0].reason.startswith(reason)


async def test_an_answer_that_no_queue_takes_is_a_dead_letter(fleet: Fleet, tmp_path: Path) -> None:
    """RabbitMQ does not make the queue that the command names for its answer."""
    expect_node(fleet)
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"), queues=(QUEUE,))
    command = {
        "correlation_id": "x",
        "tipo_evento": "iniciar_execucao",
        "payload": {"faz": "devolve", "valor": 7},
        "timestamp": "2025-10-14T12:00:00Z",
        "responder_em": f"{settings.broker.prefix}{'x' * 250}",
    }
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await oraculo.publish(QUEUE, command)
        letters = await until(lambda: oraculo.operations.dead_letters("resultados"), within=20, saying="a dead letter")
        assert (await oraculo.operations.dead_letters(QUEUE)) == []
    assert letters[0].reason.startswith("the broker refused the answer: ")
    assert json.loads(letters[0].body)["correlation_id"] == "x"
