"""The example of the Celery page, as a reader would run it: the app, the pipeline, and a client that starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bridges.celery_stage import ROOT, CeleryWorker, command_in
from tests.end_to_end.cluster import Cluster
from tests.end_to_end.stage import settings_for
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
EXAMPLE = ROOT / "examples" / "celery_workers"
PAGE = ROOT / "docs" / "how-to" / "celery.md"


async def test_the_example(fleet: Fleet, tmp_path: Path) -> None:
    """The workers start as the documents say, on one machine and one broker."""
    url = fleet.url("rabbitmq")
    settings = settings_for(url)
    queue = f"loja-{tmp_path.name}"
    loja = CeleryWorker(
        url,
        tmp_path / "loja.log",
        command=command_in(PAGE, "celery -A loja worker"),
        cwd=EXAMPLE,
        CELERY_BROKER_URL=url,
        LOJA_QUEUE=queue,
    )
    core = CeleryWorker(
        url,
        tmp_path / "core.log",
        command=command_in(EXAMPLE / "start_a_run.py", "celery -A oraculo.celery_app worker"),
        cwd=EXAMPLE,
        ORACULO_BROKER_URL=url,
        ORACULO_PREFIX=settings.broker.prefix,
    )
    bridge = {
        "ORACULO_CELERY_BROKER_URL": url,
        "ORACULO_CELERY_QUEUE": queue,
        "ORACULO_CELERY_TASKS_ALLOW": "loja.*",
        "ORACULO_PIPELINES": str(EXAMPLE),
    }
    cluster = Cluster(tmp_path, url, workers=0, **bridge, ORACULO_PREFIX=settings.broker.prefix)
    try:
        loja.start()
        core.start()
        async with cluster:
            run_id = _started(url, f"{settings.broker.prefix}orquestrador_core")

            async def is_there() -> bool:
                loja.expect_running()
                core.expect_running()
                return (await cluster.client.get(f"/orquestracoes/{run_id}")).status_code == 200

            await until(is_there, within=40, saying="the run to be there")
            found = await cluster.ended(run_id)
        assert found["status"] == "concluida", (found, loja.tail())
        assert found["resultados"]["anuncio"] == {"status": "ok", "resultado": "Oferta: 9.9 BRL, 3 left"}
    finally:
        core.kill()
        loja.kill()


def _started(url: str, queue: str) -> str:
    command = [sys.executable, "start_a_run.py", url, queue]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_page_shows_the_example() -> None:
    page = PAGE.read_text()
    assert [path.name for path in EXAMPLE.iterdir() if path.is_file() and path.name not in page] == []
