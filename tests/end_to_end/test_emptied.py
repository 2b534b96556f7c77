"""A broker that comes back empty, as a container does without its volume: what it had taken is sent again."""

import asyncio
from pathlib import Path

import pytest

from oraculo.bootstrap import make_broker
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings
from oraculo.stores.sqlite import SqliteStore
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, recording_app
from tests.servers.fleet import BROKERS, Fleet
from tests.waiting import until

QUEUE = "executador_a"
REQUEST = {"destinos": [QUEUE], "payload": {}, "timeout": 60}


@pytest.mark.parametrize("name", BROKERS)
async def test_while_the_engine_was_down(name: str, fleet: Fleet, tmp_path: Path) -> None:
    settings, path = settings_for(fleet.url(name)), str(tmp_path / "oraculo.db")
    async with Stage(settings, store=SqliteStore(path)) as before:
        run_id = await before.submit(REQUEST)
        await until(lambda: is_sent(before, run_id))
    async with Stage(settings, store=SqliteStore(path)) as again:
        assert losses(again) == 0, "nothing was lost by a stop and a start"
    await empty(settings)
    async with Stage(settings, recording_app(Journal(), (QUEUE,)), store=SqliteStore(path)) as after:
        assert losses(after) == 1
        assert (await after.ended(run_id))["status"] == "concluida"


@pytest.mark.parametrize("name", BROKERS)
async def test_while_the_engine_runs(name: str, fleet: Fleet) -> None:
    settings = settings_for(fleet.url(name))
    async with Stage(settings) as oraculo:
        run_id = await oraculo.submit(REQUEST)
        await until(lambda: is_sent(oraculo, run_id))
        await empty(settings)
        async with asyncio.timeout(20):
            await oraculo.next_on(QUEUE)


async def empty(settings: Settings) -> None:
    """And a worker is back before any engine, with an answer."""
    prefix, broker = settings.broker.prefix, make_broker(settings, SystemClock())
    await broker.start()
    await broker.remove([prefix + queue for queue in ("orquestrador", "resultados", QUEUE)])
    await broker.declare([f"{prefix}resultados"])
    await broker.close()


async def is_sent(oraculo: Stage, run_id: str) -> bool:
    return not (await oraculo.store.load([run_id]))[run_id].tasks[0].unsent


def losses(oraculo: Stage) -> int:
    [link] = oraculo.broker.links()
    return link.losses
