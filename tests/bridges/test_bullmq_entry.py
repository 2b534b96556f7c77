"""A Node application starts a pipeline by adding a job to `orchestrator-queue`."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from bullmq import Job, Worker
from redis.exceptions import OutOfMemoryError

from oraculo.bridges.bullmq.entry import describe, request_of, run_id_of
from oraculo.errors import InvalidInput
from oraculo.ports.browse import RunQuery
from oraculo.settings import Settings
from oraculo.worker import App, DoNotRetry
from tests.bridges.node.processes import expect_node
from tests.bridges.node.stage import BullStage, bull_settings, journal, node_client, node_worker, working
from tests.servers.fleet import Fleet
from tests.waiting import until

ENTRY = "orchestrator-queue"
VIDEO = ("images-queue", "text-queue", "voiceover-queue", "captions-queue", "video-queue")


@pytest.fixture
def settings(fleet: Fleet) -> Settings:
    expect_node(fleet)
    return bull_settings(fleet.url("redis"), fleet.url("redis"), entry=ENTRY, queues=VIDEO)


async def put(oraculo: BullStage, name: str, *steps: dict[str, Any], **pipeline: Any) -> None:
    await oraculo.operations.put_pipeline(name, json.dumps({"name": name, "steps": steps, **pipeline}).encode())


async def runs(oraculo: BullStage) -> list[str]:
    return [head.id for head in (await oraculo.operations.runs(RunQuery())).heads]


async def test_a_job_starts_its_pipeline_and_completes_with_the_aggregate(settings: Settings, tmp_path: Path) -> None:
    data = {"jobId": "6710", "pipelineName": "promotional-video-full"}
    client = node_client(settings, tmp_path, ENTRY, data)
    async with BullStage(settings) as oraculo, working(node_worker(settings, tmp_path, *VIDEO)):
        client.start()
        lines = await client.ended()
        [run_id] = await runs(oraculo)
    assert lines[0] == {"evento": "adicionado", "id": "1"}
    aggregate = lines[-1]["valor"]
    assert lines[-1]["evento"] == "concluido"
    assert (aggregate["correlation_id"], aggregate["status"]) == (run_id, "concluida")
    assert aggregate["resumo"]["concluidas"] == 5
    percents = [line["progresso"] for line in lines if line["evento"] == "progresso"]
    assert percents == sorted(percents)
    assert set(percents) <= {0, 20, 40, 60, 80, 100}
    assert percents[-1] == 100
    # Each step's worker got the job's data as the run's.
    assert [line["dados"]["entrada"] for line in journal(tmp_path)] == [{"jobId": "6710"}] * 5


def with_long_lock(settings: Settings) -> Settings:
    """Return settings with a lock that outlasts the test."""
    return msgspec.structs.replace(settings, bullmq=msgspec.structs.replace(settings.bullmq, lock=120.0))


async def test_progress_follows_the_run(settings: Settings, tmp_path: Path) -> None:
    gates = {name: asyncio.Event() for name in "ab"}
    app = App("gated")

    for name in gates:

        @app.queue(f"portao-{name}")
        async def wait(payload: dict[str, Any], name: str = name) -> str:
            await gates[name].wait()
            return name

    settings = with_long_lock(settings)  # a job that is taken anew, after a stall, shows its progress again
    client = node_client(settings, tmp_path, ENTRY, {"jobId": "1", "pipelineName": "dois"})
    async with BullStage(settings, app) as oraculo:
        await put(oraculo, "dois", {"type": "A", "queue": "portao-a"}, {"type": "B", "queue": "portao-b"})
        client.start()
        expected = [0]
        for gate, percent in (("a", 50), ("b", 100)):
            await until(lambda: _progress(client) == expected, within=20, saying=f"progress {expected}")
            gates[gate].set()
            expected.append(percent)
        lines = await client.ended()
    assert _progress(client) == [0, 50, 100]
    assert lines[-1]["evento"] == "concluido"


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
async def test_the_job_of_a_run_that_ended_stands_at_100(fails: bool, settings: Settings, tmp_path: Path) -> None:
    """A run may end before anybody looked at its progress."""
    app = App("quick")

    @app.queue("rapida")
    async def quick(payload: dict[str, Any]) -> str:
        if fails:
            raise DoNotRetry("sem tinta")
        return "feito"

    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "um"})
    async with BullStage(settings, app) as oraculo:
        await put(oraculo, "um", {"type": "A", "queue": "rapida"})
        client.start()
        lines = await client.ended()
        assert await oraculo.redis.hget(oraculo.key(ENTRY, "1"), "progress") == "100"
    assert lines[-1]["evento"] == ("falhou" if fails else "concluido")
    assert _progress(client)[-1] == 100


async def test_a_job_whose_log_cannot_be_written_completes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis was full for a moment, just after the run was asked for."""
    app = App("plain")
    app.queue("simples")(lambda payload: "feito")
    monkeypatch.setattr(Job, "log", AsyncMock(side_effect=OutOfMemoryError("command not allowed")))
    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "um"})
    async with BullStage(settings, app) as oraculo:
        await put(oraculo, "um", {"type": "A", "queue": "simples"})
        client.start()
        lines = await client.ended()
    assert lines[-1]["evento"] == "concluido", lines


