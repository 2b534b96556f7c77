"""RabbitMQ, Redis and NATS as one: whichever dies, runs are accepted and go on over the next."""

import asyncio
import itertools
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Cluster
from tests.servers.fleet import BROKERS, Fleet
from tests.waiting import until

LONGEST_PAUSE = 10.0  # seconds, in accepting and in progress


class Traffic:
    """Small runs without a pause, so that every moment in which nothing is accepted or nothing ends is seen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.accepted = [time.monotonic()]
        self.ended = [time.monotonic()]
        self.statuses: list[str] = []
        self.asked: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(self._accept(), *(self._run_to_the_end() for _ in range(4)))

    async def _accept(self) -> None:
        while True:
            self.asked.append(await self._cluster.submit(1))
            self.accepted.append(time.monotonic())
            await asyncio.sleep(0.05)

    async def _run_to_the_end(self) -> None:
        while True:
            run_id = await self._cluster.submit(2)
            found = await self._cluster.ended(run_id, within=60)
            self.ended.append(time.monotonic())
            self.statuses.append(found["status"])

    async def finish(self) -> None:
        """What was accepted last ends too."""
        for run_id in self.asked:
            self.statuses.append((await self._cluster.ended(run_id, within=60))["status"])

    @staticmethod
    def longest_pause(moments: list[float]) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(moments))


def brokers_of(cluster: Cluster, run_id: str) -> set[str]:
    """The brokers that took the commands of a run, last."""
    with sqlite3.connect(cluster.database) as connection:
        rows = connection.execute("SELECT DISTINCT via FROM tasks JOIN runs USING (n) WHERE id = ?", (run_id,))
        return {via for (via,) in rows}


def is_up(cluster: Cluster, name: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return bool((await cluster.health())["partes"][f"broker {name}"]["ok"])

    return look


@pytest.mark.timeout(240)
async def test_runs_go_on_over_the_next_broker(fleet: Fleet, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rabbitmq, redis, nats = (fleet.breakable(name) for name in BROKERS)
    async with Cluster(tmp_path, f"{rabbitmq.url},{redis.url},{nats.url}") as cluster:
        traffic = Traffic(cluster)
        running = asyncio.create_task(traffic.run())
        await cluster.reached(await cluster.submit(4), 4)

        in_the_middle = await cluster.submit(1000)
        await cluster.reached(in_the_middle, 250)
        await asyncio.to_thread(rabbitmq.kill)
        found = await cluster.ended(in_the_middle)
        assert (found["status"], found["resumo"]["concluidas"]) == ("concluida", 1000)
        assert "redis" in brokers_of(cluster, in_the_middle)
        health = await cluster.health()
        assert (health["status"], health["partes"]["broker rabbitmq"]["ok"]) == ("degradado", False)

        await asyncio.to_thread(redis.kill)
        over_nats = await cluster.submit(100)
        found = await cluster.ended(over_nats)
        assert (found["status"], found["resumo"]["concluidas"]) == ("concluida", 100)
        assert brokers_of(cluster, over_nats) == {"nats"}

        await asyncio.to_thread(rabbitmq.start)
        await until(is_up(cluster, "rabbitmq"), within=30, saying="RabbitMQ to be used again")
        back = await cluster.submit(100)
        assert (await cluster.ended(back))["status"] == "concluida"
        assert brokers_of(cluster, back) == {"rabbitmq"}

        assert not running.done(), running.exception()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await traffic.finish()
    assert len(traffic.statuses) > 100
    assert set(traffic.statuses) == {"concluida"}
    accepting, progress = traffic.longest_pause(traffic.accepted), traffic.longest_pause(traffic.ended)
    with capfd.disabled():
        print(f"\nfail-over: longest pause in accepting {accepting:.1f} s, in progress {progress:.1f} s")
    assert accepting < LONGEST_PAUSE
    assert progress < LONGEST_PAUSE


async def test_an_engine_starts_and_accepts_while_its_broker_is_away(fleet: Fleet, tmp_path: Path) -> None:
    nats = fleet.breakable("nats")
    await asyncio.to_thread(nats.kill)
    async with Cluster(tmp_path, nats.url) as cluster:
        run_id = await cluster.submit(10)
        health = await cluster.health()
        assert health["status"] == "indisponivel"
        assert health["partes"]["broker nats"]["problema"]
        await asyncio.to_thread(nats.start)
        await cluster.check(run_id, 10)


async def test_a_broker_that_lost_its_memory_gets_its_commands_again(tmp_path: Path) -> None:
    """A Redis that keeps nothing: killed with most of the commands in it."""
    from tests.servers.valkey import Valkey

    with Valkey(durable=False) as redis:
        async with Cluster(tmp_path, redis.url) as cluster:
            run_id = await cluster.submit(1000)
            await cluster.reached(run_id, 250)
            await asyncio.to_thread(redis.kill)
            await asyncio.to_thread(redis.start)
            await cluster.check(run_id, 1000)
