"""Why a Celery task failed: no pickle is read for it, the events of the workers say it."""

import asyncio
import pickle
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kombu
import pytest

from oraculo.bridges.celery import reasons
from oraculo.bridges.celery.reasons import FailureReasons
from oraculo.bridges.celery.reports import NO_REASON, PICKLED
from oraculo.bridges.celery.tasks import FAILED, RETURNED
from tests.bridges.celery_stage import Bridged, CeleryWorker, replies_of
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(90)

# Seven bytes that make pickle ask for 2 GB.
BOMB = b"Nr\xff\xff\xff\x07."


# -- a report and its event ------------------------------------------------------------------------------------------


async def test_the_event_may_come_before_the_report() -> None:
    found = FailureReasons()
    found.note("a", "ValueError", "x")
    assert await found.of("a") == ("ValueError", "x")


async def test_the_event_may_come_after_the_report() -> None:
    found = FailureReasons()
    waiting = asyncio.create_task(found.of("a"))
    await asyncio.sleep(0)
    found.note("b", "KeyError", "y")
    found.note("a", "ValueError", "x")
    assert await waiting == ("ValueError", "x")


async def test_without_events_nothing_waits() -> None:
    assert await asyncio.wait_for(FailureReasons(patience=0).of("a"), 1) is None


async def test_workers_that_send_no_events_hold_up_one_failure_and_not_each() -> None:
    found = FailureReasons(patience=0.05)
    assert await found.of("a") is None
    found._patience = 3600.0
    assert await asyncio.wait_for(found.of("b"), 1) is None
    found.note("c", "ValueError", "x")  # they do now
    waiting = asyncio.create_task(found.of("d"))
    await asyncio.sleep(0)
    found.note("d", "ValueError", "x")
    assert await waiting == ("ValueError", "x")


async def test_of_ever_new_failures_not_all_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "_MOST_KEPT", 3)
    found = FailureReasons(patience=0)
    for task_id in "abcd":
        found.note(task_id, "ValueError", "x")
    assert await found.of("a") is None
    assert await found.of("d") == ("ValueError", "x")


async def test_a_report_that_is_given_up_leaves_nothing_behind() -> None:
    found = FailureReasons()
    waiting = asyncio.create_task(found.of("a"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not found._awaited


# -- a worker whose app writes pickle --------------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
async def test_an_app_that_writes_pickle_needs_no_change(fleet: Fleet, tmp_path: Path, broker: str) -> None:
    pickled = {"CELERY_SERIALIZER": "pickle", "C_FORCE_ROOT": "1"}  # Celery refuses it to root otherwise
    worker = CeleryWorker(fleet.url(broker), tmp_path / "log", "-c", "1", "-E", **pickled)
    worker.start()
    try:
        await worker.is_ready()
        async with Bridged(worker.broker, worker.queue) as stage:
            await stage.is_heard()
            found = await stage.task("celery://loja.somar", {"a": 2})
            assert found["resultados"]["t"]["resultado"] == {"soma": 2}
            found = await stage.task("celery://loja.falhar")
            assert found["falhas"]["t"]["motivo"] == "ValueError: não há estoque"
        async with Bridged(worker.broker, worker.queue, events=False) as stage:
            await stage.is_heard()
            found = await stage.task("celery://loja.falhar")
            assert found["falhas"]["t"]["motivo"] == NO_REASON
    finally:
        worker.kill()


# -- a pickle among the replies --------------------------------------------------------------------------------------


@pytest.fixture
async def stage(fleet: Fleet) -> AsyncIterator[Bridged]:
    async with Bridged(fleet.url("rabbitmq"), f"loja-{uuid.uuid4().hex[:10]}", events=False) as made:
        await made.is_heard()
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


async def task_id(stage: Bridged) -> str:
    """The id of the task that is on Celery's queue."""
    queue = stage.settings.celery.queue
    with kombu.Connection(stage.settings.celery.broker_url) as connection:

        def found() -> Any:
            try:
                with connection.channel() as channel:  # type: ignore[attr-defined, unused-ignore]
                    return kombu.Queue(queue, channel=channel).get(no_ack=True)
            except connection.channel_errors:
                return None  # the queue is not there yet

        message = await until(found, saying="the task")
    return str(message.headers["id"])


@pytest.mark.parametrize("task", [FAILED, RETURNED])
async def test_a_task_that_answered_with_pickle_says_so(stage: Bridged, task: str) -> None:
    run = await stage.submit({"destinos": [{"id": "t", "fila": "celery://loja.somar"}], "timeout": 30})
    reply(stage, BOMB, task=task, parent_id=await task_id(stage))
    found = await stage.ended(run)
    assert found["falhas"]["t"]["motivo"] == PICKLED
    await until(lambda: replies_of(stage)() == 0, saying="the report to be acked")


@pytest.mark.parametrize("body", [BOMB, pickle.dumps([["x"], {}, {}])])
async def test_a_pickle_that_no_task_sent_rests_in_the_dead_letters(stage: Bridged, body: bytes) -> None:
    reply(stage, body, task=FAILED, parent_id="unknown")

    async def letters() -> Any:
        return await stage.broker.dead_letters(f"{stage.settings.broker.prefix}ponte-celery", limit=10)

    [letter] = await until(letters, saying="the dead letter")
    assert PICKLED in letter.reason
    assert letter.body == body
    await until(lambda: replies_of(stage)() == 0, saying="the report to be acked")
