"""Processes that a handler forks, as `multiprocessing` does, end when they are asked to."""

from pathlib import Path

import httpx2

from tests.cli.conftest import QUICK
from tests.cli.processes import Process

APP = """
import multiprocessing
from oraculo.worker import App

app = App("pais")


@app.queue("reune")
def gathers(payload: dict) -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:  # its end sends SIGTERM to its processes
        return pool.map(abs, [-1, 2])
"""


def test_a_pool_of_a_handler_ends(tmp_path: Path) -> None:
    (tmp_path / "pais.py").write_text(APP)
    process = Process("dev", "--no-samples", "--app", "pais:app", cwd=tmp_path, env=QUICK)
    try:
        body = {"destinos": ["reune"], "timeout": 20}
        reply = httpx2.post(f"{process.url}/orquestracoes", json=body, headers={"Prefer": "wait=30"}, timeout=40)
        assert reply.json()["resultados"]["reune"]["resultado"] == [1, 2]
        assert process.stop() == 0
    finally:
        process.end()
    assert sum("oraculo: stopping" in line for line in process.errors) == 1, "the children do not write it too"
