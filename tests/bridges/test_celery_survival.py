"""A step that is a Celery task ends, with a result or a reason, whatever is killed on either side of the bridge."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest

from oraculo.bridges.celery import connections
from oraculo.pipeline.bridges import CELERY, QUEUES
from tests.bridges.celery_stage import ROOT, Bridged, CeleryWorker, are_kept, replies_of
from tests.end_to_end.cluster import Cluster
from tests.servers.fleet import Fleet
from tests.servers.process import Server
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)
Start = Callable[..., CeleryWorker]
BROKERS = ("rabbitmq", pytest.param("redis", marks=pytest.mark.long))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts Celery workers, which end with the test."""
    started: list[CeleryWorker] = []

    def begin(broker: str, queue: str | None = None, **environment: str) -> CeleryWorker:
        log = tmp_path / f"celery-{len(started)}.log"
        worker = CeleryWorker(broker, log, "-c", "1", queue=queue, **environment)
        started.append(worker)
        worker.start()
        return worker

    yield begin
    for worker in started:
        worker.kill()


def bridge_to(worker: CeleryWorker) -> dict[str, str]:
    return {
        "ORACULO_CELERY_BROKER_URL": worker.broker,
        "ORACULO_CELERY_QUEUE": worker.queue,
        "ORACULO_CELERY_TASKS_ALLOW": "loja.*",
    }


async def submit(cluster: Cluster, task: str, payload: dict[str, Any], *, timeout: float = 100) -> str:
    destination = {"id": "t", "fila": f"celery://{task}", "payload": payload}
    body = {"destinos": [destination], "timeout": timeout}
    response = await cluster.client.post("/orquestracoes", json=body)
    assert response.status_code == 202, response.text
    return str(response.json()["correlation_id"])


async def is_noted(cluster: Cluster, run: str) -> None:
    """Wait until the engine has noted its command as sent, and the bridge has acked it.

    If they are killed before that, they rightly send the command once more.
    """

    async def noted() -> bool:
        found = (await cluster.client.get(f"/orquestracoes/{run}")).json()
        queues = {queue["fila"]: queue for queue in (await cluster.client.get("/filas")).json()["filas"]}
        bridge = queues[QUEUES[CELERY]]
        is_sent = [task["status"] for task in found["tarefas"]] == ["em_execucao"]
        return is_sent and (bridge["mensagens"], bridge["em_processamento"]) == (0, 0)

    await until(noted, within=30, saying="the command to be noted as sent")


class Gate:
    """A task that writes down when it begins, and waits until `open` is called."""

    def __init__(self, folder: Path) -> None:
        self.path, self.mark = folder / "go", folder / "begun"

    @property
    def payload(self) -> dict[str, str]:
        return {"path": str(self.path), "mark": str(self.mark)}

    def begun(self) -> int:
        return len(self.mark.read_text().split()) if self.mark.exists() else 0

    async def has_begun(self, times: int = 1) -> None:
        # More often than asked, because Redis delivers a waiting task again after a short visibility timeout.
        await until(lambda: self.begun() >= times, within=60, saying=f"the task to have begun {times} times")

    def open(self) -> None:
        self.path.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.mark.parametrize("broker", BROKERS)
async def test_an_engine_that_is_killed_finds_the_result_when_it_is_back(
    broker: str, fleet: Fleet, start: Start, gate: Gate, tmp_path: Path
) -> None:
    worker = start(fleet.url(broker))
    await worker.is_ready()
    async with Cluster(tmp_path, fleet.url("rabbitmq"), workers=0, **bridge_to(worker)) as cluster:
        run = await submit(cluster, "loja.esperar", gate.payload)
        await gate.has_begun()
        await is_noted(cluster, run)
        cluster.engine.kill()
        gate.open()
        await until(lambda: "succeeded in" in worker.tail(), within=30, saying="the task to end")
        cluster.engine.start()
        await cluster.answers()
        found = await cluster.ended(run)
        assert found["resultados"]["t"] == {"status": "ok", "resultado": "it came"}
        assert gate.begun() == 1


