"""Differences between BullMQ 5 for Node and bullmq for Python, which speaks as BullMQ 6 does."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oraculo.settings import Settings
from tests.bridges.node.processes import HubProgram, expect_node
from tests.bridges.node.stage import BullStage, bull_settings, node_client, node_worker, working
from tests.servers.fleet import Fleet
from tests.waiting import until

QUEUE, ENTRY = "images-queue", "orchestrator-queue"
ONE_STEP = {"name": "um", "steps": [{"type": "A", "queue": f"bullmq://{QUEUE}", "retry": {"maxAttempts": 1}}]}


Make = Callable[..., Settings]


@pytest.fixture
def make(fleet: Fleet) -> Make:
    """Make settings for the shared servers."""
    expect_node(fleet)
    return lambda **bullmq: bull_settings(fleet.url("redis"), fleet.url("redis"), entry=ENTRY, **bullmq)


@pytest.fixture
def settings(make: Make) -> Settings:
    return make()


async def administer(settings: Settings, folder: Path, queue: str, *action: str) -> Any:
    bullmq, log = settings.bullmq, folder / f"admin-{uuid.uuid4().hex[:6]}.log"
    process = HubProgram("admin.mjs", bullmq.url, bullmq.prefix, queue, *action, log=log)
    process.start()
    return (await process.ended())[-1]["feito"]


async def add(settings: Settings, folder: Path, queue: str, data: dict[str, Any], **options: Any) -> str:
    job_id: str = await administer(settings, folder, queue, "adiciona", json.dumps(data), json.dumps(options))
    return job_id


async def completed(oraculo: BullStage, queue: str) -> list[str]:
    found: list[str] = await oraculo.redis.zrange(oraculo.key(queue, "completed"), 0, -1)
    return found


async def test_a_job_for_a_paused_queue_is_done_when_it_is_resumed_and_so_are_those_of_others(
    make: Make, tmp_path: Path
) -> None:
    settings = make(priority=False)
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await administer(settings, tmp_path, QUEUE, "pausa")
        others = await add(settings, tmp_path, QUEUE, {})
        run_id = await oraculo.submit({"destinos": [f"bullmq://{QUEUE}"], "timeout": 30})
        paused = oraculo.key(QUEUE, "paused")

        async def are_paused() -> bool:
            return bool(await oraculo.redis.llen(paused) == 2)

        await until(are_paused, saying="both jobs, in the list of paused ones")
        await administer(settings, tmp_path, QUEUE, "pausa")  # again, like an operator who did not see it
        await administer(settings, tmp_path, QUEUE, "retoma")
        aggregate = await oraculo.ended(run_id, wait=20)
        assert aggregate["status"] == "concluida", aggregate
        assert others in await completed(oraculo, QUEUE)


async def test_a_job_with_a_priority_for_a_paused_queue_is_done_when_it_is_resumed(
    settings: Settings, tmp_path: Path
) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await administer(settings, tmp_path, QUEUE, "pausa")
        run_id = await oraculo.submit({"destinos": [f"bullmq://{QUEUE}"], "timeout": 30})
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        await administer(settings, tmp_path, QUEUE, "retoma")
        aggregate = await oraculo.ended(run_id, wait=20)
        assert aggregate["status"] == "concluida", aggregate


async def test_a_queue_of_bullmq_6_has_no_list_of_paused_jobs(make: Make) -> None:
    async with BullStage(make(priority=False)) as oraculo:
        await oraculo.redis.hset(oraculo.key(QUEUE, "meta"), mapping={"paused": "1", "version": "bullmq:6.0.1"})
        await oraculo.submit({"destinos": [f"bullmq://{QUEUE}"], "timeout": 30})
        await until(lambda: oraculo.job_ids(QUEUE), saying="the job")
        assert await oraculo.redis.llen(oraculo.key(QUEUE, "wait")) == 1


async def test_a_delayed_job_of_the_entry_whose_time_comes_while_it_is_paused_is_done(
    settings: Settings, tmp_path: Path
) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await oraculo.operations.put_pipeline("um", json.dumps(ONE_STEP).encode())
        await administer(settings, tmp_path, ENTRY, "pausa")
        data = {"pipelineName": "um"}
        jobs = [await add(settings, tmp_path, ENTRY, data), await add(settings, tmp_path, ENTRY, data, delay=100)]
        delayed = oraculo.key(ENTRY, "delayed")

        async def is_over() -> bool:
            return bool(await oraculo.redis.zcard(delayed) == 0)

        await until(is_over, within=20, saying="the end of the delay")
        await administer(settings, tmp_path, ENTRY, "retoma")

        async def are_done() -> bool:
            return set(jobs) <= set(await completed(oraculo, ENTRY))

        await until(are_done, within=20, saying="both jobs to be done")


async def test_a_job_that_is_repeated_keeps_its_data(settings: Settings, tmp_path: Path) -> None:
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await oraculo.operations.put_pipeline("um", json.dumps(ONE_STEP).encode())
        await add(settings, tmp_path, ENTRY, {"pipelineName": "um"}, repeat={"every": 500, "limit": 3})

        async def are_done() -> bool:
            return len(await completed(oraculo, ENTRY)) == 3

        await until(are_done, within=20, saying="all three to be done")


async def test_a_backoff_that_only_the_applications_workers_know_does_not_keep_a_job_for_ever(
    settings: Settings, tmp_path: Path
) -> None:
    options = {"attempts": 2, "backoff": {"type": "nossa", "delay": 50}}
    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "um", "faz": "falha"}, options)
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, QUEUE)):
        await oraculo.operations.put_pipeline("um", json.dumps(ONE_STEP).encode())
        client.start()
        [*_, last] = await client.ended(within=20)
    assert (last["evento"], last["tentativas"]) == ("falhou", 2), last
