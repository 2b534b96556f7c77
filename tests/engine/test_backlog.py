"""After a restart the commands that wait go out in the order of the age of their runs, before those of newer runs."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.run import Run, RunHead
from oraculo.engine.send import publisher
from oraculo.errors import StoreUnavailable
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Store, Unsent
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.redis import RedisStore
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from oraculo.testing.store_runs import create, make_run
from tests.stores import redis_stage
from tests.stores.started import started
from tests.waiting import until

plain, namespace, redis_url = redis_stage.plain, redis_stage.namespace, redis_stage.url

HELD = 3000


class Recording(MemoryBroker):
    """`delay`: seconds that it takes to confirm."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(clock=SystemClock())
        self.delay = delay
        self.order: list[str] = []  # the runs whose commands went out

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        await asyncio.sleep(self.delay)
        self.order += [msgspec.json.decode(message.body)["correlation_id"] for message in messages]
        return await super().publish(messages)


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "o.db") if request.param == "sqlite" else str(request.getfixturevalue("redis_url"))


def opened(url: str) -> Store:
    return RedisStore(url) if url.startswith("redis:") else SqliteStore(url)


def held_run(place: int, **fields: Any) -> Run:
    """One that was created a while ago, the higher its place the later. Its id tells nothing of its age."""
    destinations = {"destinos": ["executador_velho"], "timeout": 7200} | fields
    return make_run(uuid.uuid5(uuid.NAMESPACE_OID, str(place)).hex, now=time.time() - 3600 + place, **destinations)


async def hold(store_url: str, runs: Sequence[Run]) -> list[str]:
    """Store runs whose commands nobody has sent."""
    async with started(opened(store_url)) as store:
        for start in range(0, len(runs), 500):
            await create(store, *runs[start : start + 500])
    return [run.id for run in runs]


@pytest.mark.parametrize("delay", [0.0, 0.02])
async def test_held_runs_go_out_by_their_age_and_before_newer_ones(
    store_url: str, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "PUBLISHED_TOGETHER", 100)
    held = await hold(store_url, [held_run(place) for place in range(HELD)])
    broker = Recording(delay)
    async with Harness(broker=broker, store=opened(store_url)) as oraculo:
        new = [await oraculo.submit({"destinos": ["executador_velho"]}) for _ in range(20)]
        await until(lambda: len(broker.order) == HELD + len(new))
    assert broker.order[:HELD] == held
    assert set(broker.order[HELD:]) == set(new)


async def test_held_runs_that_the_line_has_no_room_for_still_go_out_by_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "MAX_WAITING", 1500)
    url = str(tmp_path / "o.db")
    held = await hold(url, [held_run(place) for place in range(HELD)])
    broker, settings = Recording(0.1), Settings(engine=EngineSettings(poll=0.05))
    async with Harness(broker=broker, store=opened(url), settings=settings) as oraculo:
        new = await oraculo.submit({"destinos": ["executador_velho"]})
        await until(lambda: new in broker.order)
    assert broker.order == [*held, new]


async def test_a_new_small_run_waits_for_a_part_of_held_wide_ones(store_url: str) -> None:
    wide = [{"fila": "executador_velho", "id": f"t{number}"} for number in range(2000)]
    await hold(store_url, [held_run(place, destinos=wide) for place in range(5)])
    broker = Recording()
    async with Harness(broker=broker, store=opened(store_url)) as oraculo:
        new = await oraculo.submit({"destinos": ["executador_novo"]})
        await until(lambda: new in broker.order)
        await until(lambda: len(broker.order) == 10_001)
    assert broker.order.index(new) <= 2500


async def test_new_runs_to_another_queue_wait_until_the_held_ones_are_in_the_line(store_url: str) -> None:
    held = await hold(store_url, [held_run(place) for place in range(HELD)])
    broker = Recording()
    async with Harness(broker=broker, store=opened(store_url)) as oraculo:
        new = await oraculo.submit({"destinos": ["executador_novo"]})
        await until(lambda: new in broker.order)
    assert broker.order == [*held, new]


async def test_a_new_run_of_a_higher_priority_does_not_wait_for_held_ones(store_url: str) -> None:
    await hold(store_url, [held_run(place) for place in range(HELD)])
    broker = Recording()
    async with Harness(broker=broker, store=opened(store_url)) as oraculo:
        new = await oraculo.submit({"destinos": ["executador_novo"], "prioridade": 9})
        await until(lambda: new in broker.order)
    assert broker.order.index(new) < HELD


class Unsorted(SqliteStore):
    """Cannot tell the age of what nobody has sent."""

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        raise ValueError("a row that this version cannot read")


async def test_new_runs_do_not_wait_for_a_store_that_cannot_tell_what_is_held(tmp_path: Path) -> None:
    url = str(tmp_path / "o.db")
    await hold(url, [held_run(0)])
    broker = Recording()
    async with Harness(broker=broker, store=Unsorted(url)) as oraculo:
        new = await oraculo.submit({"destinos": ["executador_novo"]})
        await until(lambda: new in broker.order)


class Interrupted(SqliteStore):
    """Is away the first time that somebody asks what is unsent."""

    is_away = True

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        if self.is_away:
            self.is_away = False
            raise StoreUnavailable("away")
        return await super().unsent(limit, after)


async def test_an_engine_starts_though_the_store_is_away_for_a_moment(tmp_path: Path) -> None:
    url = str(tmp_path / "o.db")
    [held] = await hold(url, [held_run(0)])
    broker = Recording()
    async with Harness(broker=broker, store=Interrupted(url)):
        await until(lambda: held in broker.order)
