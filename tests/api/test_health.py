import asyncio
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urljoin

import pytest

from oraculo import __version__
from oraculo.core.run import RunStatus
from oraculo.engine.operations import LARGE_REQUEST
from oraculo.errors import NO_THREAD, BrokerUnavailable, StoreError, StoreUnavailable
from oraculo.ports.broker import BrokerStatus
from oraculo.ports.broker_admin import QueueState
from oraculo.telemetry.metrics import MAX_QUEUES

from .service import Service, assert_problem


async def test_alive_and_ready(service: Service) -> None:
    assert (await service.client.get("/health")).json() == {"status": "ok", "versao": __version__}
    reply = await service.client.get("/health/ready")
    assert reply.status_code == 200
    assert reply.json()["status"] == "ok"
    assert reply.json()["partes"]["store sqlite"] == {"ok": True, "problema": None}


async def test_not_ready_says_which_part_and_why(service: Service) -> None:
    await service.broker.close()
    reply = await service.client.get("/health/ready")
    assert reply.status_code == 503
    assert reply.json()["status"] == "indisponivel"
    assert "closed" in reply.json()["partes"]["broker memory"]["problema"]
    assert reply.json()["partes"]["store sqlite"]["ok"]
    assert (await service.client.get("/health")).status_code == 200


async def test_before_the_start_nothing_is_taken(tmp_path: Path) -> None:
    service = Service(tmp_path)
    async with service.client:
        assert (await service.client.get("/health")).status_code == 200
        assert (await service.client.get("/health/ready")).json()["partes"]["engine"]["ok"] is False
        reply = await service.client.post("/orquestracoes", json={"destinos": ["escavador_x"]})
        assert_problem(reply, 503)
        assert int(reply.headers["retry-after"]) > 0


async def test_metrics_show_runs_and_queues(service: Service) -> None:
    await service.start_run(destinos=["escavador_x"])
    await service.bury("fila_x", b"{}")
    reply = await service.client.get("/metrics")
    assert reply.headers["content-type"] == service.metrics.content_type
    assert 'oraculo_runs{status="em_execucao"} 1.0' in reply.text
    assert 'oraculo_queue_dead_letters{queue="fila_x"} 1.0' in reply.text


async def test_metrics_are_there_beside_a_run_that_a_newer_version_wrote(service: Service) -> None:
    service.write_as_newer(await service.start_run(destinos=["escavador_x"]))
    await service.start_run(destinos=["escavador_x"])
    reply = await service.client.get("/metrics")
    assert reply.status_code == 200
    assert 'oraculo_runs{status="em_execucao"} 1.0' in reply.text


async def test_metrics_show_our_own_queues_however_many_strangers_there_are(service: Service) -> None:
    for number in range(MAX_QUEUES):
        await service.bury(f"resp-{number}", b"{}")
    await service.client.put("/pipelines/novo", json={"steps": [{"type": "executador_novo"}]})
    reply = await service.client.get("/metrics")
    for queue in ("orquestrador", "resultados", "executador_novo"):
        assert f'oraculo_queue_ready{{queue="{queue}"}} 0.0' in reply.text


async def test_metrics_are_there_without_the_broker(service: Service) -> None:
    await service.bury("fila_x", b"{}")
    await service.client.get("/metrics")
    await service.broker.close()
    reply = await service.client.get("/metrics")
    assert reply.status_code == 200
    assert "oraculo_runs_started_total" in reply.text
    assert "fila_x" not in reply.text  # old numbers would look like new ones


async def test_metrics_show_how_many_engines_are_alive_now(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_since: float) -> list[str]:
        raise StoreUnavailable("away")

    async def none(_since: float) -> list[str]:
        return []

    assert "oraculo_engines 1.0" in (await service.client.get("/metrics")).text
    monkeypatch.setattr(service.engine.ports.store, "engines", none)
    assert "oraculo_engines 0.0" in (await service.client.get("/metrics")).text
    monkeypatch.setattr(service.engine.ports.store, "engines", away)
    assert "\noraculo_engines " not in (await service.client.get("/metrics")).text, "nobody knows"


