"""Queues that were made for requests are removed once nobody uses them; all others stay."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from oraculo.engine.queues.removal import NotedQueues
from oraculo.settings import QueueSettings
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import Fleet
from tests.waiting import until

SERVERS = ("rabbitmq", "redis", "nats")
PIPELINE = b'{"name": "p", "steps": [{"type": "BOM", "queue": "de-pipeline"}]}'


@pytest.fixture
async def stage(request: pytest.FixtureRequest, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """It looks for unused queues when a test tells it to, and never by itself."""
    monkeypatch.setattr(NotedQueues, "run", asyncio.Event().wait)
    settings = settings_for(fleet.url(getattr(request, "param", "rabbitmq")))
    settings = msgspec.structs.replace(settings, queues=QueueSettings(remove_after=0.5))
    async with Stage(settings) as stage:
        yield stage


async def submit(stage: Stage, queue: str, **more: Any) -> None:
    await stage.submit({"destinos": [queue], "timeout": 300, **more})


async def take(stage: Stage, queue: str) -> None:
    """As a worker that comes after a message, and goes when it has it: else the worker would make the queue."""

    async def has_message() -> bool:
        states = await stage.broker.queues([stage.engine.names.physical(queue)])
        return any(state.ready for state in states)

    await until(has_message)
    consumer = await stage.listen_on(queue)
    await consumer.ack(await asyncio.wait_for(consumer.take(1), 10))
    await consumer.close()


async def there(stage: Stage, *queues: str) -> set[str]:
    names = stage.engine.names
    states = await stage.broker.queues(list(map(names.physical, queues)))
    return {names.logical(state.queue) for state in states}


async def look(stage: Stage) -> None:
    for broker in stage.broker.behind():
        await stage.engine.made_queues.look_through(broker)


async def until_gone(stage: Stage, *queues: str) -> None:
    async def are_gone() -> bool:
        await look(stage)
        return not await there(stage, *queues)

    await until(are_gone, within=20, saying=f"the removal of {', '.join(queues)}")


@pytest.mark.parametrize("stage", SERVERS, indirect=True)
async def test_an_unused_queue_is_removed_and_is_made_again_when_it_is_named(stage: Stage) -> None:
    for _ in range(2):
        await submit(stage, "nova")
        await take(stage, "nova")
        await until_gone(stage, "nova")


@pytest.mark.parametrize("stage", SERVERS, indirect=True)
async def test_a_queue_that_is_in_use_or_is_somebodys_own_stays(stage: Stage) -> None:
    await stage.broker.declare([stage.engine.names.physical("antiga")])
    await stage.operations.put_pipeline("p", PIPELINE)
    for queue in ("antiga", "nova"):
        await submit(stage, queue)
        await take(stage, queue)
    await submit(stage, "com-mensagem")
    await until_gone(stage, "nova")
    kept = {"antiga", "com-mensagem", "de-pipeline"}
    assert await there(stage, *kept) == kept


@pytest.mark.parametrize("stage", ["rabbitmq", "redis"], indirect=True)
async def test_a_queue_that_a_worker_read_at_a_look_is_the_workers_own(stage: Stage) -> None:
    await submit(stage, "de-trabalhador")
    await until(lambda: there(stage, "de-trabalhador"))
    worker = await stage.listen_on("de-trabalhador")
    await worker.ack(await worker.take(1))

    async def is_seen() -> bool:
        [state] = await stage.broker.queues([stage.engine.names.physical("de-trabalhador")])
        return bool(state.consumers)

    await until(is_seen)
    await look(stage)
    await worker.close()
    await submit(stage, "nova")
    await take(stage, "nova")
    await until_gone(stage, "nova")
    assert await there(stage, "de-trabalhador")


@pytest.mark.parametrize("stage", SERVERS, indirect=True)
async def test_queues_of_replies_and_of_deleted_pipelines_are_removed_too(stage: Stage) -> None:
    await stage.operations.put_pipeline("p", PIPELINE)
    await stage.operations.delete_pipeline("p")
    await stage.submit({"destinos": ["ninguem"], "responder_em": "respostas", "timeout": 0.1})
    await take(stage, "respostas")
    await until_gone(stage, "de-pipeline", "respostas")


@pytest.mark.parametrize("stage", ["redis"], indirect=True)
async def test_a_queue_of_replies_in_use_stays_though_no_look_finds_a_message(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.engine.made_queues, "_after", 2.0)
    monkeypatch.setattr(stage.engine.known_queues, "_lasting", 1.0)
    until_then = asyncio.get_running_loop().time() + 3.0
    while asyncio.get_running_loop().time() < until_then:
        await stage.submit({"destinos": ["ninguem"], "responder_em": "respostas", "timeout": 0.1})
        await take(stage, "respostas")
        await look(stage)
        assert await there(stage, "respostas")


async def test_rabbitmq_keeps_them_while_another_engine_may_send_there(stage: Stage) -> None:
    await submit(stage, "nova")
    await take(stage, "nova")
    peers = stage.engine.peers
    peers.has_apis_beside = True
    for _ in range(20):
        await look(stage)
        await asyncio.sleep(0.05)
    assert await there(stage, "nova")
    peers.has_apis_beside = False
    await until_gone(stage, "nova")


async def test_what_is_sent_while_rabbitmq_removes_a_queue_waits_and_is_not_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_removing, goes_on = asyncio.Event(), asyncio.Event()
    [broker] = stage.broker.behind()
    remove = broker.remove

    async def slowly_removed(queues: Sequence[str]) -> Sequence[str]:
        is_removing.set()
        await goes_on.wait()
        await remove(queues)  # whatever came meanwhile
        return queues

    monkeypatch.setattr(broker, "remove_unused", slowly_removed)
    await submit(stage, "nova")
    await take(stage, "nova")

    async def begins() -> bool:
        looking = asyncio.create_task(look(stage))
        waiting = asyncio.create_task(is_removing.wait())
        await asyncio.wait({looking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return is_removing.is_set()

    await until(begins)
    await submit(stage, "nova")
    await asyncio.sleep(0.2)  # in which it would be sent
    goes_on.set()
    await take(stage, "nova")
