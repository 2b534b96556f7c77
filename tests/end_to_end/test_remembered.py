"""Queues that only requests name are shown by an engine that did not send to them: one that was started again, or
another that shares the store."""

from pathlib import Path
from typing import Any

import pytest

from oraculo.engine.queues import remembered
from oraculo.ports.broker_admin import QueueState
from oraculo.stores.sqlite import SqliteStore
from oraculo.worker import App, Context, DoNotRetry
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import BROKERS, Fleet
from tests.waiting import until

bad = App("bad")


@bad.queue("executador_ruim")
async def fail(_: Any, __: Context) -> None:
    raise DoNotRetry("never")


async def states(stage: Stage) -> dict[str, QueueState]:
    return {stage.operations.queue_name(state): state for state in await stage.operations.queues()}


@pytest.mark.parametrize("broker", BROKERS)
async def test_they_are_shown_after_a_restart(broker: str, fleet: Fleet, tmp_path: Path) -> None:
    settings, store = settings_for(fleet.url(broker)), tmp_path / "oraculo.db"
    async with Stage(settings, bad, store=SqliteStore(str(store))) as first:
        waiting = await first.submit({"destinos": ["executador_de_ninguem"], "payload": {}, "timeout": 300})
        await first.run({"destinos": ["executador_ruim"], "payload": {}, "timeout": 30})

        async def is_buried() -> bool:
            return (await states(first))["executador_ruim"].dead_letters == 1

        await until(is_buried, saying="the dead letter")
    async with Stage(settings, store=SqliteStore(str(store))) as second:

        async def are_shown() -> bool:
            return {"executador_ruim", "executador_de_ninguem"} <= (await states(second)).keys()

        await until(are_shown, saying="the queues")
        seen = await states(second)
        assert (seen["executador_ruim"].ready, seen["executador_ruim"].dead_letters) == (0, 1)
        assert seen["executador_de_ninguem"].ready == 1
        await second.operations.cancel(waiting)


async def test_another_engine_learns_of_them(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "LOOK_EVERY", 0.1)
    settings, store = settings_for(fleet.url("rabbitmq")), tmp_path / "oraculo.db"
    async with (
        Stage(settings, bad, store=SqliteStore(str(store))) as one,
        Stage(settings, store=SqliteStore(str(store))) as other,
    ):
        await one.run({"destinos": ["executador_ruim"], "payload": {}, "timeout": 30})

        async def is_shown() -> bool:
            found = (await states(other)).get("executador_ruim")
            return found is not None and found.dead_letters == 1

        await until(is_shown, saying="the dead letter")


async def test_one_that_is_served_may_be_meant_after_a_restart(fleet: Fleet, tmp_path: Path) -> None:
    settings, store = settings_for(fleet.url("rabbitmq")), tmp_path / "oraculo.db"
    async with Stage(settings, store=SqliteStore(str(store))) as first:
        waiting = await first.submit({"destinos": ["executador_podcast"], "payload": {}, "timeout": 300})
        await first.listen_on("executador_podcast")
        await until(
            lambda: first.engine.parts.queues.served.near("executador_podcats"), saying="the command and its worker"
        )
    async with Stage(settings, store=SqliteStore(str(store))) as second:
        await second.listen_on("executador_podcast")
        aggregate = await second.run({"destinos": ["executador_podcats"], "timeout": 3})
        assert aggregate["falhas"]["executador_podcats"]["motivo"].endswith("did you mean 'executador_podcast'?")
        await second.operations.cancel(waiting)
