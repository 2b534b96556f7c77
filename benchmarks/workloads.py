"""The workloads, each against a running harness. No-op workers; everything durable (`synchronous=FULL`).

W1  one run of 3 tasks at a time: the latency of a whole run, from the request to its aggregate
W2  1,000 runs of 3 tasks at once
W3  one run, 1,000 and 10,000 tasks wide
W4  500 runs of `A ; B→C→D ; (A,D)→E` at once
"""

import asyncio
import json
import time

from oraculo.testing.harness import Harness
from oraculo.worker import App

THREE = json.dumps({"destinos": ["escavador_a", "escavador_b", "executador_c"], "payload": {"fonte": "bench"}}).encode()
DAG = {
    "name": "w4",
    "steps": [
        {"type": "A", "queue": "w4"},
        {"type": "B", "queue": "w4"},
        {"type": "C", "queue": "w4", "dependsOn": ["B"]},
        {"type": "D", "queue": "w4", "dependsOn": ["C"]},
        {"type": "E", "queue": "w4", "dependsOn": ["A", "D"]},
    ],
}


def no_op_workers() -> App:
    app = App("bench")

    async def answer(payload: dict[str, object]) -> str:
        return "ok"

    for queue in ("escavador_a", "escavador_b", "executador_c", "w3", "w4"):
        app.queue(queue)(answer)
    return app


async def one_at_a_time(oraculo: Harness, runs: int) -> list[float]:
    """Milliseconds of each."""
    spans = []
    for _ in range(runs):
        started = time.perf_counter()
        await _concluded(oraculo, THREE)
        spans.append((time.perf_counter() - started) * 1000)
    return spans


async def many_at_once(oraculo: Harness, runs: int) -> float:
    """Runs a second."""
    started = time.perf_counter()
    await asyncio.gather(*(_concluded(oraculo, THREE) for _ in range(runs)))
    return runs / (time.perf_counter() - started)


async def one_wide(oraculo: Harness, width: int) -> float:
    """Seconds."""
    request = {"destinos": [{"id": f"t{number}", "fila": "w3"} for number in range(width)], "payload": {}}
    body = json.dumps(request).encode()
    started = time.perf_counter()
    await _concluded(oraculo, body)
    return time.perf_counter() - started


async def many_graphs(oraculo: Harness, runs: int) -> float:
    """Runs a second."""
    await oraculo.operations.put_pipeline("w4", json.dumps(DAG).encode())
    body = json.dumps({"pipeline": "w4", "payload": {}}).encode()
    started = time.perf_counter()
    await asyncio.gather(*(_concluded(oraculo, body) for _ in range(runs)))
    return runs / (time.perf_counter() - started)


async def _concluded(oraculo: Harness, body: bytes) -> None:
    submitted = await oraculo.operations.submit(body, wait=120)
    aggregate = json.loads(submitted.aggregate or b"{}")
    if aggregate.get("status") != "concluida":
        raise RuntimeError(
            f"run {submitted.run_id} did not succeed: {await oraculo.operations.explain(submitted.run_id)}"
        )
