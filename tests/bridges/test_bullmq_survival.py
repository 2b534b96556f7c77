"""Steps on BullMQ survive the death of the Node worker, of the engine, of our broker and of BullMQ's Redis."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from oraculo.settings import Settings
from tests.bridges.node.processes import expect_node
from tests.bridges.node.stage import BullStage, bull_settings, journal, node_client, node_worker, working
from tests.end_to_end.cluster import Cluster
from tests.servers.fleet import Fleet
from tests.waiting import until

QUEUE = "images-queue"
ENTRY = "orchestrator-queue"
LAST = "last-queue"  # nobody serves it until the end, so that no run is over before its trouble
MAPPED = "text-queue"  # a queue of ours, whose commands go on to BullMQ's queue of that name
PART = "ponte bullmq"

# The server that is away: our broker, or BullMQ's Redis.
AWAY = [("redis", True), ("redis", False), pytest.param("rabbitmq", True, marks=pytest.mark.long)]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _node(fleet: Fleet) -> None:
    expect_node(fleet)


def only(**payload: Any) -> dict[str, Any]:
    return {"destinos": [{"id": "passo", "fila": f"bullmq://{QUEUE}"}], "payload": payload, "timeout": 100}


def many(count: int, **payload: Any) -> dict[str, Any]:
    destinations = [{"id": f"t{n}", "fila": f"bullmq://{QUEUE}", "payload": {"n": n, **payload}} for n in range(count)]
    return {"destinos": destinations, "payload": {}, "timeout": 150}


async def begun(folder: Path, count: int = 1) -> None:
    await until(lambda: len(journal(folder)) >= count, within=30, saying=f"{count} jobs to be begun")


# -- the Node worker ------------------------------------------------------------------------------------------


async def test_a_worker_that_is_killed_in_the_middle_of_a_job(fleet: Fleet, tmp_path: Path) -> None:
    """BullMQ gives the job to another worker. The history shows the stall, and the run gets the result."""
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"))
    worker = node_worker(settings, tmp_path, QUEUE, script="worker.mjs")
    async with BullStage(settings) as oraculo, working(worker):
        run_id = await oraculo.submit(only(faz="pendura_uma_vez"))
        await begun(tmp_path)
        worker.kill()
        await worker.ready()
        aggregate = await oraculo.ended(run_id, wait=40)
        history = [entry.detail for entry in await oraculo.operations.history(run_id)]
    assert aggregate["resultados"]["passo"]["resultado"] == {"inicios": 2}
    assert aggregate["resumo"]["concluidas"] == 1
    assert "the job stalled: its worker was lost, and BullMQ gives it to another" in history


async def test_a_job_that_kills_every_worker_fails(fleet: Fleet, tmp_path: Path) -> None:
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"))
    worker = node_worker(settings, tmp_path, QUEUE, options={"maxStalledCount": 0}, script="worker.mjs")
    async with BullStage(settings) as oraculo, working(worker):
        step = {"type": "PASSO", "queue": f"bullmq://{QUEUE}", "retry": {"maxAttempts": 1}}
        await oraculo.operations.put_pipeline("p", json.dumps({"name": "p", "steps": [step]}).encode())
        run_id = await oraculo.submit({"pipeline": "p", "payload": {"faz": "pendura"}, "timeout": 100})
        await begun(tmp_path)
        worker.kill()
        await worker.ready()
        aggregate = await oraculo.ended(run_id, wait=40)
    assert aggregate["falhas"]["PASSO"]["motivo"] == "job stalled more than allowable limit"


# -- the engine, as a process ---------------------------------------------------------------------------------


class BullCluster(Cluster):
    def __init__(self, folder: Path, settings: Settings) -> None:
        bullmq = settings.bullmq
        super().__init__(
            folder,
            settings.broker.url,
            workers=0,
            ORACULO_BULLMQ_URL=bullmq.url,
            ORACULO_BULLMQ_PREFIX=bullmq.prefix,
            ORACULO_BULLMQ_QUEUES_ALLOW=",".join(bullmq.queues_allow),
            ORACULO_BULLMQ_QUEUES=",".join(bullmq.queues),
            ORACULO_BULLMQ_LOCK=str(bullmq.lock),
            ORACULO_RUNS_BACKOFF="0.1",
        )

    async def start_run(self, request: dict[str, Any]) -> str:
        response = await self.client.post("/orquestracoes", json=request)
        assert response.status_code == 202, response.text
        return str(response.json()["correlation_id"])

    async def restart(self) -> None:
        """Kill the engine with kill -9, and start it again."""
        self.engine.kill()
        self.engine.start()
        await self.answers()

    async def trouble(self) -> str | None:
        problem: str | None = (await self.health())["partes"][PART]["problema"]
        return problem


def all_of(found: dict[str, Any], count: int) -> None:
    assert found["status"] == "concluida", (found["resumo"], list(found["falhas"].items())[:3])
    assert {step: one["resultado"]["recebido"]["n"] for step, one in found["resultados"].items()} == {
        f"t{n}": n for n in range(count)
    }


async def test_an_engine_that_is_killed_mid_flow(fleet: Fleet, tmp_path: Path) -> None:
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"))
    async with BullCluster(tmp_path, settings) as cluster:
        run_id = await cluster.start_run(many(200))
        await until(lambda: _is_waiting(settings, 100), within=30, saying="the jobs")
        cluster.engine.kill()
        async with working(node_worker(settings, tmp_path, QUEUE)):
            await begun(tmp_path, 100)
            cluster.engine.start()
            await cluster.answers()
            await cluster.reached(run_id, 50)
            await cluster.restart()
            all_of(await cluster.ended(run_id), 200)
    assert len(journal(tmp_path)) == 200, "a job was worked on twice"


async def _is_waiting(settings: Settings, jobs: int) -> bool:
    return await _waiting(settings) >= jobs


async def _waiting(settings: Settings) -> int:
    async with Redis.from_url(settings.bullmq.url) as redis:
        return int(await redis.zcard(f"{settings.bullmq.prefix}:{QUEUE}:prioritized"))


async def test_an_application_does_not_notice_that_the_engine_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"), queues=(QUEUE,))
    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "enhanced-images-only", "faz": "demora", "ms": 1})
    async with BullCluster(tmp_path, settings) as cluster:
        client.start()
        await until(lambda: _waiting(settings), within=30, saying="the job")
        await cluster.restart()
        async with working(node_worker(settings, tmp_path, QUEUE)):
            lines = await client.ended()
        found = (await cluster.client.get("/orquestracoes")).json()["orquestracoes"]
    assert lines[-1]["evento"] == "concluido", lines
    assert [run["status"] for run in found] == ["concluida"]


# -- the servers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "is_ours"), AWAY)
async def test_a_server_that_is_killed_and_started_again(
    name: str, is_ours: bool, fleet: Fleet, tmp_path: Path
) -> None:
    server = fleet.breakable(name)
    settings = bull_settings(
        server.url if is_ours else fleet.url("rabbitmq"), fleet.url("redis") if is_ours else server.url
    )
    worker, last_worker = node_worker(settings, tmp_path, QUEUE), node_worker(settings, tmp_path, LAST)
    request = many(200)
    request["destinos"].append({"id": "t200", "fila": f"bullmq://{LAST}", "payload": {"n": 200}})
    async with BullCluster(tmp_path, settings) as cluster, working(worker):
        run_id = await cluster.start_run(request)
        await cluster.reached(run_id, 20)
        await asyncio.to_thread(server.kill)
        assert (await cluster.summary(run_id))["status"] == "em_execucao"
        await asyncio.to_thread(server.start)
        async with working(last_worker):
            all_of(await cluster.ended(run_id), 201)


async def test_health_names_a_redis_that_is_away_and_steps_wait_for_it(fleet: Fleet, tmp_path: Path) -> None:
    server = fleet.breakable("redis")
    settings = bull_settings(fleet.url("rabbitmq"), server.url, queues=(MAPPED,))
    worker = node_worker(settings, tmp_path, QUEUE)
    async with BullCluster(tmp_path, settings) as cluster:
        await until(lambda: _is_well(cluster), within=20, saying="the bridge to be well")
        await asyncio.to_thread(server.kill)
        run_id = await cluster.start_run(only(faz="eco"))
        mapped = await cluster.start_run({"destinos": [MAPPED], "timeout": 100})
        hasty = await cluster.start_run({**only(faz="eco"), "timeout": 2})
        await until(cluster.trouble, within=20, saying="the bridge to report it")
        assert f"cannot reach 127.0.0.1:{server.port}" in str(await cluster.trouble())
        for waiting in (run_id, mapped):
            why = (await cluster.client.get(f"/orquestracoes/{waiting}/explicacao")).json()["explicacao"]
            assert f"; {PART} cannot be used (cannot reach 127.0.0.1:{server.port}" in why
        assert (await cluster.ended(hasty))["falhas"]["passo"]["status"] == "timeout"
        assert (await cluster.summary(run_id))["status"] == "em_execucao"
        await asyncio.to_thread(server.start)
        async with working(worker):
            assert (await cluster.ended(run_id))["status"] == "concluida"
        await until(lambda: _is_well(cluster), within=20, saying="the bridge to be well again")
    assert len(journal(tmp_path)) == 1, "the step whose time was over was begun all the same"


async def _is_well(cluster: BullCluster) -> bool:
    return await cluster.trouble() is None


async def test_an_engine_starts_without_bullmqs_redis(fleet: Fleet, tmp_path: Path) -> None:
    server = fleet.breakable("redis")
    settings = bull_settings(fleet.url("rabbitmq"), server.url)
    worker = node_worker(settings, tmp_path, QUEUE)
    await asyncio.to_thread(server.kill)
    async with BullCluster(tmp_path, settings) as cluster:
        run_id = await cluster.start_run(only(faz="eco"))
        await until(cluster.trouble, within=20, saying="the bridge to report it")
        await asyncio.to_thread(server.start)
        async with working(worker):
            assert (await cluster.ended(run_id))["status"] == "concluida"


# -- several engines ------------------------------------------------------------------------------------------


async def test_bridges_of_several_engines_share_the_work(fleet: Fleet, tmp_path: Path) -> None:
    """When one stops, the others answer for the jobs that it had in its hands."""
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"))
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        others = [oraculo.new_bridge() for _ in range(2)]
        for other in others:
            await other.start()
        run_id = await oraculo.submit(many(300))
        await begun(tmp_path, 50)
        await others[0].stop()
        aggregate = await oraculo.ended(run_id, wait=60)
        await others[1].stop()
    all_of(aggregate, 300)
    assert len(journal(tmp_path)) == 300
