"""The rights that the pages list suffice for the bridges, and `doctor` names the right that a user lacks."""

import asyncio
import re
import shlex
import uuid
from pathlib import Path

import pytest
from kombu import Connection
from redis.asyncio import Redis

from tests.bridges.celery_stage import ROOT, Bridged, CeleryWorker
from tests.bridges.node.stage import BullStage, bull_settings
from tests.bridges.test_bullmq_refusals import USER, as_user, open_to_all
from tests.cli.test_doctor import doctor
from tests.cli.test_rehearsal import rabbit_user
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
PAGE = (ROOT / "docs" / "reference" / "limits-bridges.md").read_text("utf-8")
OF_CELERYS_WORKER = r"^(QUEUE|.*celery\.pidbox|amq\.default)$|^celeryev|^reply\."


def bridge_rights(prefix: str, queue: str) -> list[str]:
    """Return the rights that the page lists: to configure, to write and to read."""
    (command,) = re.findall(r"^rabbitmqctl set_permissions -p vhost ponte (.*)$", PAGE, re.MULTILINE)
    named = (
        command.replace(r"loja\.", re.escape(prefix))
        .replace("|celery|", f"|{queue}|")
        .replace("|celery)", f"|{queue})")
    )
    return shlex.split(named)


# -- Celery, over RabbitMQ --------------------------------------------------------------------------------------------


async def test_celery_needs_what_the_page_lists(fleet: Fleet, tmp_path: Path) -> None:
    queue, prefix = f"q{uuid.uuid4().hex[:10]}", f"t{uuid.uuid4().hex[:10]}."
    theirs = OF_CELERYS_WORKER.replace("QUEUE", queue)
    writes = rf"{theirs}|^{re.escape(prefix)}oraculo-respostas$"
    worker = CeleryWorker(rabbit_user(fleet, theirs, writes, theirs), tmp_path / "worker.log", "-c", "1", queue=queue)
    ours = rabbit_user(fleet, *bridge_rights(prefix, queue))
    worker.start()
    try:
        await worker.is_ready()
        async with Bridged(ours, queue, prefix=prefix) as oraculo:
            await oraculo.is_connected()
            assert (await oraculo.task("celery://loja.somar", {"a": 1, "b": 2}))["status"] == "concluida"
            await until(lambda: oraculo.bridge.shortfall is None, saying="the events")
    finally:
        worker.kill()
    _, checks = await asyncio.to_thread(doctor, ORACULO_CELERY_BROKER_URL=ours, ORACULO_PREFIX=prefix)
    assert checks["celery"]["estado"] == "ok", checks["celery"]


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        (0, "Exchange.declare: .*access to exchange '.*oraculo-respostas'"),
        (1, "Queue.bind: .*access to queue '.*oraculo-respostas'"),
        (2, "Queue.bind: .*access to exchange '.*oraculo-respostas'"),
    ],
    ids=["configure", "write", "read"],
)
def test_doctor_finds_what_a_bridge_to_celery_lacks(lacking: int, told: str, fleet: Fleet) -> None:
    prefix = f"t{uuid.uuid4().hex[:10]}."
    rights = bridge_rights(prefix, "celery")
    rights[lacking] = "^nothing$"
    code, checks = doctor(ORACULO_CELERY_BROKER_URL=rabbit_user(fleet, *rights), ORACULO_PREFIX=prefix)
    assert code == 1
    assert re.search(told, checks["celery"]["detalhe"]), checks["celery"]


def test_doctor_finds_that_a_bridge_to_celery_may_not_send(fleet: Fleet) -> None:
    prefix = f"t{uuid.uuid4().hex[:10]}."
    configure, write, read = bridge_rights(prefix, "celery")
    url = rabbit_user(fleet, configure, write.replace(r"|amq\.default", ""), read)
    _, checks = doctor(ORACULO_CELERY_BROKER_URL=url, ORACULO_PREFIX=prefix)
    assert "access to exchange 'amq.default'" in checks["celery"]["detalhe"]


