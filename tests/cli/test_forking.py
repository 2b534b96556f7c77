"""Processes that a handler forks, as `multiprocessing` does: what signals mean to them, and what they leave behind."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2

from tests.cli.conftest import QUICK
from tests.cli.processes import Process

APP = """
import multiprocessing, os, signal, time
from oraculo.worker import App

app = App("pais")
fork = multiprocessing.get_context("fork")
told_at_birth = False


def tell() -> None:
    if told_at_birth:
        os.kill(os.getpid(), signal.SIGTERM)


os.register_at_fork(after_in_child=tell)  # first, so before anything that oraculo does in a child


@app.queue("termina")
def terminates(payload: dict) -> int | None:
    global told_at_birth
    told_at_birth = payload["at_birth"]
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    told_at_birth or child.terminate()
    told_at_birth = False
    child.join(5)
    code = child.exitcode
    child.kill()
    return code


@app.queue("reune")
def gathers(payload: dict) -> list[int]:
    with fork.Pool(2) as pool:
        return pool.map(abs, [-1, 2])


def look(told) -> None:
    wakeup = signal.set_wakeup_fd(-1)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    os.kill(os.getpid(), signal.SIGINT)  # as a terminal does it to all
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        told.put([wakeup, len(blocked), signal.getsignal(signal.SIGTERM)])


@app.queue("olha")
async def looks(payload: dict) -> list:
    told = fork.SimpleQueue()
    fork.Process(target=look, args=(told,)).start()
    return told.get()
"""


def result_of(url: str, queue: str, payload: dict[str, Any]) -> Any:
    body = {"destinos": [queue], "payload": payload, "timeout": 20}
    reply = httpx2.post(f"{url}/orquestracoes", json=body, headers={"Prefer": "wait=30"}, timeout=40)
    return reply.json()["resultados"][queue]["resultado"]


def test_a_child_ends_when_it_is_told_to_and_its_own_children_have_its_signals(tmp_path: Path) -> None:
    (tmp_path / "pais.py").write_text(APP)
    process = Process("dev", "--no-samples", "--app", "pais:app", cwd=tmp_path, env=QUICK)
    try:
        url = process.url
        assert result_of(url, "termina", {"at_birth": False}) == -15
        assert result_of(url, "termina", {"at_birth": True}) == -15, "however early it is told"
        assert result_of(url, "reune", {}) == [1, 2]
        assert result_of(url, "olha", {}) == [-1, 0, 1], "it let the SIGINT pass"
        assert process.stop() == 0
    finally:
        process.end()
    assert sum("oraculo: stopping" in line for line in process.errors) == 1, "the children do not say it too"


def test_a_child_lets_only_the_first_ctrl_c_pass() -> None:
    program = (
        "import os, signal\nfrom oraculo.cli.forking import children_spared\n"
        "with children_spared():\n    if (child := os.fork()) == 0:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n        try:\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n            os._exit(7)\n        os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=True).stdout == b"7\n"
