"""A run of 1,000 tasks survives whatever happens to the broker, the engine and the worker, on each broker: every task
is answered exactly once in the aggregate."""

import asyncio
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Cluster
from tests.servers.fleet import BROKERS, ONE_BROKER, Fleet
from tests.servers.process import Server
from tests.servers.proxy import Proxy
from tests.waiting import until

TASKS = 1000
FROZEN = 10.0  # several times what each side waits for an answer

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=BROKERS)
def server(request: pytest.FixtureRequest, fleet: Fleet) -> Server:
    return fleet.breakable(request.param)


@pytest.fixture(params=ONE_BROKER)
def quiet_server(request: pytest.FixtureRequest, fleet: Fleet) -> Server:
    """One that is not killed itself."""
    return fleet.breakable(request.param)


async def test_a_broker_that_is_killed_and_started_again(server: Server, tmp_path: Path) -> None:
    async with Cluster(tmp_path, server.url, is_held=True) as cluster:
        run_id = await cluster.submit(TASKS)
        await cluster.reached(run_id, TASKS // 4)
        await asyncio.to_thread(server.kill)
        assert (await cluster.summary(run_id))["status"] == "em_execucao"
        await until(lambda: _tells_of(cluster, run_id, server.name), saying="what the run waits for")
        await asyncio.to_thread(server.start)
        await cluster.check(run_id, TASKS)


async def _tells_of(cluster: Cluster, run_id: str, broker: str) -> bool:
    response = await cluster.client.get(f"/orquestracoes/{run_id}/explicacao")
    assert response.status_code == 200, response.text
    return f"; broker {broker} cannot be used (" in response.json()["explicacao"]


async def test_a_broker_that_freezes(fleet: Fleet, tmp_path: Path) -> None:
    """All three at once: it takes 10 s of waiting."""
    timeouts = {"ORACULO_BROKER_PUBLISH_TIMEOUT": "2", "ORACULO_BROKER_CONNECT_TIMEOUT": "2"}

    async def survive(name: str) -> None:
        server, folder = fleet.breakable(name), tmp_path / name
        folder.mkdir()
        async with Cluster(folder, server.url, is_held=True, **timeouts) as cluster:
            run_id = await cluster.submit(TASKS)
            await cluster.reached(run_id, TASKS // 4)
            server.freeze()
            try:
                assert (await cluster.summary(run_id))["status"] == "em_execucao"
                await asyncio.sleep(FROZEN)  # the length of the trouble, not a wait for something
            finally:
                server.thaw()
            await cluster.check(run_id, TASKS)

    await asyncio.gather(*map(survive, BROKERS))


async def test_connections_that_are_cut_every_second(quiet_server: Server, tmp_path: Path) -> None:
    with Proxy(quiet_server.url) as proxy:
        async with Cluster(tmp_path, proxy.url, WORK_SECONDS="0.05") as cluster:
            run_id = await cluster.submit(TASKS)

            cuts: list[int] = []

            async def cut() -> None:
                while True:
                    await asyncio.sleep(1.0)
                    cuts.append(await asyncio.to_thread(proxy.cut))

            cutting = asyncio.create_task(cut())
            await cluster.ended(run_id)
            cutting.cancel()
            assert len([halves for halves in cuts if halves]) >= 2, "it ended before it was cut"
            await cluster.check(run_id, TASKS)


async def test_an_engine_that_is_killed_and_started_again(quiet_server: Server, tmp_path: Path) -> None:
    async with Cluster(tmp_path, quiet_server.url, is_held=True) as cluster:
        run_id = await cluster.submit(TASKS)
        await cluster.reached(run_id, TASKS // 4)
        assert (await cluster.summary(run_id))["status"] == "em_execucao"
        cluster.engine.kill()
        cluster.engine.start()
        await cluster.answers()
        await cluster.check(run_id, TASKS)


async def test_a_worker_that_is_killed_and_started_again(quiet_server: Server, tmp_path: Path) -> None:
    async with Cluster(tmp_path, quiet_server.url, is_held=True) as cluster:
        run_id = await cluster.submit(TASKS)
        for part in (1, 2):
            await cluster.reached(run_id, TASKS * part // 4)
            assert (await cluster.summary(run_id))["status"] == "em_execucao"
            cluster.workers[0].kill()
            cluster.workers[0].start()
        await cluster.check(run_id, TASKS)


@pytest.mark.long
async def test_a_command_that_ends_its_worker_takes_no_other_along(server: Server, tmp_path: Path) -> None:
    """It ends the worker as often as it may be delivered; what else the worker held each time is done all the same."""
    async with Cluster(tmp_path, server.url, WORK_DEADLY="0", ORACULO_BROKER_LEASE="1") as cluster:
        (worker,) = cluster.workers
        run_id = await cluster.submit(100)

        async def is_dead() -> bool:
            if not worker.is_running:
                worker.start()
            letters = (await cluster.client.get("/filas/executador_x/dlq")).json()["mensagens"]
            return [letter["tarefa"] for letter in letters] == ["t0"]

        await until(is_dead, within=120, saying="the deadly command, and no other, to be a dead letter")
        await cluster.reached(run_id, 99)