def _progress(client: Any) -> list[int]:
    return [line["progresso"] for line in client.lines() if line["evento"] == "progresso"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"jobId": "1"}, "data.pipelineName: must name a pipeline"),
        ({"pipelineName": 7}, "data.pipelineName: must name a pipeline; got 7"),
        ([1], 'data: must be an object, as {"pipelineName": "…"}; got [1]'),
        ({"pipelineName": "x", "payload": 3}, "data.payload: must be an object; got 3"),
        (b"[" * 2000 + b"]" * 2000, 'data: must be an object, as {"pipelineName": "…"}; got None'),
        (
            b'{"pipelineName": "promotional-video-full", "x": ' + b"[" * 200 + b"]" * 200 + b"}",
            "nested deeper than 128 levels",
        ),
        (
            {"pipelineName": "promotional-video-ful"},
            "pipeline: there is no pipeline 'promotional-video-ful'; did you mean 'promotional-video-full'?",
        ),
    ],
)
async def test_bad_data_fails_the_job_at_once_and_for_good(
    data: object, reason: str, settings: Settings, tmp_path: Path
) -> None:
    client = node_client(settings, tmp_path, ENTRY, data, {"attempts": 5})
    async with BullStage(settings) as oraculo:
        client.start()
        lines = await client.ended()
        assert await runs(oraculo) == []
        assert await oraculo.operations.dead_letters("orquestrador") == []  # the job has failed for it
    assert lines[-1] == {"evento": "falhou", "motivo": reason, "tentativas": 1}


async def test_a_run_that_does_not_succeed_fails_the_job_with_the_reason(settings: Settings, tmp_path: Path) -> None:
    """Each attempt that BullMQ makes of it is a new run."""
    app = App("quebrado")

    @app.queue("quebra")
    async def breaks(payload: dict[str, Any]) -> None:
        raise ValueError("sem tinta")

    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "q"}, {"attempts": 2})
    async with BullStage(settings, app) as oraculo:
        await put(oraculo, "q", {"type": "Q", "queue": "quebra", "retry": {"maxAttempts": 1}})
        client.start()
        lines = await client.ended()
        started = await runs(oraculo)
    assert len(started) == len(set(started)) == 2
    assert lines[-1]["motivo"] == f"run {started[0]} ended erro: Q: ValueError: sem tinta"
    assert lines[-1]["tentativas"] == 2