async def test_metrics_show_nothing_old_of_the_runs_while_the_store_is_away(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> dict[RunStatus, int]:
        raise StoreUnavailable("away")

    assert "\noraculo_runs{" in (await service.client.get("/metrics")).text
    monkeypatch.setattr(service.engine.ports.store, "census", away)
    said = (await service.client.get("/metrics")).text
    assert "\noraculo_runs{" not in said, "nobody knows"
    assert "oraculo_runs_started_total" in said


async def test_metrics_show_no_number_of_dead_letters_while_one_of_several_brokers_is_away(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own are in none, and a number that falls would end an alert."""
    await service.bury("fila_x", b"{}")
    links = [BrokerStatus("rabbitmq", None), BrokerStatus("redis", None)]
    monkeypatch.setattr(service.broker, "statuses", lambda: links)
    letters, ready = 'oraculo_queue_dead_letters{queue="fila_x"} 1.0', 'oraculo_queue_ready{queue="fila_x"} 0.0'
    assert letters in (await service.client.get("/metrics")).text
    links[0] = BrokerStatus("rabbitmq", "refused")
    said = (await service.client.get("/metrics")).text
    assert "oraculo_queue_dead_letters{" not in said
    assert ready in said, "of the work that the others have"
    links[0] = BrokerStatus("rabbitmq", None)
    assert letters in (await service.client.get("/metrics")).text


async def test_metrics_show_no_number_of_dead_letters_when_a_broker_comes_back_while_they_are_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.bury("fila_x", b"{}")
    links, count = [BrokerStatus("rabbitmq", "refused"), BrokerStatus("redis", None)], service.broker.queues
    monkeypatch.setattr(service.broker, "statuses", lambda: links)

    async def queues(names: Sequence[str] | None = None) -> Sequence[QueueState]:
        counted = await count(names)
        links[0] = BrokerStatus("rabbitmq", None)
        return counted

    monkeypatch.setattr(service.broker, "queues", queues)
    said = (await service.client.get("/metrics")).text
    assert "oraculo_queue_dead_letters{" not in said
    assert 'oraculo_broker_up{broker="rabbitmq"} 1.0' in said


async def test_metrics_show_what_the_only_broker_has_though_it_takes_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.bury("fila_x", b"{}")
    monkeypatch.setattr(service.broker, "statuses", lambda: [BrokerStatus("rabbitmq", "out of memory")])
    assert 'oraculo_queue_dead_letters{queue="fila_x"} 1.0' in (await service.client.get("/metrics")).text


async def test_the_way_in(service: Service) -> None:
    reply = await service.client.get("/")
    assert reply.status_code == 307
    assert reply.headers["location"] == "docs"
    assert "swagger" in (await service.client.get("/docs")).text
    assert (await service.client.get("/redoc")).status_code == 404


async def test_the_page_works_wherever_a_proxy_puts_it(service: Service) -> None:
    outside = "https://fora.example/oraculo/"
    page = (await service.client.get("/docs")).text
    addresses = re.findall(r"""(?:src=|href=|url: )["']([^"']+)""", page)
    assert len(addresses) == 6
    for address in addresses:
        seen_from_outside = urljoin(outside + "docs", address)
        assert seen_from_outside.startswith(outside)
        assert (await service.client.get(seen_from_outside.removeprefix(outside.rstrip("/")))).status_code == 200
    [server] = (await service.client.get("/openapi.json")).json()["servers"]
    assert urljoin(outside + "openapi.json", server["url"]) == outside


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreUnavailable("no answer from 10.0.0.5"), 503),
        (BrokerUnavailable("no answer from 10.0.0.5"), 503),
        (StoreError("column secret"), 500),
        (RuntimeError("column secret"), 500),
    ],
)
async def test_trouble_inside_is_a_problem_without_its_internals(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, status: int
) -> None:
    async def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr(service.operations, "runs", fail)
    reply = await service.client.get("/orquestracoes")
    assert_problem(reply, status)
    assert ("retry-after" in reply.headers) == (status == 503)
    if status == 500:
        assert "secret" not in reply.text
        assert "GET /orquestracoes failed" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/orquestracoes", b'{"destinos": ["fila_a"], "payload": {"a": "%s"}}' % (b"x" * LARGE_REQUEST)),
        ("PUT", "/pipelines/meu", b"steps: [{type: a}]"),
        ("GET", "/asyncapi.json", None),
        ("GET", "/swagger/swagger-ui.css", None),
    ],
)
async def test_a_system_without_room_for_threads_is_asked_again_later(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    body: bytes | None,
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # none has started yet
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError(NO_THREAD)))
        reply = await service.client.request(method, path, content=body)
    assert_problem(reply, 503)
    assert reply.headers["retry-after"] == "1"
    assert "threads" in reply.json()["detail"]
    assert f"{method} {path}: the system has no room for another thread" in caplog.text
    assert (await service.client.request(method, path, content=body)).is_success


async def test_one_broker_of_several_that_is_away_is_reported_and_work_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = [BrokerStatus("rabbitmq", "refused"), BrokerStatus("redis", None)]
    monkeypatch.setattr(service.broker, "statuses", lambda: links)
    reply = await service.client.get("/health/ready")
    assert reply.status_code == 200
    assert reply.json()["status"] == "degradado"
    assert reply.json()["partes"]["broker rabbitmq"] == {"ok": False, "problema": "refused"}
    assert reply.json()["partes"]["broker redis"] == {"ok": True, "problema": None}
    said = (await service.client.get("/filas")).json()["brokers"]
    assert said[0] == {"nome": "rabbitmq", "ok": False, "problema": "refused", "filas_surdas": []}
    monkeypatch.setattr(service.engine.parts.queues.names, "prefix", "loja.")
    links[0] = BrokerStatus("rabbitmq", None, deaf=("loja.resultados",))
    said = (await service.client.get("/filas")).json()["brokers"]
    assert said[0]["filas_surdas"] == ["resultados"]
    links[0] = BrokerStatus("rabbitmq", "refused")
    metrics = (await service.client.get("/metrics")).text
    assert 'oraculo_broker_up{broker="rabbitmq"} 0.0' in metrics
    assert 'oraculo_broker_up{broker="redis"} 1.0' in metrics
