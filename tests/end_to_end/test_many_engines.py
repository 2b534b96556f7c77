"""Several engines, API processes and workers on one store and one broker, under kill -9."""

import asyncio
import os
import random
import uuid
from pathlib import Path

import asyncpg
import httpx2
import pytest

from tests.end_to_end.many import ManyEngines, ready
from tests.servers.fleet import Fleet
from tests.servers.process import Server
from tests.waiting import until

RUNS = int(os.environ.get("ORACULO_TEST_RUNS", "500"))  # 2000 for the long form
KILL_EVERY = 2.0

pytestmark = pytest.mark.timeout(300)


async def place_in(server_url: str, name: str) -> str:
    """A store of its own on that server."""
    if name == "redis":
        return f"{server_url}?namespace=t{uuid.uuid4().hex[:10]}"
    schema = f"test_{uuid.uuid4().hex[:10]}"
    connection = await asyncpg.connect(server_url)
    await connection.execute(f"CREATE SCHEMA {schema}")
    await connection.close()
    return f"{server_url}?search_path={schema}"


@pytest.mark.parametrize(
    ("broker", "store"), [("rabbitmq", "postgres"), pytest.param("redis", "redis", marks=pytest.mark.long)]
)
async def test_engines_are_killed_one_after_the_other(broker: str, store: str, fleet: Fleet, tmp_path: Path) -> None:
    place = await place_in(fleet.url(store), store)
    async with ManyEngines(tmp_path, fleet.url(broker), place) as many:
        kills = 0

        async def kill() -> None:
            nonlocal kills
            while True:
                await asyncio.sleep(KILL_EVERY)
                victim = random.choice(many.engines)
                victim.kill()
                victim.start()
                kills += 1

        killing = asyncio.create_task(kill())
        try:
            run_ids = await many.submit(RUNS, pause=0.01)
            await many.all_ended(RUNS)
        finally:
            killing.cancel()
        assert kills >= RUNS // 250
        await many.check(run_ids)


async def test_the_others_take_over_within_seconds(fleet: Fleet, tmp_path: Path) -> None:
    """From the death of the engine that all timers waited for."""
    place = await place_in(fleet.url("postgres"), "postgres")
    async with ManyEngines(tmp_path, fleet.url("rabbitmq"), place, engines=2, apis=1, workers=0) as many:
        [client] = many.clients
        await until(lambda: _know_each_other(many), within=30, saying="two engines that know of each other")
        body = {"destinos": ["nobody"], "payload": {}, "timeout": 3}
        runs = [(await client.post("/orquestracoes", json=body)).json()["correlation_id"] for _ in range(20)]
        many.engines[0].kill()

        async def ended() -> bool:
            page = (await client.get("/orquestracoes?status=timeout&limit=50")).json()
            return len(page["orquestracoes"]) == len(runs)

        await until(ended, within=12, saying="the timers of the engine that died")


async def _know_each_other(many: ManyEngines) -> bool:
    async with httpx2.AsyncClient(timeout=10) as client:
        for port in many.engine_ports:
            try:
                text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            except httpx2.HTTPError:
                return False
            if f"oraculo_engines {float(len(many.engine_ports))}" not in text:
                return False
    return True


@pytest.mark.parametrize("store", ["postgres", pytest.param("redis", marks=pytest.mark.long)])
async def test_a_store_that_is_killed_and_started_again(store: str, fleet: Fleet, tmp_path: Path) -> None:
    server: Server = fleet.breakable(store)
    place = await place_in(server.url, store)
    async with ManyEngines(tmp_path, fleet.url("rabbitmq"), place, engines=2, apis=1, workers=2) as many:
        [client] = many.clients
        run_ids = await many.submit(200)
        await asyncio.to_thread(server.kill)

        async def says_so() -> bool:
            state = await ready(client)
            problem = next(part["problema"] for name, part in state["partes"].items() if name.startswith("store "))
            return state["status"] == "indisponivel" and bool(problem)

        await until(says_so, within=20, saying="readiness that is red")
        late = asyncio.create_task(many.submit(50, first=200))
        await asyncio.to_thread(server.start)
        run_ids += await late
        await until(lambda: _is_ready(client), within=30, saying="readiness that is green again")
        await many.all_ended(len(run_ids))
        assert "waits for the store" in "".join(engine.tail() for engine in many.engines) + many.apis[0].tail()
        await many.check(run_ids)


async def _is_ready(client: httpx2.AsyncClient) -> bool:
    return bool((await ready(client))["status"] == "ok")