async def test_a_run_without_its_optional_step_completes_the_job(settings: Settings, tmp_path: Path) -> None:
    app = App("quase")

    @app.queue("quebra")
    async def breaks(payload: dict[str, Any]) -> None:
        raise ValueError("sem tinta")

    @app.queue("vai")
    async def goes(payload: dict[str, Any]) -> int:
        return 1

    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "q"})
    async with BullStage(settings, app) as oraculo:
        optional = {"type": "Q", "queue": "quebra", "retry": {"maxAttempts": 1}, "optional": True}
        await put(oraculo, "q", optional, {"type": "V", "queue": "vai"})
        client.start()
        lines = await client.ended()
    assert lines[-1]["evento"] == "concluido"
    assert (lines[-1]["valor"]["status"], list(lines[-1]["valor"]["falhas"])) == ("parcial", ["Q"])


async def test_another_bridge_takes_a_job_over_without_a_second_run(settings: Settings, tmp_path: Path) -> None:
    """The first one gives it back when it stops: nobody waits until its lock has run out."""
    gate, settings = asyncio.Event(), with_long_lock(settings)
    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "um"})
    async with BullStage(settings, gated(gate)) as oraculo:
        await put(oraculo, "um", {"type": "A", "queue": "portao"})
        client.start()
        await until(lambda: runs(oraculo), within=20, saying="the run")
        await oraculo.bridge.stop()
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        gate.set()
        lines = await client.ended(within=30)
        assert len(await runs(oraculo)) == 1
    assert lines[-1]["evento"] == "concluido"
    assert lines[-1]["valor"]["resultados"]["A"]["resultado"] == "passou"


