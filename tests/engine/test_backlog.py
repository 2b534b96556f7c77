"""After a restart the commands that wait go out in the order of the age of their runs, before those of newer runs."""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.run import Run
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Store
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
    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.order: list[str] = []  # the runs whose commands went out

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
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


async def test_held_runs_go_out_by_their_age_and_before_newer_ones(store_url: str) -> None:
    held = await hold(store_url, [held_run(place) for place in range(HELD)])
    broker = Recording()
    async with Harness(broker=broker, store=opened(store_url)) as oraculo:
        new = [await oraculo.submit({"destinos": ["executador_novo"]}) for _ in range(20)]
        await until(lambda: len(broker.order) == HELD + len(new))
    assert broker.order[:HELD] == held
    assert set(broker.order[HELD:]) == set(new)


async def test_a_new_small_run_waits_for_a_part_of_held_wide_ones(store_url: str) -> None:
    wide = [{"fila": "executador_velho", "id": f"t{number}"} for number in range(2000)]
    await hold(store_url, [held_run(place, destinos=wide) for place in range(5)])
    broker = Recording()
    async with Harness(broker=broker, store=opened(store_url)) as oraculo:
        new = await oraculo.submit({"destinos": ["executador_novo"]})
        await until(lambda: new in broker.order)
        await until(lambda: len(broker.order) == 10_001)
    assert broker.order.index(new) <= 2500


async def test_a_new_run_of_a_higher_priority_does_not_wait_for_held_ones(store_url: str) -> None:
    await hold(store_url, [held_run(place) for place in range(HELD)])
    broker = Recording()
    async with Harness(broker=broker, store=opened(store_url)) as oraculo:
        new = await oraculo.submit({"destinos": ["executador_novo"], "prioridade": 9})
        await until(lambda: new in broker.order)
    assert broker.order.index(new) < HELD
