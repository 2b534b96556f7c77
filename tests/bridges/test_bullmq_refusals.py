"""BullMQ's Redis refuses: steps wait while it refuses all of them, and one refused queue holds up no other."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from bullmq import Queue
from redis.asyncio import Redis

from oraculo.bridges.bullmq import BullmqBridge
from oraculo.bridges.bullmq.results import SEND_BYTES
from oraculo.brokers.failover import FailoverBroker
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.ports.store import Store
from oraculo.ports.telemetry import LoopFailed
from oraculo.settings import Settings
from tests.bridges.node.stage import Aloud, BullStage, bull_settings
from tests.brokers.failover_stage import Named
from tests.servers.fleet import Fleet
from tests.waiting import until

GOOD, BAD = "boa", "ruim"
USER = "aplicacao"
ROOT = Path(__file__).parents[2]

Act = Callable[[Redis], Awaitable[Any]]


def to(*queues: str) -> dict[str, Any]:
    return {"destinos": [{"id": queue, "fila": f"bullmq://{queue}"} for queue in queues], "timeout": 60}


def as_user(settings: Settings) -> Settings:
    url = settings.bullmq.url.replace("redis://", f"redis://{USER}:pw@")
    return msgspec.structs.replace(settings, bullmq=msgspec.structs.replace(settings.bullmq, url=url))


@asynccontextmanager
async def open_to_all(url: str) -> AsyncIterator[Redis]:
    """Give out a client, and undo what the test did to the server."""
    async with Redis.from_url(url) as redis:
        try:
            yield redis
        finally:
            await redis.config_set("maxmemory", "0")
            await redis.execute_command("REPLICAOF", "NO", "ONE")
            await redis.execute_command("ACL", "DELUSER", USER)


async def works(oraculo: BullStage, queue: str, value: object = "feito") -> None:
    """Do the queue's one job, as a worker that keeps no jobs."""
    [job_id] = await until(lambda: oraculo.job_ids(queue), saying="the job")
    event = {"event": "completed", "jobId": job_id, "returnvalue": json.dumps(value)}
    await oraculo.redis.xadd(oraculo.key(queue, "events"), event)


# -- to everything --------------------------------------------------------------------------------------------


def _replica(of: tuple[str, str]) -> Act:
    return lambda redis: redis.execute_command("REPLICAOF", *of)


def _permitted(pattern: str) -> Act:
    return lambda redis: redis.execute_command("ACL", "SETUSER", USER, "on", ">pw", "resetkeys", pattern, "&*", "+@all")


@pytest.mark.parametrize(
    ("breaks", "mends", "reason"),
    [
        (
            lambda redis: redis.config_set("maxmemory", "1"),
            lambda redis: redis.config_set("maxmemory", "0"),
            "maxmemory",
        ),
        (_replica(("127.0.0.1", "1")), _replica(("NO", "ONE")), "read only replica"),
        (_permitted("~none"), _permitted("~*"), "ermission"),
    ],
    ids=["OOM", "READONLY", "NOPERM"],
)
async def test_steps_wait_for_a_redis_that_takes_no_writes(breaks: Act, mends: Act, reason: str, fleet: Fleet) -> None:
    settings = bull_settings(fleet.url("rabbitmq"), fleet.breakable("redis").url)
    async with open_to_all(settings.bullmq.url) as redis:
        await _permitted("~*")(redis)
        async with BullStage(as_user(settings)) as oraculo:
            await until(lambda: oraculo.bridge.trouble is None, saying="the bridge to be well")
            await breaks(redis)
            run_id = await oraculo.submit(to(GOOD))
            trouble = await until(lambda: oraculo.bridge.trouble, saying="the bridge to report it")
            assert reason in trouble
            assert "ponte-bullmq:watch" in trouble
            assert (await oraculo.operations.run(run_id)).head.status.value == "em_execucao"
            await mends(redis)
            await works(oraculo, GOOD)
            aggregate = await oraculo.ended(run_id, wait=20)
            await until(lambda: oraculo.bridge.trouble is None, saying="the bridge to be well again")
    assert aggregate["resultados"][GOOD]["resultado"] == "feito", aggregate