async def test_a_job_that_is_given_back_while_the_next_is_being_fetched_is_taken_over_at_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stopping worker may fetch it again itself, and would keep it until its lock runs out."""
    settings, gate, slow = with_long_lock(settings), asyncio.Event(), asyncio.Event()
    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "um"})
    fetch = Worker.moveToActive

    async def fetch_late(self: Worker, token: str) -> Any:
        if not self.jobs:
            return await fetch(self, token)
        slow.set()  # one is in work; what Redis was asked for it does, whoever waits for it
        return await asyncio.shield(asyncio.create_task(fetch_later(self, token)))

    async def fetch_later(self: Worker, token: str) -> Any:
        while self.jobs:  # noqa: ASYNC110 - bullmq does not say
            await asyncio.sleep(0)
        return await fetch(self, token)

    monkeypatch.setattr(Worker, "moveToActive", fetch_late)
    async with BullStage(settings, gated(gate)) as oraculo:
        await put(oraculo, "um", {"type": "A", "queue": "portao"})
        client.start()
        await until(lambda: runs(oraculo), within=20, saying="the run")
        await asyncio.wait_for(slow.wait(), 20)
        await oraculo.bridge.stop()
        monkeypatch.setattr(Worker, "moveToActive", fetch)
        oraculo.bridge = oraculo.new_bridge()
        await oraculo.bridge.start()
        gate.set()
        lines = await client.ended(within=30)
    assert lines[-1]["evento"] == "concluido"


def gated(gate: asyncio.Event) -> App:
    app = App("gated")

    @app.queue("portao")
    async def wait(payload: dict[str, Any]) -> str:
        await gate.wait()
        return "passou"

    return app


async def test_a_job_that_comes_back_to_the_same_bridge_ends_once(settings: Settings, tmp_path: Path) -> None:
    """Its lock was lost, as after a Redis that was away, and BullMQ gives it out again."""
    gate = asyncio.Event()
    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "um"})
    async with BullStage(settings, gated(gate)) as oraculo:
        await put(oraculo, "um", {"type": "A", "queue": "portao"})
        client.start()
        [run_id] = await until(lambda: runs(oraculo), within=20, saying="the run")
        lock = f"{oraculo.key(ENTRY, '1')}:lock"
        await oraculo.redis.delete(lock)
        await until(lambda: oraculo.redis.exists(lock), within=20, saying="the job to come back")
        await _is_renewed(oraculo, lock, times=3)
        gate.set()
        lines = await client.ended(within=30)
        assert oraculo.bridge._entry is not None
        worker = oraculo.bridge._entry._worker
        await until(lambda: not worker.jobs, saying="the bridge to hold no job")
        assert await runs(oraculo) == [run_id]
    assert lines[-1]["evento"] == "concluido"


async def _is_renewed(oraculo: BullStage, lock: str, *, times: int) -> None:
    before, renewals = await oraculo.redis.pttl(lock), 0

    async def enough() -> bool:
        nonlocal before, renewals
        now = await oraculo.redis.pttl(lock)
        assert now > 0, "nobody renewed the lock"
        before, renewals = now, renewals + (now > before)
        return renewals >= times

    await until(enough, within=20, saying="the lock to be renewed")


@pytest.mark.parametrize(
    ("away", "is_ours"),
    [("redis", True), ("redis", False), pytest.param("rabbitmq", True, marks=pytest.mark.long)],
)
async def test_a_job_completes_though_a_server_is_away_when_its_run_ends(
    away: str, is_ours: bool, fleet: Fleet, tmp_path: Path
) -> None:
    expect_node(fleet)
    server = fleet.breakable(away)
    ours, bullmqs = (server.url, fleet.url("redis")) if is_ours else (fleet.url("rabbitmq"), server.url)
    settings = bull_settings(ours, bullmqs, entry=ENTRY)
    client = node_client(settings, tmp_path, ENTRY, {"pipelineName": "um"})
    async with BullStage(settings) as oraculo:
        await put(oraculo, "um", {"type": "A", "queue": "ninguem"}, timeout=4)
        client.start()
        [run_id] = await until(lambda: runs(oraculo), within=20, saying="the run")
        await asyncio.to_thread(server.kill)
        assert (await oraculo.ended(run_id))["status"] == "timeout"
        await asyncio.to_thread(server.start)
        lines = await client.ended(within=40)
    assert lines[-1]["evento"] == "falhou"
    assert lines[-1]["motivo"].startswith(f"run {run_id} ended timeout: A: ")


# -- without a server ---------------------------------------------------------------------------------------------


def test_the_runs_payload_is_the_jobs_data() -> None:
    data = {"jobId": "1", "pipelineName": "p", "n": 1, "payload": {"produto": "x", "n": 2}}
    payload = {"jobId": "1", "n": 2, "produto": "x"}
    assert json.loads(request_of("r", data)) == {"correlation_id": "r", "pipeline": "p", "payload": payload}


@pytest.mark.parametrize("data", [None, "x", {"pipelineName": ""}, {"pipelineName": "p", "payload": []}])
def test_what_is_no_request(data: object) -> None:
    with pytest.raises(InvalidInput, match=r"data.*must"):
        request_of("r", data)


def test_data_with_half_a_character_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^data: .*half a surrogate pair"):
        request_of("r", {"pipelineName": "p", "legenda": "x\ud83d"})


def _job(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"id": "1", "timestamp": 1000, "attemptsMade": 0, **given})


def test_a_runs_id_is_that_of_its_job_and_attempt() -> None:
    make: Callable[..., str] = lambda **given: run_id_of("q", _job(**given))  # noqa: E731
    assert make() == make()
    different = [make(), make(id="2"), make(timestamp=1001), make(attemptsMade=1), run_id_of("r", _job())]
    assert len(set(different)) == len(different)
    assert len(make(id="á:" * 300)) <= 128


def test_the_reason_names_the_first_steps_that_failed() -> None:
    faults = {f"S{n}": {"status": "erro", "motivo": "x"} for n in range(7)}
    reason = describe({"correlation_id": "r", "status": "erro", "falhas": faults})
    assert reason == "run r ended erro: S0: x; S1: x; S2: x; S3: x; S4: x and 2 more"
    assert describe({"correlation_id": "r", "status": "cancelada", "falhas": {}}) == "run r ended cancelada"
