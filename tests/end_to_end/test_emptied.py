"""A broker that comes back empty, as a container does without its volume: what it had taken is sent again."""

import asyncio
from pathlib import Path

import pytest

from oraculo.bootstrap import make_broker
from oraculo.engine.cluster import broker_watch
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.wire.naming import QueueNames
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, recording_app
from tests.servers.fleet import BROKERS, REDIS_FIRST, Fleet
from tests.waiting import until

QUEUE = "executador_a"
REQUEST = {"destinos": [QUEUE], "payload": {}, "timeout": 60}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_watch, "GRACE", 0.1)


@pytest.mark.parametrize("name", BROKERS)
async def test_while_the_engine_was_down(name: str, fleet: Fleet, tmp_path: Path) -> None:
    settings, path = settings_for(fleet.url(name)), str(tmp_path / "oraculo.db")
    async with Stage(settings, store=SqliteStore(path)) as before:
        run_id = await before.submit(REQUEST)
        await until(lambda: is_sent(before, run_id))
        await until(lambda: is_marked(before))
    await empty(settings)
    async with Stage(settings, recording_app(Journal(), (QUEUE,)), store=SqliteStore(path)) as after:
        async with asyncio.timeout(20):
            assert (await after.ended(run_id))["status"] == "concluida"
        await until(lambda: is_marked(after))


@pytest.mark.parametrize("name", REDIS_FIRST)
async def test_while_the_engine_runs(name: str, fleet: Fleet) -> None:
    settings = settings_for(fleet.url(name))
    async with Stage(settings) as oraculo:
        run_id = await oraculo.submit(REQUEST)
        await until(lambda: is_sent(oraculo, run_id))
        await until(lambda: is_marked(oraculo))
        await empty(settings)
        async with asyncio.timeout(20):
            await oraculo.next_on(QUEUE)
        await until(lambda: is_marked(oraculo))


async def test_nothing_is_sent_again_after_a_mere_restart(fleet: Fleet, tmp_path: Path) -> None:
    settings, path = settings_for(fleet.url("rabbitmq")), str(tmp_path / "oraculo.db")
    async with Stage(settings, store=SqliteStore(path)) as before:
        run_id = await before.submit(REQUEST)
        await until(lambda: is_sent(before, run_id))
        await until(lambda: is_marked(before))
    async with Stage(settings, store=SqliteStore(path)) as after:
        await after.submit(REQUEST)
        await until(lambda: is_marked(after))
        await until(lambda: waits(after, 2))


async def test_the_mark_is_of_no_interest_to_people(fleet: Fleet) -> None:
    async with Stage(settings_for(fleet.url("redis"))) as oraculo:
        await until(lambda: is_marked(oraculo))
        shown = {oraculo.operations.queue_name(state) for state in await oraculo.operations.queues()}
        assert "resultados" in shown
        assert not any("memoria" in queue for queue in shown)


async def empty(settings: Settings) -> None:
    """And clients and workers are back before any engine, with requests and answers."""
    names, broker = QueueNames(settings.broker.prefix), make_broker(settings, SystemClock())
    await broker.start()
    await broker.remove([names.requests, names.answers, names.physical(QUEUE), names.memory])
    await broker.declare([names.requests, names.answers])
    await broker.close()


async def is_sent(oraculo: Stage, run_id: str) -> bool:
    return not (await oraculo.store.load([run_id]))[run_id].tasks[0].unsent


async def is_marked(oraculo: Stage) -> bool:
    return any(state.ready for state in await oraculo.broker.queues([oraculo.engine.parts.queues.names.memory]))


async def waits(oraculo: Stage, count: int) -> bool:
    [state] = await oraculo.broker.queues([oraculo.engine.parts.queues.names.physical(QUEUE)])
    return state.ready == count
