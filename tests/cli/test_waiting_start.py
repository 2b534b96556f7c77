"""A server whose store cannot be opened yet answers health checks, says what it waits for, and starts once it can."""

import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.cli.processes import environment, until
from tests.servers.prepared import ORACULO

NO_ROOM = ("sh", "-c", 'ulimit -S -f 0; exec "$@"', "sh")  # no file may grow, as on a full disk
COMMANDS = {
    "serve": [*ORACULO, "serve"],
    "uvicorn": [sys.executable, "-m", "uvicorn", "oraculo.main:app"],
}


class Waiting:
    """A server that finds no room for its store."""

    def __init__(self, command: list[str], folder: Path, **settings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        env = environment(ORACULO_STORE_URL="sqlite:///x.db", **settings)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*NO_ROOM, *command, "--port", str(port)], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True
        )
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)

    def answer_to(self, path: str) -> httpx2.Response:
        return until(lambda: self._answer(path), saying=f"an answer to {path}")

    def _answer(self, path: str) -> httpx2.Response | None:
        try:
            return self.client.get(path)
        except httpx2.TransportError:
            assert self.process.poll() is None, self.process.communicate()
            return None

    def make_room(self) -> None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, unlimited)

    def end(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


Begin = Callable[..., Waiting]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    begun: list[Waiting] = []

    def start(command: list[str], **settings: str) -> Waiting:
        begun.append(Waiting(command, tmp_path, **settings))
        return begun[-1]

    yield start
    for each in begun:
        each.end()


def test_health_is_answered_while_the_disk_is_full_and_work_is_taken_once_it_is_not(begin: Begin) -> None:
    server = begin(COMMANDS["serve"])
    assert server.answer_to("/health").json()["status"] == "ok"
    ready = server.answer_to("/health/ready")
    assert ready.status_code == 503
    said = ready.json()["partes"]["engine"]["problema"]
    assert said.startswith("waits for the store sqlite: SQLite file x.db: ")
    for reply in (server.client.get("/orquestracoes"), server.client.post("/orquestracoes", json={})):
        assert reply.status_code == 503
        assert "the server is starting: waits for the store sqlite" in reply.json()["detail"]
        assert reply.headers["retry-after"]
    server.make_room()
    until(lambda: server.answer_to("/health/ready").status_code == 200, saying="readiness")
    assert server.client.post("/orquestracoes", json={"destinos": ["ninguem"]}).status_code == 202
    server.process.send_signal(signal.SIGTERM)
    output, errors = server.process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert server.process.returncode == 0
    assert "ORÁCULO" in output


@pytest.mark.parametrize(("command", "status"), [("serve", 2), ("uvicorn", -signal.SIGTERM)])
def test_a_store_that_stays_away_ends_the_server_once_patience_ends(command: str, status: int, begin: Begin) -> None:
    server = begin(COMMANDS[command], ORACULO_STORE_PATIENCE="0.5")
    assert server.answer_to("/health").status_code == 200
    _, errors = server.process.communicate(timeout=30)
    assert server.process.returncode == status
    said = errors.splitlines()[-1] if command == "serve" else errors
    assert "SQLite file x.db: " in said
    assert "Traceback" not in errors


def test_a_server_that_waits_is_stopped_in_order(begin: Begin) -> None:
    server = begin(COMMANDS["serve"])
    server.answer_to("/health")
    server.process.send_signal(signal.SIGTERM)
    _, errors = server.process.communicate(timeout=30)
    assert server.process.returncode == 0, errors
    assert "Traceback" not in errors
