"""Old Bull, the npm package `bull` 4, behind the flag `legacy`: best effort, and this much of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.ports.browse import RunQuery
from oraculo.settings import Settings
from tests.bridges.node.processes import NodeProcess, expect_node, installed
from tests.bridges.node.stage import BullStage, bull_settings, journal, node_worker, working
from tests.servers.fleet import Fleet
from tests.waiting import until

QUEUE = "images-queue"
ENTRY = "orchestrator-queue"
WORKER = "bull_worker.mjs"


@pytest.fixture
def settings(fleet: Fleet) -> Settings:
    expect_node(fleet)
    return bull_settings(
        fleet.url("rabbitmq"), fleet.url("redis"), legacy=True, entry=ENTRY, queues=(QUEUE, "text-queue")
    )


def only(**payload: Any) -> dict[str, Any]:
    return {"destinos": [{"id": "passo", "fila": f"bullmq://{QUEUE}"}], "payload": payload, "timeout": 60}


@pytest.mark.long
async def test_a_job_and_its_value(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE, script=WORKER)):
        aggregate = await oraculo.run(only(faz="eco", texto="coração"))
    expected = {"recebido": {"faz": "eco", "texto": "coração"}, "nome": "__default__"}
    assert aggregate["resultados"]["passo"] == {"status": "ok", "resultado": expected}
    assert len(journal(tmp_path)) == 1


@pytest.mark.long
async def test_a_failure_after_bulls_own_attempts(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE, script=WORKER)):
        step = {"type": "PASSO", "queue": f"bullmq://{QUEUE}?attempts=3", "retry": {"maxAttempts": 1}}
        await oraculo.operations.put_pipeline("p", json.dumps({"name": "p", "steps": [step]}).encode())
        aggregate = await oraculo.run({"pipeline": "p", "payload": {"faz": "falha"}})
    assert aggregate["falhas"]["PASSO"]["motivo"] == "não deu"
    assert len(journal(tmp_path)) == 3


@pytest.mark.long
async def test_progress(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE, script=WORKER)):
        run_id = await oraculo.submit(only(faz="progride_e_pendura", progressos=[42]))

        async def progress() -> object:
            return (await oraculo.task(run_id, "passo"))["progresso"]

        await until(progress, within=20, saying="progress")
        assert await progress() == {"percentual": 42.0, "mensagem": None}


@pytest.mark.long
async def test_what_ended_while_no_bridge_listened_is_found(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo:
        run_id = await oraculo.submit(only(faz="eco"))
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        await oraculo.bridge.stop()
        async with working(node_worker(settings, tmp_path, QUEUE, script=WORKER)):
            done = oraculo.key(QUEUE, "completed")
            await until(lambda: oraculo.redis.zcard(done), within=20, saying="the job's end")
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        aggregate = await oraculo.ended(run_id, wait=20)
    assert aggregate["status"] == "concluida"


def client(settings: Settings, folder: Path, data: object, options: dict[str, Any] | None = None) -> NodeProcess:
    arguments = (settings.bullmq.url, settings.bullmq.prefix, ENTRY, json.dumps(data), json.dumps(options or {}))
    return NodeProcess(installed() / "bull_client.mjs", *arguments, log=folder / "client.log")


async def test_a_job_of_bull_starts_a_pipeline(settings: Settings, tmp_path: Path) -> None:
    """The application adds it with Bull itself: `addJob('orchestrator-queue', {jobId, pipelineName})`."""
    app = client(settings, tmp_path, {"jobId": "6710", "pipelineName": "enhanced-images-only"})
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE, script=WORKER)):
        app.start()
        lines = await app.ended()
        [head] = (await oraculo.operations.runs(RunQuery())).heads
    assert lines[-1]["evento"] == "concluido", lines
    assert lines[-1]["valor"]["correlation_id"] == head.id
    assert lines[-1]["valor"]["resultados"]["ENHANCED_IMAGES"]["resultado"]["recebido"]["entrada"] == {"jobId": "6710"}


@pytest.mark.long
@pytest.mark.parametrize("data", [{"jobId": "1"}, {"pipelineName": "nenhum"}])
async def test_a_bad_job_of_bull_fails_at_once(data: object, settings: Settings, tmp_path: Path) -> None:
    app = client(settings, tmp_path, data, {"attempts": 5})
    async with BullStage(settings):
        app.start()
        lines = await app.ended()
    assert lines[-1]["evento"] == "falhou", lines
    assert "pipeline" in lines[-1]["motivo"]


@pytest.mark.long
@pytest.mark.parametrize(
    "fields", [{"data": "{"}, {"data": "[]", "opts": "7", "timestamp": "cedo"}, {"data": "[" * 9999}]
)
async def test_a_job_that_was_not_written_by_bull_fails(fields: dict[str, str], settings: Settings) -> None:
    """The worker does not take it again and again."""
    async with BullStage(settings) as oraculo:
        await oraculo.redis.hset(oraculo.key(ENTRY, "estranho"), mapping=fields)
        await oraculo.redis.lpush(oraculo.key(ENTRY, "wait"), "estranho")
        await until(lambda: oraculo.redis.zcard(oraculo.key(ENTRY, "failed")), within=20, saying="the job's end")
        reason = await oraculo.redis.hget(oraculo.key(ENTRY, "estranho"), "failedReason")
    assert reason.startswith("data: must be an object")


@pytest.mark.long
async def test_a_job_of_bull_is_taken_over_without_a_second_run(settings: Settings, tmp_path: Path) -> None:
    app = client(settings, tmp_path, {"pipelineName": "enhanced-images-only"})
    async with BullStage(settings) as oraculo:
        app.start()
        await until(lambda: oraculo.job_ids(QUEUE), within=20, saying="the step's job")
        await oraculo.bridge.stop()
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        async with working(node_worker(settings, tmp_path, QUEUE, script=WORKER)):
            lines = await app.ended()
        heads = (await oraculo.operations.runs(RunQuery())).heads
    assert lines[-1]["evento"] == "concluido", lines
    assert len(heads) == 1


async def test_a_job_of_bull_that_is_being_taken_at_a_stop_is_given_back(settings: Settings) -> None:
    """Nobody waits until its lock has run out."""
    settings = msgspec.structs.replace(settings, bullmq=msgspec.structs.replace(settings.bullmq, lock=120.0))
    asked, answered = asyncio.Event(), asyncio.Event()
    async with BullStage(settings) as oraculo:
        worker: Any = await until(lambda: oraculo.bridge._entry and oraculo.bridge._entry._worker, saying="the worker")
        take = worker._take_script

        async def take_late(**arguments: Any) -> Any:
            asked.set()
            taken = await take(**arguments)
            if taken:
                await answered.wait()
            return taken

        worker._take_script = take_late
        await asyncio.wait_for(asked.wait(), 20)
        await oraculo.redis.hset(oraculo.key(ENTRY, "1"), mapping={"data": '{"pipelineName": "enhanced-images-only"}'})
        await oraculo.redis.lpush(oraculo.key(ENTRY, "wait"), "1")
        await until(lambda: oraculo.redis.llen(oraculo.key(ENTRY, "active")), saying="the job is being taken")
        asyncio.get_running_loop().call_later(0.2, answered.set)
        await oraculo.bridge.stop()
        assert await oraculo.redis.lrange(oraculo.key(ENTRY, "wait"), 0, -1) == ["1"]


async def looked_again(oraculo: BullStage) -> None:
    """Wait until the entry has looked for jobs twice more."""
    worker: Any = oraculo.bridge._entry and oraculo.bridge._entry._worker
    take, looks = worker._take_script, list[object]()

    async def counted(**arguments: Any) -> Any:
        taken = await take(**arguments)
        looks.append(taken)
        return taken

    worker._take_script = counted
    await until(lambda: len(looks) > 1, within=20, saying="two looks")
    worker._take_script = take


async def test_a_paused_queue_of_bull_is_left_alone_and_loses_nothing(settings: Settings) -> None:
    """When the queue is resumed, Bull puts the list of paused jobs in the place of the waiting ones."""
    data = {"data": '{"pipelineName": "enhanced-images-only"}'}
    async with BullStage(settings) as oraculo:
        await oraculo.redis.hset(oraculo.key(ENTRY, "1"), mapping=data)
        await oraculo.redis.lpush(oraculo.key(ENTRY, "wait"), "1")
        await until(lambda: oraculo.job_ids(QUEUE), within=20, saying="the step's job")
        await oraculo.redis.set(oraculo.key(ENTRY, "meta-paused"), "1")
        await oraculo.redis.hset(oraculo.key(ENTRY, "2"), mapping=data)
        await oraculo.redis.zadd(oraculo.key(ENTRY, "delayed"), {"2": 4096})
        await looked_again(oraculo)
        await oraculo.bridge.stop()
        assert await oraculo.redis.lrange(oraculo.key(ENTRY, "paused"), 0, -1) == ["1"], "given back"
        assert await oraculo.redis.zrange(oraculo.key(ENTRY, "delayed"), 0, -1) == ["2"], "not begun"