@pytest.mark.parametrize("broker", BROKERS)
async def test_a_celery_worker_that_is_killed_with_a_late_ack_runs_it_again(
    broker: str, fleet: Fleet, start: Start, gate: Gate, tmp_path: Path
) -> None:
    url = fleet.url(broker)
    worker = start(url if broker == "rabbitmq" else url[:-1] + "7", CELERY_VISIBILITY="1")
    await worker.is_ready()
    async with Cluster(tmp_path, fleet.url("rabbitmq"), workers=0, **bridge_to(worker)) as cluster:
        run = await submit(cluster, "loja.esperar_e_confirmar", gate.payload)
        await gate.has_begun()
        worker.kill()
        worker.start()
        await gate.has_begun(2)
        gate.open()
        assert (await cluster.ended(run))["status"] == "concluida"


@pytest.mark.parametrize("broker", BROKERS)
async def test_a_celery_worker_that_is_killed_with_an_early_ack_ends_in_a_timeout(
    broker: str, fleet: Fleet, start: Start, gate: Gate, tmp_path: Path
) -> None:
    worker = start(fleet.url(broker))
    await worker.is_ready()
    async with Cluster(tmp_path, fleet.url("rabbitmq"), workers=0, **bridge_to(worker)) as cluster:
        run = await submit(cluster, "loja.esperar", gate.payload, timeout=5)
        await gate.has_begun()
        worker.kill()
        found = await cluster.ended(run)
        assert found["falhas"]["t"]["status"] == "timeout"


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest, fleet: Fleet) -> Server:
    return fleet.breakable(request.param)


async def test_celerys_broker_is_killed_and_started_again(
    server: Server, fleet: Fleet, start: Start, tmp_path: Path
) -> None:
    worker = start(server.url)
    await worker.is_ready()
    async with Cluster(tmp_path, fleet.url("rabbitmq"), workers=0, **bridge_to(worker)) as cluster:
        await _bridge_is(cluster, None)
        await are_kept(server, f"{cluster.prefix}oraculo-respostas")
        await asyncio.to_thread(server.kill)
        run = await submit(cluster, "loja.somar", {"a": 2, "b": 3})
        late = await submit(cluster, "loja.somar", {"a": 2, "b": 3}, timeout=1)
        trouble = await _bridge_is(cluster, "Celery's broker at ")
        assert "guest:guest" not in trouble
        explanation = (await cluster.client.get(f"/orquestracoes/{run}/explicacao")).json()["explicacao"]
        assert "; ponte celery cannot be used (Celery's broker at " in explanation
        assert (await cluster.ended(late))["falhas"]["t"]["status"] == "timeout"
        assert (await cluster.summary(run))["status"] == "em_execucao"
        await asyncio.to_thread(server.start)
        found = await cluster.ended(run)
        assert found["resultados"]["t"]["resultado"] == {"soma": 5}, found
        await _bridge_is(cluster, None)


async def _bridge_is(cluster: Cluster, trouble: str | None) -> str:
    async def reported() -> str | None:
        problem = (await cluster.health())["partes"]["ponte celery"]["problema"]
        if trouble is None:
            return "well" if problem is None else None
        return str(problem) if trouble in str(problem) else None

    found = await until(reported, within=40, saying=f"the bridge to report {trouble}")
    assert found is not None
    return found


async def test_our_broker_is_killed_and_started_again(
    server: Server, fleet: Fleet, start: Start, gate: Gate, tmp_path: Path
) -> None:
    worker, ours = start(fleet.url("redis")), server
    await worker.is_ready()
    async with Cluster(tmp_path, ours.url, workers=0, **bridge_to(worker)) as cluster:
        run = await submit(cluster, "loja.esperar", gate.payload)
        await gate.has_begun()
        await are_kept(ours, f"{cluster.prefix}resultados", f"{cluster.prefix}ponte-celery")
        await asyncio.to_thread(ours.kill)
        gate.open()
        await until(lambda: "succeeded in" in worker.tail(), within=30, saying="the task to end")
        await asyncio.to_thread(ours.start)
        found = await cluster.ended(run)
        assert found["resultados"]["t"]["resultado"] == "it came"
        assert gate.begun() == 1


