"""`kill -9` of the real server under load, again and again: every accepted run ends once, is delivered as one versao,
and the file is sound. `ORACULO_TEST_KILLS=200` makes it longer."""

import asyncio
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from oraculo.pipeline.definition import decode_definition
from oraculo.ports.store import Snapshot
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.checkers import check_store
from tests.servers.prepared import Oraculo
from tests.waiting import until

KILLS = int(os.environ.get("ORACULO_TEST_KILLS", "8"))
ROOT = Path(__file__).parents[2]
REQUESTS: list[dict[str, Any]] = [
    {"tipo": "coleta_completa", "payload": {"parametros": {}}},
    {"pipeline": "promotional-video-full", "payload": {"produto": "x"}},
    {"pipeline": "coleta-execucao", "payload": {}},
    {"destinos": [{"id": f"t{n}", "fila": "escavador_blog"} for n in range(30)], "payload": {}},
    {"destinos": ["escavador_blog", {"fila": "escavador_ninguem", "timeout": 3}], "payload": {}},
    {"destinos": ["executador_quebrado", "escavador_blog"], "payload": {}},
]
PARTIAL = (4, 5)  # of these requests one task cannot succeed


class Server:
    """`oraculo serve` as a process of its own, on one port and one file."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = folder / "oraculo.db"
        self.log = folder / "server.log"
        self.journal = folder / "journal"  # what the workers began
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["serve", "--port", str(self.port), "--app", "tests.crash.workers:app"]
        environment = os.environ | {
            "ORACULO_STORE_URL": f"sqlite:///{self.database}",
            "ORACULO_WEBHOOK_ALLOW": "127.0.0.1",
            "ORACULO_RUNS_BACKOFF": "0.05",
            "ORACULO_RUNS_TIMEOUT": "3600",  # the server is dead most of the time: no run may end by its deadline
            "ORACULO_LOG_LEVEL": "warning",
            "CRASH_JOURNAL": str(self.journal),
        }
        with self.log.open("ab") as log:
            self.process = Oraculo(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    async def ready(self, client: httpx2.AsyncClient) -> None:
        async def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                return (await client.get(f"{self.url}/health/ready")).status_code == 200
            except httpx2.HTTPError:
                return False

        await until(answers, within=30, saying="the server's readiness")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)


class Receiver:
    """A webhook receiver that outlives every server: what it got, by run."""

    def __init__(self) -> None:
        self.received: dict[str, list[dict[str, Any]]] = {}
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            aggregate = json.loads(await reader.readexactly(length))
            self.received.setdefault(aggregate["correlation_id"], []).append(aggregate)
            writer.write(b"HTTP/1.1 204 ok\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the server was killed in the middle
        finally:
            writer.close()


class Load:
    """Asks for runs without a pause, each with an id and key of its own; what got `202` was accepted."""

    def __init__(self, server: Server, client: httpx2.AsyncClient, webhook: str) -> None:
        self._server = server
        self._webhook = webhook
        self._client = client
        self.asked = 0
        self.accepted: set[str] = set()

    async def run(self) -> None:
        while True:
            self.asked += 1
            run_id = f"carga-{self.asked}"
            body = REQUESTS[self.asked % len(REQUESTS)] | {"correlation_id": run_id}
            if _has_webhook(run_id):
                body["webhook"] = self._webhook
            try:
                response = await self._client.post(
                    f"{self._server.url}/orquestracoes", json=body, headers={"Idempotency-Key": run_id}
                )
            except httpx2.HTTPError:
                await asyncio.sleep(0.02)  # it was just killed
                continue
            assert response.status_code == 202, response.text
            self.accepted.add(run_id)


@pytest.mark.timeout(120 + 15 * KILLS)
async def test_every_accepted_run_ends_once_whenever_the_server_is_killed(tmp_path: Path) -> None:
    chance = random.Random(20251014)
    server, receiver = Server(tmp_path), Receiver()
    listener = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
    async with listener, httpx2.AsyncClient(timeout=10) as client:
        load = Load(server, client, receiver.url)
        for _ in range(KILLS):
            server.start()
            await server.ready(client)
            callers = [asyncio.create_task(load.run()) for _ in range(8)]
            await asyncio.sleep(chance.uniform(0.02, 0.6))  # the moment of the kill, not a wait for something
            server.kill()
            await _end(callers)
        server.start()
        await server.ready(client)
        await until(lambda: _nothing_runs(client, server), within=60, saying="the end of every run")
        await until(
            lambda: _missing(load.accepted, receiver) == [], within=60, saying="the delivery of every aggregate"
        )
        await _check_dead_letters(client, server)
        assert server.stop() == 0, server.log.read_text()[-2000:]
    assert len(load.accepted) > KILLS, "there was no load to speak of"
    await _check(server.database, load.accepted, _begun(server.journal))
    for run_id, aggregates in receiver.received.items():
        assert all(one == aggregates[0] for one in aggregates), f"{run_id} was delivered with different contents"
        assert aggregates[0]["versao"] == 1


async def _end(callers: list[asyncio.Task[None]]) -> None:
    for caller in callers:
        caller.cancel()
    for outcome in await asyncio.gather(*callers, return_exceptions=True):
        assert isinstance(outcome, asyncio.CancelledError), outcome


async def _nothing_runs(client: httpx2.AsyncClient, server: Server) -> bool:
    response = await client.get(f"{server.url}/orquestracoes", params={"status": "em_execucao", "limit": 1})
    return response.json()["orquestracoes"] == []


def _has_webhook(run_id: str) -> bool:
    return int(run_id.removeprefix("carga-")) % 3 == 0


def _missing(accepted: set[str], receiver: Receiver) -> list[str]:
    return sorted(run_id for run_id in accepted if _has_webhook(run_id) and run_id not in receiver.received)


async def _check_dead_letters(client: httpx2.AsyncClient, server: Server) -> None:
    queues = (await client.get(f"{server.url}/filas")).json()["filas"]
    assert any(queue["dlq"] for queue in queues), "the broken worker left no dead letter"
    for queue in queues:
        letters = (await client.get(f"{server.url}/filas/{queue['fila']}/dlq")).json()["mensagens"]
        assert all(letter["motivo"] for letter in letters)


Begun = dict[tuple[str, str], set[int]]  # attempts by run and task


def _begun(journal: Path) -> Begun:
    begun: Begun = {}
    for line in journal.read_text().splitlines():
        run_id, task, attempt = line.split(" ")
        begun.setdefault((run_id, task), set()).add(int(attempt))
    return begun


async def _check(database: Path, accepted: set[str], begun: Begun) -> None:
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for table in ("inputs", "tasks", "history"):
            orphans = f"SELECT count(*) FROM {table} WHERE n NOT IN (SELECT n FROM runs)"
            assert connection.execute(orphans).fetchone() == (0,), table
    store = SqliteStore(str(database))
    await store.start()
    assert await check_store(store) == []
    snapshots = await store.load(sorted(accepted))
    assert set(snapshots) == accepted, "an accepted run was lost"
    for run_id, snapshot in snapshots.items():
        assert snapshot.head.edition == 1, f"{run_id} ended {snapshot.head.edition} times"
        expected = "parcial" if int(run_id.removeprefix("carga-")) % len(REQUESTS) in PARTIAL else "concluida"
        failed = [(task.number, task.status, task.attempt, task.reason) for task in snapshot.tasks if task.reason]
        assert snapshot.head.status == expected, (run_id, failed[:5], snapshot.head)
        _check_work(snapshot, begun)
    await store.close()


def _check_work(snapshot: Snapshot, begun: Begun) -> None:
    """What the workers saw fits what is told: each success was worked for, and no attempt begun that was not made."""
    steps = decode_definition(snapshot.definition).steps
    for task in snapshot.tasks:
        seen = begun.get((snapshot.head.id, steps[task.number].id), set())
        assert task.status != "concluida" or seen, f"{snapshot.head.id}: {task.number} succeeded without a worker"
        assert not seen or max(seen) <= task.attempt