async def test_the_entry_lets_a_redis_that_takes_no_writes_rest(fleet: Fleet) -> None:
    """BullMQ's own worker would ask ten times a second for each of the jobs that it may take, and log each refusal."""
    url, places = fleet.breakable("redis").url, 20
    settings = bull_settings("memory://", url, entry="entrada", concurrency=places)
    async with open_to_all(url) as redis, BullStage(settings) as oraculo:

        async def looks() -> int:
            stats = await redis.info("commandstats")
            return int(stats.get("cmdstat_zadd", {}).get("rejected_calls", 0))

        def refusals() -> list[LoopFailed]:
            return [one for one in oraculo.aloud.failures if one.duty.startswith("bridge bullmq entry ")]

        await until(lambda: oraculo.bridge.trouble is None, saying="the bridge to be well")
        await redis.config_resetstat()
        await _replica(("127.0.0.1", "1"))(redis)
        entrance = Queue("entrada", {"connection": oraculo.redis, "prefix": settings.bullmq.prefix})
        await until(refusals, saying="the entry to be refused")
        seen = await looks()
        await until(lambda: _at_least(looks, seen + 3), saying="the bridge to have looked for some seconds")
        assert len(refusals()) <= 2 * places
        await _replica(("NO", "ONE"))(redis)
        await entrance.add("novo", {"pipelineName": "nenhum", "payload": {}})
        await until(lambda: oraculo.redis.zcard(oraculo.key("entrada", "failed")), saying="the job to be taken")


async def _at_least(count: Callable[[], Awaitable[int]], least: int) -> bool:
    return await count() >= least


# -- to one queue ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prioritized", "events"])
async def test_a_key_of_another_kind_ends_its_step_and_holds_up_no_other_queue(name: str, fleet: Fleet) -> None:
    """The jobs of both queues are added in one transaction, which goes on past an error."""
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"))
    async with BullStage(settings) as oraculo:
        await oraculo.redis.set(oraculo.key(BAD, name), "x")
        run_id = await oraculo.submit(to(GOOD, BAD))
        await works(oraculo, GOOD)
        aggregate = await oraculo.ended(run_id, wait=20)
    assert aggregate["resultados"][GOOD]["resultado"] == "feito"
    assert aggregate["falhas"][BAD]["status"] == "erro"
    assert "WRONGTYPE" in aggregate["falhas"][BAD]["motivo"]


async def test_a_queue_that_can_no_longer_be_read_holds_up_no_other(fleet: Fleet) -> None:
    """Neither its events nor its ended jobs can be read when the next bridge starts; its step ends by its deadline."""
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"))
    async with BullStage(settings) as oraculo:
        run_id = await oraculo.submit({**to(GOOD, BAD), "timeout": 5})
        await until(lambda: oraculo.job_ids(BAD), saying="the job")
        for name in ("events", "completed"):
            await oraculo.redis.set(oraculo.key(BAD, name), "x")
        await oraculo.bridge.stop()
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()  # it sweeps at once
        await works(oraculo, GOOD)
        aggregate = await oraculo.ended(run_id, wait=20)
        assert oraculo.key(BAD, "events") in (oraculo.bridge.shortfall or "")
    assert aggregate["resultados"][GOOD]["resultado"] == "feito"
    assert aggregate["falhas"][BAD]["status"] == "timeout"


async def test_a_queue_that_the_user_may_not_touch_holds_up_no_other(fleet: Fleet) -> None:
    settings = bull_settings(fleet.url("rabbitmq"), fleet.breakable("redis").url)
    async with open_to_all(settings.bullmq.url) as redis:
        await _permitted(f"~{settings.bullmq.prefix}:{GOOD}:*")(redis)
        await redis.execute_command("ACL", "SETUSER", USER, "~oraculo:*")
        async with BullStage(as_user(settings)) as oraculo:
            run_id = await oraculo.submit(to(BAD, GOOD))
            await works(oraculo, GOOD)
            aggregate = await oraculo.ended(run_id, wait=20)
    assert aggregate["resultados"][GOOD]["resultado"] == "feito"
    assert "ermission" in aggregate["falhas"][BAD]["motivo"], aggregate


