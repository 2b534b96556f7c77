"""Celery and BullMQ get the `prioridade` of a run: their own workers take the higher first."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kombu
import pytest
from redis.asyncio import Redis

from oraculo.pipeline.bridges import Bridge
from oraculo.testing.harness import Harness
from oraculo.wire.message import Message, priority_of
from tests.bridges.celery_stage import Bridged, CeleryWorker
from tests.bridges.node.processes import expect_node
from tests.bridges.node.stage import BullStage, bull_settings, journal, node_worker, working
from tests.core.building import fan_out
from tests.core.test_command import command
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(90)

ASKED = (0, 1, 9, 0, 5)  # in this order; the number of each run's `prioridade`
HIGHEST_FIRST = [9, 5, 1, 0, 0]


async def submit_each(oraculo: Harness, destination: str, **payload: Any) -> list[str]:
    """Submit a run for each priority, with that number as the text in its payload."""
    return [
        await oraculo.submit(
            {
                "destinos": [{"id": "t", "fila": destination, "payload": {**payload, "text": str(asked)}}],
                "prioridade": asked,
                "timeout": 60,
            }
        )
        for asked in ASKED
    ]


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_command_names_the_priority_of_its_run_unless_it_is_0() -> None:
    assert command(fan_out("a", prioridade=7), "a")["prioridade"] == 7
    assert "prioridade" not in command(fan_out("a", prioridade=0), "a")


@pytest.mark.parametrize(("given", "read"), [(9, 9), (0, 0), (None, 0), (10, 0), (-1, 0), ("alta", 0), (True, 0)])
def test_what_is_no_priority_is_none(given: object, read: int) -> None:
    """A message may have a field of that name with another meaning."""
    message = Message(correlation_id="r", tipo_evento="e", payload=b"{}", timestamp="", prioridade=given)  # type: ignore[arg-type]
    assert priority_of(message) == read


# -- Celery ----------------------------------------------------------------------------------------------------------


async def order_of(broker: str, tmp_path: Path, queue: str, **settings: Any) -> list[int]:
    """Return the order in which a worker of Celery takes the tasks that wait when it starts."""
    lines = tmp_path / "lines"
    environment = {"CELERY_MAX_PRIORITY": "9"} if broker.startswith("amqp") else {}
    worker = CeleryWorker(broker, tmp_path / "log", "-c", "1", queue=queue, **environment)
    async with Bridged(broker, queue, **settings) as stage:
        await stage.is_connected()
        runs = await submit_each(stage, "celery://loja.anotar", path=str(lines))

        async def all_wait() -> bool:
            found = await stage.queues.state_of(Bridge("celery", "loja.anotar"))
            return found is not None and found.waiting == len(ASKED)

        await until(all_wait, within=20, saying="all tasks to wait")
        worker.start()
        try:
            for run in runs:
                assert (await stage.ended(run))["status"] == "concluida"
        finally:
            worker.kill()
    return [int(line) for line in lines.read_text().split()]


async def test_a_worker_of_celery_on_rabbitmq_takes_the_higher_first(fleet: Fleet, tmp_path: Path) -> None:
    broker, queue = fleet.url("rabbitmq"), f"loja-{uuid.uuid4().hex[:10]}"
    with kombu.Connection(broker) as connection:
        connection.channel().queue_declare(queue, durable=True, auto_delete=False, arguments={"x-max-priority": 9})  # type: ignore[attr-defined, unused-ignore]
    assert await order_of(broker, tmp_path, queue) == HIGHEST_FIRST


async def test_a_worker_of_celery_on_redis_takes_the_higher_first_where_the_setting_says_so(
    fleet: Fleet, tmp_path: Path
) -> None:
    queue = f"loja-{uuid.uuid4().hex[:10]}"
    assert await order_of(fleet.url("redis"), tmp_path, queue, redis_priority=True) == HIGHEST_FIRST


async def test_on_redis_tasks_stay_where_every_worker_of_celery_reads(fleet: Fleet) -> None:
    """Tasks with a priority would go to lists of their own, which depend on the worker's options."""
    url, queue = fleet.url("redis"), f"loja-{uuid.uuid4().hex[:10]}"
    async with Bridged(url, queue) as stage, Redis.from_url(url) as redis:
        await stage.is_connected()
        await submit_each(stage, "celery://loja.anotar")

        async def all_wait() -> bool:
            return bool(await redis.llen(queue) == len(ASKED))

        await until(all_wait, within=20, saying="all tasks to wait in the one list")


# -- BullMQ ----------------------------------------------------------------------------------------------------------


QUEUE = "images-queue"
NODE = [
    pytest.param(False, "worker.mjs", id="bullmq"),
    pytest.param(True, "bull_worker.mjs", id="bull", marks=pytest.mark.long),
]


async def jobs_in_order(fleet: Fleet, tmp_path: Path, script: str, to: str, **bullmq: Any) -> Sequence[int]:
    """Return the order in which a Node worker takes the jobs that wait when it starts."""
    expect_node(fleet)
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"), **bullmq)
    async with BullStage(settings) as oraculo:
        runs = await submit_each(oraculo, to)

        async def all_wait() -> bool:
            return len(await oraculo.job_ids(QUEUE)) == len(ASKED)

        await until(all_wait, within=20, saying="all jobs to wait")
        async with working(node_worker(settings, tmp_path, QUEUE, options={"concurrency": 1}, script=script)):
            for run in runs:
                assert (await oraculo.ended(run, wait=20))["status"] == "concluida"
    return [int(line["dados"]["text"]) for line in journal(tmp_path)]


@pytest.mark.parametrize(("legacy", "script"), NODE)
async def test_a_node_worker_takes_the_higher_first(fleet: Fleet, tmp_path: Path, legacy: bool, script: str) -> None:
    found = await jobs_in_order(fleet, tmp_path, script, f"bullmq://{QUEUE}", legacy=legacy)
    assert found == HIGHEST_FIRST


async def test_a_queue_of_ours_that_goes_on_to_bullmq_hands_the_priority_on_too(fleet: Fleet, tmp_path: Path) -> None:
    assert await jobs_in_order(fleet, tmp_path, "worker.mjs", QUEUE, queues=(QUEUE,)) == HIGHEST_FIRST


@pytest.mark.parametrize("legacy", [False, True], ids=["bullmq", "bull"])
async def test_without_priorities_jobs_wait_as_the_applications_own_do(fleet: Fleet, legacy: bool) -> None:
    async with BullStage(bull_settings("memory://", fleet.url("redis"), priority=False, legacy=legacy)) as oraculo:
        await submit_each(oraculo, f"bullmq://{QUEUE}")

        async def all_wait() -> bool:
            return bool(await oraculo.redis.llen(oraculo.key(QUEUE, "wait")) == len(ASKED))

        await until(all_wait, within=20, saying="all jobs to wait in the one list")
        assert not await oraculo.redis.exists(oraculo.key(QUEUE, "prioritized"), oraculo.key(QUEUE, "priority"))
