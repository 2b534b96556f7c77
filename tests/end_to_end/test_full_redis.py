"""A Redis that is full of commands which nobody reads.

Runs for other queues are served as far as there is room, and end by their deadlines. A worker that comes at last does
all commands, because its answers find room.
"""

from typing import Any

import pytest
import redis

from oraculo.bootstrap import make_broker, make_worker
from oraculo.ports.clock import SystemClock
from oraculo.worker import App
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, recording_app
from tests.servers.fleet import Fleet
from tests.waiting import until

UNREAD, WELL = "executador_parado", "escavador_a"
LIMIT = 6 * 1024 * 1024
BATCHED, LONE = (30, 15), (1, 450)  # how many commands a run has, and how many runs there are


def late_app(done: list[str]) -> App:
    app = App("late")

    @app.queue(UNREAD, concurrency=32)
    async def work(payload: dict[str, Any]) -> str:
        done.append(payload["id"])
        return "y" * 30_000  # more than its command

    return app


async def is_unsent(oraculo: Stage, run_id: str) -> bool:
    return any(task.unsent for task in (await oraculo.operations.run(run_id)).tasks)


async def is_red(oraculo: Stage) -> bool:
    return not (await oraculo.operations.health()).is_ready


@pytest.mark.parametrize(
    ("wide", "runs", "policy"),
    [(*BATCHED, "noeviction"), (*LONE, "noeviction"), (*BATCHED, "volatile-lru")],  # which has nothing to evict here
    ids=["batched", "one by one", "volatile"],
)
async def test_a_server_full_of_commands_is_emptied_by_a_worker(
    fleet: Fleet, wide: int, runs: int, policy: str
) -> None:
    server = fleet.breakable("redis")
    settings, done = settings_for(server.url), list[str]()
    with redis.Redis.from_url(server.url) as plain:
        plain.execute_command("FLUSHALL", "SYNC")  # else it is freed little by little
        plain.config_set("maxmemory", LIMIT)
        plain.config_set("maxmemory-policy", policy)
        try:
            async with Stage(settings, recording_app(Journal(), (WELL,))) as oraculo:
                steps = [{"id": f"t{n}", "fila": UNREAD} for n in range(wide)]
                ids = []
                for run in range(runs):
                    own = [{**step, "payload": {"id": f"{run}/{step['id']}", "in": "z" * 20_000}} for step in steps]
                    ids.append(await oraculo.submit({"destinos": own, "timeout": 120}))
                await until(lambda: oraculo.broker.statuses()[0].trouble is not None, saying="that it is full")
                await until(lambda: is_unsent(oraculo, ids[-1]), saying="commands that wait for room")
                for _ in range(3):
                    assert "resultados" in await oraculo.run({"destinos": [WELL], "timeout": 1})
                    await until(lambda: is_red(oraculo), saying="that it is told")

                broker = make_broker(settings, SystemClock())
                await broker.start()
                worker = make_worker(late_app(done), broker, settings, SystemClock())
                await worker.start()
                try:
                    for run_id in ids:
                        assert (await oraculo.ended(run_id, wait=60))["status"] == "concluida"
                finally:
                    await worker.stop()
                    await broker.close()
                assert len(done) == len(set(done)) == wide * runs
                assert (await oraculo.operations.health()).is_ready
        finally:
            plain.config_set("maxmemory-policy", "noeviction")
            plain.config_set("maxmemory", 0)
            plain.execute_command("FLUSHALL", "SYNC")  # else it is freed little by little
