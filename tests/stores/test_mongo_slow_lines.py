"""The MongoDB store over a line on which all of a run takes longer than one call may."""

from collections.abc import AsyncIterator

import pytest

from oraculo.core.events import Answered
from oraculo.stores.mongo import server
from oraculo.testing.store_runs import assert_stored, change, changed, create, make_run
from tests.servers.fleet import Fleet
from tests.servers.proxy import Proxy
from tests.stores.mongo_stage import database, directly, opened, with_database

_DELAY = 0.012  # seconds for each 64 kB, at most
_LARGE = b'"%s"' % (b"x" * 900_000)


@pytest.fixture
def slowness(fleet: Fleet) -> float:
    return fleet.mongo_slowness() / 2


@pytest.fixture
async def proxy(fleet: Fleet) -> AsyncIterator[Proxy]:
    with Proxy(directly(with_database(fleet.url("mongodb")))) as proxy:
        yield proxy
        proxy.delay = 0.0
        async with database(proxy.url) as found:
            await found.client.drop_database(found.name)


async def test_a_run_is_read(proxy: Proxy, slowness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_IN_A_BATCH", 3)  # in the place of 16 MB
    async with opened(proxy.url, call_seconds=slowness) as store:
        runs = [make_run(f"run-{number}") for number in range(3)]
        await create(store, *runs)
        for run in runs:
            await change(store, changed(run, *(Answered(n, 1, _LARGE) for n in range(3))))
        proxy.delay = _DELAY * slowness
        assert len(await store.load([run.id for run in runs])) == 3
        proxy.delay = 0.0
        for run in runs:
            await assert_stored(store, run)


async def test_a_run_is_created_and_changed(proxy: Proxy, slowness: float) -> None:
    async with opened(proxy.url, call_seconds=slowness) as store:
        payloads = [{"text": "x" * 900_000, "n": n} for n in range(10)]
        run = make_run("large", destinos=[{"fila": "q", "id": f"t{p['n']}", "payload": p} for p in payloads])
        proxy.delay = _DELAY * slowness
        await create(store, run)
        await change(store, changed(run, *(Answered(n, 1, _LARGE) for n in range(3))))
        proxy.delay = 0.0
        await assert_stored(store, run)