def test_doctor_leaves_a_report_that_waits_where_it_is(fleet: Fleet) -> None:
    prefix, url = f"t{uuid.uuid4().hex[:10]}.", fleet.url("rabbitmq")
    settings = {"ORACULO_CELERY_BROKER_URL": url, "ORACULO_PREFIX": prefix}
    doctor(**settings)
    with Connection(url) as connection:
        connection.Producer().publish({"um": "relato"}, routing_key=f"{prefix}oraculo-respostas")
        _, checks = doctor(**settings)
        assert checks["celery"]["estado"] == "ok", checks["celery"]
        channel = connection.channel()
        assert channel.queue_declare(f"{prefix}oraculo-respostas", passive=True).message_count == 1
        channel.queue_delete(f"{prefix}oraculo-respostas")
        channel.exchange_delete(f"{prefix}oraculo-respostas")


async def test_events_that_may_not_be_read_are_told_and_steps_go_on(fleet: Fleet) -> None:
    queue, prefix = f"q{uuid.uuid4().hex[:10]}", f"t{uuid.uuid4().hex[:10]}."
    rights = [right.replace("|^celeryev", "") for right in bridge_rights(prefix, queue)]
    async with Bridged(rabbit_user(fleet, *rights), queue, prefix=prefix) as oraculo:
        told = await until(lambda: oraculo.bridge.shortfall, saying="the shortfall")
        await oraculo.is_connected()
        assert "'celeryev'" in told
        assert "ORACULO_CELERY_EVENTS" in told
        health = await oraculo.engine.parts.health.look()
        assert health.parts["ponte celery"] == told
        assert health.is_ready


# -- BullMQ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ("~bull:* +@all", "oraculo:*: "),
        ("~oraculo:* +@all", "bull:orchestrator-queue:*: "),
        ("~oraculo:* ~bull:orchestrator-queue:* +@all", "bull:images:*: "),
        ("~oraculo:* ~bull:* +@all -evalsha", "evalsha"),
        ("~oraculo:* ~bull:* +@all -xreadgroup", "xreadgroup"),
        ("~oraculo:* ~bull:* +@all -@dangerous", None),
    ],
)
async def test_doctor_finds_what_a_bridge_to_bullmq_lacks(rules: str, told: str | None, fleet: Fleet) -> None:
    url = fleet.breakable("redis").url
    async with open_to_all(url) as redis:
        await redis.execute_command("ACL", "SETUSER", USER, "on", ">pw", "&*", *rules.split())
        before = await redis.dbsize()
        as_they = url.replace("redis://", f"redis://{USER}:pw@")
        _, checks = await asyncio.to_thread(doctor, ORACULO_BULLMQ_URL=as_they, ORACULO_BULLMQ_QUEUES="images")
        assert await redis.dbsize() == before
    assert checks["bullmq"]["estado"] == ("erro" if told else "ok"), checks["bullmq"]
    assert told is None or told in checks["bullmq"]["detalhe"]


@pytest.mark.parametrize("legacy", [False, True])
async def test_an_entry_that_may_not_be_read_is_told_until_it_may(
    legacy: bool, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.bridges.bullmq.server.REFUSED_FOR", 6.0)
    settings = bull_settings("memory://", fleet.breakable("redis").url, entry="entrada", legacy=legacy)
    async with open_to_all(settings.bullmq.url) as redis:
        await _may(redis, "~oraculo:*")
        async with BullStage(as_user(settings)) as oraculo:
            told = await until(lambda: oraculo.bridge.shortfall, saying="the shortfall")
            assert "entr" in told
            assert "ermission" in told
            await _may(redis, f"~{settings.bullmq.prefix}:*")
            await until(lambda: oraculo.bridge.shortfall is None, within=30, saying="the end of it")


async def _may(redis: Redis, keys: str) -> None:
    await redis.execute_command("ACL", "SETUSER", USER, "on", ">pw", keys, "&*", "+@all")
