"""What a signal means for those who wait, and for handlers that never end. Real processes throughout."""

import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from tests.cli.conftest import QUICK
from tests.cli.processes import Cli, Process, until

STUCK = {
    "a plain handler": "@app.queue('preso')\ndef work(payload: dict) -> None:\n    hang()\n",
    "a thread of the handler's": (
        "@app.queue('preso')\nasync def work(payload: dict) -> None:\n    await asyncio.to_thread(hang)\n"
    ),
    "an async handler that will not be cancelled": (
        "@app.queue('preso')\n"
        "async def work(payload: dict) -> None:\n"
        "    print('begun', flush=True)\n"
        "    while True:\n"
        "        with contextlib.suppress(asyncio.CancelledError):\n"
        "            await asyncio.sleep(60)\n"
    ),
}
HEADER = """
import asyncio, contextlib, time
from oraculo.worker import App

app = App("presos")


def hang() -> None:
    print("begun", flush=True)
    time.sleep(3600)


"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    started = Process("dev", "--no-samples", cwd=tmp_path, env=QUICK)
    yield started
    started.end()


def assert_stops_quietly(process: Process) -> None:
    assert process.stop() == 0
    log = "".join(process.errors)
    assert "Traceback" not in log
    assert "Cancel" not in log


def test_who_waits_for_a_run_learns_that_it_was_taken(process: Process) -> None:
    body = {"destinos": ["ninguem"], "correlation_id": "esperada"}
    with ThreadPoolExecutor() as threads, httpx2.Client(base_url=process.url, timeout=30) as client:
        waiting = threads.submit(client.post, "/orquestracoes", json=body, headers={"Prefer": "wait=60"})
        until(lambda: Cli(process.url).json("runs", "list")["orquestracoes"], saying="the run")
        assert_stops_quietly(process)
        reply = waiting.result(timeout=10)
    assert reply.status_code == 202
    assert reply.json()["correlation_id"] == "esperada"
    assert reply.json()["links"]["self"] == reply.headers["location"] == "/orquestracoes/esperada"


@pytest.mark.long
def test_who_waits_for_a_store_that_takes_nothing_is_asked_to_ask_again(tmp_path: Path) -> None:
    process = Process("dev", "--no-samples", cwd=tmp_path, env={**QUICK, "ORACULO_ENGINE_STOP_GRACE": "0.5"})
    try:
        with (
            httpx2.Client(base_url=process.url, timeout=30) as client,
            closing(sqlite3.connect(tmp_path / ".oraculo" / "oraculo.db", isolation_level=None)) as another,
            ThreadPoolExecutor() as threads,
        ):
            another.execute("BEGIN IMMEDIATE")  # nobody else writes meanwhile
            waiting = threads.submit(client.post, "/orquestracoes", json={"destinos": ["ninguem"]})
            process.says("waits for the store")
            process.send(signal.SIGTERM)
            reply = waiting.result(timeout=10)
            another.execute("ROLLBACK")
            assert process.wait() == 0
    finally:
        process.end()
    assert reply.status_code == 503, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    assert "stopping" in reply.json()["detail"]
    assert reply.headers["retry-after"]
    assert "Traceback" not in "".join(process.errors)


def test_a_live_stream_ends_as_a_stream_should(process: Process) -> None:
    run_id = Cli(process.url).submitted("--destino", "ninguem")
    headers = {"Accept": "text/event-stream"}
    address = f"{process.url}/orquestracoes/{run_id}/eventos"
    with httpx2.stream("GET", address, headers=headers, timeout=30) as reply:
        lines = reply.iter_lines()
        assert "orquestracao_iniciada" in next(lines)
        process.send(signal.SIGTERM)
        rest = list(lines)  # raises when the connection is cut in the middle of a chunk
    assert not any("fim" in line for line in rest), "the run has not ended, only the server"
    assert process.wait(within=10) == 0
    assert "Traceback" not in "".join(process.errors)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_waits_for_its_store_is_stopped_in_order(tmp_path: Path, number: int) -> None:
    process = Process("serve", cwd=tmp_path, env={"ORACULO_STORE_URL": "postgresql://a:b@127.0.0.1:9/x"})
    try:
        process.says("waits for it")
        assert process.stop(number) == 0  # for PID 1 a signal that nobody asked for does not even exist
        process.says("oraculo: stopping")
    finally:
        process.end()


@pytest.mark.parametrize("handler", STUCK.values(), ids=STUCK.keys())
def test_a_handler_that_never_ends_does_not_keep_the_process(tmp_path: Path, handler: str) -> None:
    (tmp_path / "presos.py").write_text(HEADER + handler)
    grace = {"ORACULO_WORKER_STOP_GRACE": "0.5"}
    process = Process("dev", "--no-samples", "--app", "presos:app", cwd=tmp_path, env={**QUICK, **grace})
    try:
        Cli(process.url).submitted("--destino", "preso")
        process.says("begun")
        process.send(signal.SIGTERM)
        assert process.wait(within=20) == 0
    finally:
        process.end()
    assert "Traceback" not in "".join(process.errors)
