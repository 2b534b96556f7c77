"""`oraculo dev` and `serve` as processes: starting, stopping, and what is there after a restart."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from oraculo.samples.requests import SAMPLE_REQUESTS
from tests.cli.conftest import QUICK
from tests.cli.processes import Cli, Process, environment, run, until
from tests.servers.prepared import Oraculo

Start = Callable[..., Process]

KEY_A, KEY_B = "chave-a-de-dezesseis", "chave-b-de-dezesseis"
SLOW = """
import asyncio
from oraculo.worker import App

app = App("lentos")


@app.queue("lento")
async def work(payload: dict) -> str:
    print("begun", flush=True)
    await asyncio.sleep({seconds})
    return "feito"
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[Process] = []

    def begin(*args: str, port: int = 0, **env: str) -> Process:
        processes.append(Process(*args, cwd=tmp_path, env={**QUICK, **env}, port=port))
        return processes[-1]

    yield begin
    for process in processes:
        process.end()


def write_app(folder: Path, queue: str = "executador_meu", answer: str = "feito") -> None:
    (folder / "meus.py").write_text(
        "from oraculo.worker import App\n"
        "app = App('meus')\n"
        f"@app.queue('{queue}')\n"
        f"async def work(payload: dict) -> str:\n    return '{answer}'\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_in_order_with_0(start: Start, number: int) -> None:
    dev = start("dev")
    cli = Cli(dev.url)
    cli.submitted("--pipeline", "promotional-video-full")  # there is work under way
    assert dev.stop(number) == 0
    errors = "".join(dev.errors)
    assert "oraculo: stopping" in errors
    assert "worker stopped" in errors
    assert "Traceback" not in errors


def test_a_second_signal_ends_it_at_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "lentos.py").write_text(SLOW.format(seconds=60))
    dev = start("dev", "--no-samples", "--app", "lentos:app")
    Cli(dev.url).submitted("--destino", "lento")
    dev.says("begun")
    dev.send(signal.SIGTERM)
    dev.says("oraculo: stopping")
    dev.send(signal.SIGTERM)
    assert dev.wait(within=10) == 128 + signal.SIGTERM


def test_what_was_done_and_what_was_not_is_there_after_a_restart(start: Start) -> None:
    first = start("dev", "--no-samples", "--store", "sqlite:///estado.db")
    cli = Cli(first.url)
    open_run = cli.submitted("--destino", "text-queue")  # without the samples nobody serves it
    cancelled = cli.submitted("--destino", "text-queue")
    cli.ok("runs", "cancel", cancelled)
    assert first.stop() == 0

    second = start("dev", "--pace", "0", "--store", "sqlite:///estado.db")
    cli = Cli(second.url)
    cli.ended(open_run, "concluida")
    assert cli.status(cancelled) == "cancelada"


@contextmanager
def watching(run_id: str, url: str) -> "Iterator[subprocess.Popen[str]]":
    """`oraculo runs watch` as a process, once it has printed its first line."""
    watcher = Oraculo(
        ["runs", "watch", run_id, "--url", url],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        assert "orquestracao_iniciada" in watcher.stdout.readline()
        yield watcher
    finally:
        if watcher.poll() is None:
            watcher.kill()
        watcher.communicate()


def test_a_live_stream_does_not_hold_up_the_stop(start: Start) -> None:
    dev = start("dev", "--no-samples")
    run_id = Cli(dev.url).submitted("--destino", "ninguem")
    with watching(run_id, dev.url):
        dev.send(signal.SIGTERM)
        assert dev.wait(within=8) == 0


def test_a_watcher_sits_out_a_restart(start: Start) -> None:
    first = start("dev", "--no-samples", "--store", "sqlite:///estado.db")
    url = first.url
    run_id = Cli(url).submitted("--destino", "text-queue")  # without the samples nobody serves it
    with watching(run_id, url) as watcher:
        assert first.stop() == 0
        start("dev", "--pace", "0", "--store", "sqlite:///estado.db", port=int(url.rpartition(":")[2]))
        rest, errors = watcher.communicate(timeout=60)
    assert watcher.returncode == 0, errors
    assert "orquestracao_iniciada" not in rest, "what was said is not printed again"
    assert f"run {run_id} concluida" in rest


@contextmanager
def submitting(url: str, wait: int) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """`oraculo submit --wait` as a process, and the id of its run, once that is taken."""
    args = ("submit", "--destino", "text-queue", "--wait", str(wait), "--url", url)
    waiting = Oraculo(args, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        (run,) = until(lambda: Cli(url).json("runs", "list")["orquestracoes"], saying="the run")
        yield waiting, run["correlation_id"]
    finally:
        if waiting.poll() is None:
            waiting.kill()
        waiting.communicate()


def test_who_submitted_and_waits_sits_out_a_restart(start: Start) -> None:
    first = start("dev", "--no-samples", "--store", "sqlite:///estado.db")
    url = first.url
    with submitting(url, 60) as (waiting, run_id):
        assert first.stop() == 0
        start("dev", "--pace", "0", "--store", "sqlite:///estado.db", port=int(url.rpartition(":")[2]))
        said, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, errors) == (0, "")
    assert f"run {run_id} concluida: 1 of 1" in said


def test_a_server_that_does_not_come_back_in_the_wait_leaves_the_runs_id_and_1(start: Start) -> None:
    dev = start("dev", "--no-samples")
    with submitting(dev.url, 4) as (waiting, run_id):
        assert dev.stop() == 0
        said, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, said) == (1, f"run {run_id} em_execucao\n")
    assert f"no server answers at {dev.url}" in errors
    assert f"oraculo runs watch {run_id} --url {dev.url}" in errors


