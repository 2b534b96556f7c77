"""Reasons of failed Celery tasks: the workers' events bring them, and no pickle is read."""

import asyncio
import pickle
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kombu
import pytest

from oraculo.bridges.celery.failure_reasons import FailureReasons
from oraculo.bridges.celery.replies import NO_REASON, PICKLED, Reason
from oraculo.bridges.celery.tasks import FAILED
from tests.bridges.celery_stage import Bridged, CeleryWorker, replies_of
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(90)

# Seven bytes that make pickle ask for 2 GB.
BOMB = b"Nr\xff\xff\xff\x07."


# -- a reply and its event -------------------------------------------------------------------------------------------

WRONG = Reason("ValueError", "x")


async def test_the_event_may_come_before_the_reply() -> None:
    reasons = FailureReasons()
    await reasons.note("a", WRONG)
    assert await reasons.of("a") == WRONG


async def test_the_event_may_come_after_the_reply() -> None:
    reasons = FailureReasons()
    waiting = asyncio.create_task(reasons.of("a"))
    await asyncio.sleep(0)
    await reasons.note("b", Reason("KeyError", "y"))
    await reasons.note("a", WRONG)
    assert await waiting == WRONG


async def test_without_events_nothing_waits() -> None:
    assert await asyncio.wait_for(FailureReasons(timeout=0).of("a"), 1) is None


# -- a worker whose app writes pickle --------------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
async def test_an_app_that_writes_pickle_needs_no_change(fleet: Fleet, tmp_path: Path, broker: str) -> None:
    pickled = {"CELERY_SERIALIZER": "pickle", "C_FORCE_ROOT": "1"}  # Celery refuses it to root otherwise
    worker = CeleryWorker(fleet.url(broker), tmp_path / "log", "-c", "1", "-E", **pickled)
    worker.start()
    try:
        await worker.is_ready()
        async with Bridged(worker.broker, worker.queue) as stage:
            await stage.reads_events()
            found = await stage.task("celery://loja.somar", {"a": 2})
            assert found["resultados"]["t"]["resultado"] == {"soma": 2}
            found = await stage.task("celery://loja.falhar")
            assert found["falhas"]["t"]["motivo"] == "ValueError: não há estoque"
        async with Bridged(worker.broker, worker.queue, events=False) as stage:
            await stage.is_connected()
            found = await stage.task("celery://loja.falhar")
            assert found["falhas"]["t"]["motivo"] == NO_REASON
    finally:
        worker.kill()


# -- a pickle among the replies --------------------------------------------------------------------------------------


@pytest.fixture
async def stage(fleet: Fleet) -> AsyncIterator[Bridged]:
    async with Bridged(fleet.url("rabbitmq"), f"loja-{uuid.uuid4().hex[:10]}", events=False) as made:
        await made.is_connected()
        yield made


def reply(stage: Bridged, body: bytes, **headers: Any) -> None:
    name = f"{stage.settings.broker.prefix}oraculo-respostas"
    with kombu.Connection(stage.settings.celery.broker_url) as connection:
        connection.Producer().publish(
            body,
            exchange=name,
            routing_key=name,
            content_type="application/x-python-serialize",
            content_encoding="binary",
            headers=headers,
        )


@pytest.mark.parametrize("body", [BOMB, pickle.dumps([["x"], {}, {}])])
async def test_a_pickle_is_dead_lettered_unread(stage: Bridged, body: bytes) -> None:
    reply(stage, body, task=FAILED, parent_id="unknown")

    async def letters() -> Any:
        return await stage.broker.dead_letters(f"{stage.settings.broker.prefix}ponte-celery", limit=10)

    [letter] = await until(letters, saying="the dead letter")
    assert PICKLED in letter.reason
    assert letter.body == body
    await until(lambda: replies_of(stage)() == 0, saying="the reply to be acked")