HOLDER = """
import sys
import kombu
from oraculo.bridges.celery.connections import CeleryBroker

broker = CeleryBroker(sys.argv[1], reply_queue=sys.argv[2])
connection = broker.connection()

def hold(message):
    print("held", flush=True)

with kombu.Consumer(connection.channel(), [broker.replies], on_message=hold, prefetch_count=10):
    while True:
        try:
            connection.drain_events(timeout=1)
        except TimeoutError:
            pass
"""


def _hold_replies(broker: str, replies: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HOLDER, broker, replies]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture
async def worker(server: Server, start: Start) -> CeleryWorker:
    started = start(server.url)
    await started.is_ready()
    return started


async def test_a_reply_that_a_dead_bridge_held_is_read_by_another(
    worker: CeleryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_VISIBILITY_TIMEOUT", 2)
    stage = Bridged(worker.broker, worker.queue)
    replies = f"{stage.settings.broker.prefix}oraculo-respostas"
    holding = _hold_replies(worker.broker, replies)
    try:
        async with stage:
            reading = stage.bridge._listeners[0]
            reading.end()
            await asyncio.to_thread(reading.join)
            run = await stage.submit({"destinos": [{"id": "t", "fila": "celery://loja.somar", "payload": {"a": 1}}]})
            assert holding.stdout is not None
            assert await asyncio.to_thread(holding.stdout.readline) == "held\n"
            holding.kill()
            second = Bridged(worker.broker, worker.queue, prefix=stage.settings.broker.prefix, broker=stage.broker)
            await second.bridge.start()
            try:
                assert (await stage.ended(run))["resultados"]["t"]["resultado"] == {"soma": 1}
            finally:
                await second.bridge.stop()
    finally:
        holding.kill()
        holding.communicate(timeout=30)


async def test_a_quorum_queue_of_the_app_is_left_as_it_is(fleet: Fleet, start: Start) -> None:
    worker = start(fleet.url("rabbitmq"), CELERY_QUEUE_TYPE="quorum")
    await worker.is_ready()
    async with Bridged(worker.broker, worker.queue) as stage:
        assert (await stage.task("celery://loja.somar", {"a": 1}))["status"] == "concluida"


async def test_a_queue_that_nobody_made_waits_for_its_worker(fleet: Fleet, start: Start) -> None:
    url = fleet.url("rabbitmq")
    async with Bridged(url, "loja-tarde") as stage:
        run = await stage.submit({"destinos": [{"id": "t", "fila": "celery://loja.somar", "payload": {"a": 1}}]})
        await until(lambda: _waiting(url, "loja-tarde") == 1, saying="the task to be sent")
        start(url, queue="loja-tarde")
        assert (await stage.ended(run))["status"] == "concluida"


@pytest.mark.parametrize("broker", BROKERS)
async def test_a_worker_that_starts_after_the_bridge_is_soon_asked_for_its_events(
    fleet: Fleet, start: Start, broker: str
) -> None:
    url = fleet.url(broker)
    async with Bridged(url, "loja-nova") as stage:
        await stage.is_connected()  # and has asked the workers that run: none
        await start(url, queue="loja-nova").is_ready()

        async def has_reason() -> bool:
            aggregate = await stage.task("celery://loja.nenhuma", wait=2)
            return bool(aggregate["falhas"]["t"]["status"] == "erro")

        await until(has_reason, within=30, saying="the event that no worker knows the task")


def _waiting(url: str, queue: str) -> int:
    with kombu.Connection(url) as connection:
        try:
            return int(connection.channel().queue_declare(queue, passive=True).message_count)  # type: ignore[attr-defined, unused-ignore]
        except connection.channel_errors:
            return 0  # the queue does not exist yet


async def test_a_message_that_is_no_reply_of_ours_is_dead_lettered(worker: CeleryWorker) -> None:
    async with Bridged(worker.broker, worker.queue) as stage:
        await stage.is_connected()
        name = f"{stage.settings.broker.prefix}oraculo-respostas"
        with kombu.Connection(worker.broker) as connection:
            connection.Producer().publish({"who": "knows"}, exchange=name, routing_key=name, serializer="json")
        queue = f"{stage.settings.broker.prefix}ponte-celery"

        async def letters() -> Any:
            return await stage.broker.dead_letters(queue, limit=10)

        [letter] = await until(letters, saying="the dead letter")
        assert name in letter.reason
        await until(lambda: replies_of(stage)() == 0, saying="the reply to be acked")