def test_a_server_that_comes_back_without_the_run_is_not_given_another(start: Start) -> None:
    first = start("dev", "--no-samples", "--store", "sqlite:///estado.db")
    url = first.url
    with submitting(url, 60) as (waiting, run_id):
        assert first.stop() == 0
        start("dev", "--no-samples", "--store", "sqlite:///outro.db", port=int(url.rpartition(":")[2]))
        said, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, said) == (2, f"run {run_id} em_execucao\n")
    assert run_id in errors
    assert Cli(url).json("runs", "list")["orquestracoes"] == []


def test_a_port_in_use_is_one_line_and_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("dev", "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"oraculo: --port: {port} on 127.0.0.1 is in use; choose another, or stop what has it\n"
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_a_host_that_is_not_ours_is_one_line_and_2(tmp_path: Path) -> None:
    done = run("dev", "--host", "no.such.host.invalid", "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("oraculo: --host: ")


def test_an_address_of_another_machine_is_reported_as_the_host(tmp_path: Path) -> None:
    done = run("dev", "--host", "192.0.2.1", "--port", "0", cwd=tmp_path)  # kept for documentation by RFC 5737
    assert done.returncode == 2
    assert done.stderr == (
        "oraculo: --host: 192.0.2.1 is no address of this machine; 0.0.0.0 listens on all that it has\n"
    )


def test_dev_runs_an_app_of_the_users_instead_of_the_sample_for_that_queue(start: Start, tmp_path: Path) -> None:
    write_app(tmp_path, "text-queue", "meu texto")
    dev = start("dev", "--samples", "--pace", "0", "--app", "meus:app")
    cli = Cli(dev.url)
    for _ in range(3):
        done = cli.json("submit", "--destino", "text-queue", "--wait", "20")
        assert done["resultados"]["text-queue"]["resultado"] == "meu texto"
    assert cli.json("submit", "--destino", "images-queue", "--wait", "20")["status"] == "concluida"


def test_dev_without_samples_has_no_runs_and_no_sample_workers(start: Start) -> None:
    dev = start("dev", "--no-samples")
    cli = Cli(dev.url)
    assert cli.json("runs", "list")["orquestracoes"] == []
    assert not any(queue["consumidores"] for queue in _queues(dev.url) if queue["fila"] == "text-queue")


def test_dev_with_an_app_has_no_samples_and_suggests_what_the_app_serves(start: Start, tmp_path: Path) -> None:
    write_app(tmp_path)
    dev = start("dev", "--app", "meus:app", ORACULO_LOG_LEVEL="debug")
    cli = Cli(dev.url)
    assert cli.json("runs", "list")["orquestracoes"] == []
    assert not any(queue["consumidores"] for queue in _queues(dev.url) if queue["fila"] == "text-queue")
    (suggested,) = [line for line in dev.lines if "curl" in line]
    request = json.loads(suggested.split("'")[-2])
    assert request == {"destinos": ["executador_meu"], "payload": {}}
    assert httpx2.post(f"{dev.url}/orquestracoes", json=request).status_code == 202


def test_dev_says_where_it_is_before_it_logs(start: Start, tmp_path: Path) -> None:
    """With its log and its words on one terminal."""
    first = start("dev", "--no-samples", "--store", "sqlite:///estado.db")
    Cli(first.url).submitted("--destino", "ninguem")
    assert first.stop() == 0
    args = ["dev", "--no-samples", "--port", "0", "--store", "sqlite:///estado.db"]
    env = environment(**QUICK, ORACULO_LOG_LEVEL="debug")
    with Oraculo(args, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as both:
        try:
            assert both.stdout is not None
            assert both.stdout.readline().startswith("ORÁCULO ")
            assert any('"log.level"' in line for line in both.stdout), "it logs something after that"
        finally:
            both.kill()


def test_dev_suggests_no_request_where_nothing_is_served(start: Start) -> None:
    dev = start("dev", "--no-samples")
    dev.says("oraculo doctor")
    assert not any("curl" in line for line in dev.lines)


def test_doctor_beside_dev_looks_at_it_and_not_at_servers_that_it_does_not_use(start: Start, tmp_path: Path) -> None:
    away = {"ORACULO_BROKER_URL": "amqp://127.0.0.1:9", "ORACULO_STORE_URL": "postgresql://127.0.0.1:9/x"}
    dev = start("dev", "--no-samples", **away)
    Cli(dev.url).json("runs", "list")
    done = run("doctor", "--url", dev.url, "--json", cwd=tmp_path, env=away)
    checks = {check["nome"]: check for check in json.loads(done.stdout)["verificacoes"]}
    assert done.returncode == 0, checks
    assert {"broker memory", "store sqlite", "engine", "server"} <= checks.keys()
    assert not {"broker", "store"} & checks.keys()
    assert dev.url in checks["dev"]["detalhe"]


def test_the_sample_runs_are_submitted_once_and_again_when_asked_for(start: Start) -> None:
    def runs_after(*options: str) -> int:
        dev = start("dev", "--pace", "0", *options)
        dev.says("Sample runs:")
        count = len(Cli(dev.url).json("runs", "list")["orquestracoes"])
        assert dev.stop() == 0
        return count

    samples = len(SAMPLE_REQUESTS)
    assert runs_after() == samples
    assert runs_after() == samples
    assert runs_after("--samples") == 2 * samples


def test_a_start_without_sample_runs_says_how_to_get_them(start: Start) -> None:
    first = start("dev", "--no-samples")
    Cli(first.url).submitted("--destino", "ninguem")
    assert first.stop() == 0
    start("dev").says("`oraculo dev --samples` submits them")


def _queues(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx2.get(f"{url}/filas").json()["filas"]
    return found


def test_dev_never_touches_shared_servers(start: Start, tmp_path: Path) -> None:
    env = {
        "ORACULO_QUEUES_ALLOW": "loja_*",  # of the servers
        "ORACULO_BROKER_URL": "amqp://prod",
        "ORACULO_STORE_URL": "postgresql://prod/x",
        "ORACULO_OBJECTS_URL": "s3://prod",
    }
    dev = start("dev", "--pace", "0", **env)
    assert Cli(dev.url).json("submit", "--tipo", "coleta_completa", "--wait", "20")["status"] == "concluida"
    assert (tmp_path / ".oraculo" / "oraculo.db").exists()
    dev.says("leaves ORACULO_QUEUES_ALLOW alone")
    dev.says("leaves ORACULO_BROKER_URL alone")
    dev.says("leaves ORACULO_STORE_URL alone")
    dev.says("leaves ORACULO_OBJECTS_URL alone")


def test_serve_warns_that_memory_has_no_workers(start: Start) -> None:
    serve = start("serve")
    assert Cli(serve.url).json("runs", "list")["orquestracoes"] == []
    assert "only workers in this process can reach the queues" in "".join(serve.errors)
    assert serve.stop() == 0


def test_serve_with_an_app_does_its_work_and_does_not_warn(start: Start, tmp_path: Path) -> None:
    write_app(tmp_path)
    serve = start("serve", "--app", "meus:app")
    done = Cli(serve.url).json("submit", "--destino", "executador_meu", "--wait", "20")
    assert done["resultados"]["executador_meu"] == {"status": "ok", "resultado": "feito"}
    assert "warning: with memory://" not in "".join(serve.errors)


def test_serve_on_every_address_without_keys_and_with_leave_warns(start: Start) -> None:
    serve = start("serve", "--host", "0.0.0.0", "--insecure")
    serve.says("whoever can reach 0.0.0.0 can start runs; set ORACULO_API_KEYS")
    assert httpx2.get(f"{serve.url}/orquestracoes", headers={"Host": "oraculo.example"}).status_code == 200


def test_a_key_is_asked_for_and_taken(start: Start) -> None:
    serve = start("serve", ORACULO_API_KEYS=f"operator:{KEY_A},{KEY_B}")
    cli = Cli(serve.url)
    refused = cli("runs", "list")
    assert refused.exit_code == 2
    assert "--api-key or ORACULO_API_KEY" in refused.stderr
    assert cli("runs", "list", "--api-key", "errada").exit_code == 2
    assert cli("runs", "list", "--api-key", KEY_B).exit_code == 0
    assert cli("runs", "list", env={"ORACULO_API_KEY": KEY_A}).exit_code == 0


def test_doctor_finds_a_key_that_the_server_does_not_know(start: Start) -> None:
    serve = start("serve", ORACULO_API_KEYS=f"operator:{KEY_A},{KEY_B}")
    refusal = f"at {serve.url}, ready, but the server wants an API key that it knows; give it with --api-key or "
    assert doctor_of_server(serve.url, "errada") == (1, "erro", f"{refusal}ORACULO_API_KEY")
    assert doctor_of_server(serve.url, "") == (0, "aviso", f"{refusal}ORACULO_API_KEY")
    assert doctor_of_server(serve.url, KEY_B)[:2] == (0, "ok")


def doctor_of_server(url: str, key: str) -> tuple[int, str, str]:
    result = Cli(url)("doctor", "--json", env={"ORACULO_API_KEY": key})
    check = next(one for one in json.loads(result.stdout)["verificacoes"] if one["nome"] == "server")
    return result.exit_code, check["estado"], check["detalhe"]


def test_uvicorn_serves_the_app(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "oraculo.main:app", "--port", str(port)],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    try:

        def ready() -> bool:
            try:
                return httpx2.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
            except httpx2.TransportError:
                return False

        until(ready, saying="readiness")
        assert Cli(f"http://127.0.0.1:{port}").submitted("--destino", "ninguem")
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_uvicorn_off_loopback_without_keys_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uvicorn", "oraculo.main:app", "--port", "0", "--host", "0.0.0.0"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("oraculo: ORACULO_API_KEYS: none are set, and other machines can reach 0.0.0.0")


def test_what_is_in_work_is_finished_before_the_process_ends(start: Start, tmp_path: Path) -> None:
    (tmp_path / "lentos.py").write_text(SLOW.format(seconds=0.7))
    store = f"sqlite:///{tmp_path}/absoluto.db"
    first = start("dev", "--no-samples", "--app", "lentos:app", "--store", store)
    run_id = Cli(first.url).submitted("--destino", "lento")
    first.says("begun")
    assert first.stop() == 0
    second = start("dev", "--no-samples", "--store", store)  # nobody here could do the work
    assert Cli(second.url).status(run_id) == "concluida"


def test_watch_on_a_terminal_draws_a_table(dev: Process) -> None:
    run_id = Cli(dev.url).submitted("--pipeline", "promotional-video-full")
    terminal, end = pty.openpty()
    watcher = Oraculo(
        ["runs", "watch", run_id, "--url", dev.url],
        env=environment(TERM="xterm", COLUMNS="120", LINES="30"),
        stdout=end,
    )
    os.close(end)
    drawn = _read_all(terminal)
    assert watcher.wait(timeout=30) == 0
    assert f"run {run_id} concluida: 5 of 5" in drawn
    for words in ("promotional-video-full", "ENHANCED_IMAGES", "PROMOTIONAL_VIDEO", "━", "\x1b["):
        assert words in drawn


def _read_all(terminal: int) -> str:
    chunks: list[bytes] = []
    try:
        while chunk := os.read(terminal, 65536):
            chunks.append(chunk)
    except OSError:  # Linux says so when the other end is closed
        pass
    finally:
        os.close(terminal)
    return b"".join(chunks).decode()