@pytest.mark.parametrize("legacy", [False, True])
async def test_the_documented_rights_suffice(legacy: bool, fleet: Fleet) -> None:
    page = (ROOT / "docs" / "reference" / "limits-bridges.md").read_text("utf-8")
    rights, of_old_bull = re.findall(r"ACL needs (`[^.,]+`)", page)
    settings = bull_settings("memory://", fleet.breakable("redis").url, legacy=legacy)
    needed = (rights + of_old_bull if legacy else rights).replace("bull:", f"{settings.bullmq.prefix}:")
    granted = re.findall(r"`([~&][^`]+)`", needed)
    async with open_to_all(settings.bullmq.url) as redis:
        await redis.execute_command("ACL", "SETUSER", USER, "on", ">pw", "resetchannels", *granted, "+@all")
        async with BullStage(as_user(settings)) as oraculo:
            await oraculo.submit(to(GOOD))
            await until(lambda: oraculo.job_ids(GOOD), saying="the job")
    assert not oraculo.aloud.failures


# -- several brokers ------------------------------------------------------------------------------------------


async def test_an_answer_goes_back_by_the_broker_that_brought_its_command(fleet: Fleet) -> None:
    second = Named("segundo")
    both = FailoverBroker([Named("primeiro"), second])
    await both.start()
    settings, unread = bull_settings("memory://", fleet.url("redis")).bullmq, cast("Store", None)
    bridge = BullmqBridge(settings, both, "", SystemClock(), SystemEntropy(), Aloud(), unread, None)
    await bridge.start()
    late = {"correlation_id": settings.prefix, "tipo_evento": "iniciar_execucao", "timestamp": "2026-01-01T00:00:00Z"}
    late |= {"prazo": "2026-01-01T00:00:00Z", "responder_em": "aqui", "ponte": {"tipo": "bullmq", "alvo": GOOD}}
    await publish_all(second, [Outgoing("ponte-bullmq", json.dumps(late | {"payload": {}}).encode())])
    [answer] = await asyncio.wait_for((await second.consume("aqui", prefetch=1)).take(1), 10)
    assert b"deadline passed" in answer.body
    await bridge.stop()
    await both.close()


# -- large results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found_by", ["events", "sweep", "search"])
async def test_large_results_are_published_by_the_megabyte(found_by: str, fleet: Fleet) -> None:
    settings = bull_settings(fleet.url("rabbitmq"), fleet.url("redis"))
    async with BullStage(settings) as oraculo:
        steps = [{"id": f"t{n}", "fila": f"bullmq://{GOOD}"} for n in range(16)]
        run_id = await oraculo.submit({"destinos": steps, "timeout": 60})
        await until(lambda: _are(oraculo, len(steps)), saying="the jobs")
        await oraculo.bridge.stop()
        await _end_all(oraculo, json.dumps("x" * (SEND_BYTES // 4)), found_by)
        together: list[int] = []
        publish = oraculo.broker.publish

        async def watched(messages: Sequence[Outgoing]) -> Sequence[str]:
            together.append(sum(len(message.body) for message in messages))
            return await publish(messages)

        oraculo.broker.publish = watched  # type: ignore[method-assign]
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        aggregate = await oraculo.ended(run_id, wait=20)
    assert len(aggregate["resultados"]) == len(steps), aggregate["resumo"]
    assert max(together) < 1.5 * SEND_BYTES


async def _are(oraculo: BullStage, count: int) -> bool:
    return len(await oraculo.job_ids(GOOD)) == count


async def _end_all(oraculo: BullStage, value: str, found_by: str) -> None:
    """End all jobs of the queue, so that only what `found_by` looks at shows it."""
    stream = oraculo.key(GOOD, "events")
    for job_id in await oraculo.job_ids(GOOD):
        if found_by == "sweep":
            await oraculo.redis.hset(oraculo.key(GOOD, job_id), "returnvalue", value)
            await oraculo.redis.zadd(oraculo.key(GOOD, "completed"), {job_id: 1})
            continue
        await oraculo.redis.xadd(stream, {"event": "completed", "jobId": job_id, "returnvalue": value})
        if found_by == "search":
            await oraculo.redis.delete(oraculo.key(GOOD, job_id))
    if found_by == "search":  # another reader took the events and died with them
        group = f"oraculo-{oraculo.settings.broker.prefix}"
        await oraculo.redis.xgroup_destroy(stream, group)
        await oraculo.redis.xgroup_create(stream, group, id="$")
