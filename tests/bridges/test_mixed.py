"""Runs `examples/mixed`: one pipeline over a plain pika worker, a Celery task, a Node worker and a worker of the SDK.

Each of them is a process of its own beside `oraculo serve`.
"""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bridges.celery_stage import ROOT, CeleryWorker
from tests.bridges.node.processes import NodeProcess, expect_node, installed
from tests.end_to_end.cluster import Cluster, Program
from tests.servers.fleet import Fleet

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(180)


class Mixed(Cluster):
    """Run the engine with both bridges, and the four workers."""

    def __init__(self, folder: Path, amqp: str, redis: str) -> None:
        self._amqp, self._redis, self._folder = amqp, redis, folder
        self._bull = f"b{uuid.uuid4().hex[:10]}"
        self._celery_queue = f"loja-{uuid.uuid4().hex[:10]}"
        super().__init__(
            folder,
            amqp,
            workers=0,
            ORACULO_PIPELINES=str(EXAMPLES / "mixed"),
            ORACULO_CELERY_BROKER_URL=amqp,
            ORACULO_CELERY_QUEUE=self._celery_queue,
            ORACULO_CELERY_TASKS_ALLOW="loja.*",
            ORACULO_BULLMQ_QUEUES_ALLOW="images-queue",
            ORACULO_BULLMQ_URL=redis,
            ORACULO_BULLMQ_PREFIX=self._bull,
        )
        environment = self.engine._environment
        self.workers = [Program(folder / "sdk.log", environment, "worker", "examples.mixed.sdk_worker:app")]

    def celery(self) -> CeleryWorker:
        return CeleryWorker(
            self._amqp,
            self._folder / "celery.log",
            "-c",
            "1",
            app="loja",
            cwd=EXAMPLES / "celery_workers",
            queue=self._celery_queue,
            CELERY_BROKER_URL=self._amqp,
            LOJA_QUEUE=self._celery_queue,
        )

    def node(self) -> NodeProcess:
        script = installed(EXAMPLES / "bullmq_workers") / "workers.mjs"
        return NodeProcess(script, self._redis, self._bull, log=self._folder / "node.log")

    def pika(self) -> list[str]:
        script = EXAMPLES / "plain_workers" / "pika_worker.py"
        return [sys.executable, str(script), self._amqp, f"{self.prefix}executador_catalogo"]


@pytest.fixture
def mixed(fleet: Fleet, tmp_path: Path) -> Iterator[Mixed]:
    expect_node(fleet)
    cluster = Mixed(tmp_path, fleet.url("rabbitmq"), fleet.url("redis"))
    celery, node = cluster.celery(), cluster.node()
    with (tmp_path / "pika.log").open("wb") as log:
        pika = subprocess.Popen(cluster.pika(), stdout=log, stderr=log)
    try:
        celery.start()
        node.start()
        yield cluster
    finally:
        pika.kill()
        pika.wait(30)
        node.kill()
        celery.kill()


async def test_one_pipeline_over_four_kinds_of_workers(mixed: Mixed, tmp_path: Path) -> None:
    async with mixed:
        body = {"pipeline": "misto", "payload": {"titulo": "Oferta", "jobId": "6710a2"}}
        response = await mixed.client.post("/orquestracoes", json=body)
        assert response.status_code == 202, response.text
        found = await mixed.ended(response.json()["correlation_id"], within=100)
    assert found["status"] == "concluida", (found, logs(tmp_path))
    results: dict[str, Any] = {step: answer["resultado"] for step, answer in found["resultados"].items()}
    assert results["catalogo"]["recebido"]["config"] == {"produto": "tênis"}
    assert results["precos"] == {"produto": "tênis", "preco": 9.9, "moeda": "BRL"}
    assert results["imagens"] == {"images": ["6710a2-0.png", "6710a2-1.png"]}
    assert results["anuncio"] == {
        "texto": "Oferta: tênis por 9.9 BRL",
        "imagens": ["6710a2-0.png", "6710a2-1.png"],
        "catalogo": {"produto": "tênis"},
    }


def logs(folder: Path) -> dict[str, str]:
    return {log.name: log.read_text(errors="replace")[-1500:] for log in folder.glob("*.log")}
