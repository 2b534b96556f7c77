"""Celery tasks as steps: a real `celery worker` on RabbitMQ and on Redis, with an app that knows nothing of ORÁCULO."""

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from oraculo.celery_app import make_celery_app
from oraculo.errors import InvalidSettings, how_to_add
from oraculo.settings import BrokerSettings, Settings
from tests.bridges.celery_stage import Bridged, CeleryWorker
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["rabbitmq", pytest.param("redis", marks=pytest.mark.long)]
)
async def worker(
    request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[CeleryWorker]:
    log = tmp_path_factory.mktemp("celery") / "worker.log"
    started = CeleryWorker(fleet.url(request.param), log, "-c", "2")
    started.start()
    try:
        await started.is_ready()
        yield started
    finally:
        started.kill()


@pytest.fixture
async def oraculo(worker: CeleryWorker) -> AsyncIterator[Bridged]:
    async with Bridged(worker.broker, worker.queue) as stage:
        await stage.reads_events()
        await until(lambda: "enabled by remote" in worker.log(), within=30, saying="the worker to send events")
        yield stage


def result_of(aggregate: dict[str, Any]) -> Any:
    assert aggregate["status"] == "concluida", aggregate
    answer = aggregate["resultados"]["t"]
    assert answer["status"] == "ok"
    return answer["resultado"]


def failure_of(aggregate: dict[str, Any]) -> str:
    assert aggregate["status"] == "erro", aggregate
    assert aggregate["falhas"]["t"]["status"] == "erro"
    return str(aggregate["falhas"]["t"]["motivo"])


async def test_the_payloads_fields_are_the_keyword_arguments(oraculo: Bridged) -> None:
    assert result_of(await oraculo.task("celery://loja.somar", {"a": 2, "b": 3})) == {"soma": 5}


async def test_the_whole_payload_can_be_the_argument(oraculo: Bridged) -> None:
    result = result_of(await oraculo.task("celery://loja.eco?send=payload", {"texto": "coração"}))
    assert result == {"args": [{"texto": "coração"}], "kwargs": {}}


async def test_the_reason_of_a_failure_is_the_exception_and_its_text(oraculo: Bridged) -> None:
    assert failure_of(await oraculo.task("celery://loja.falhar")) == "ValueError: não há estoque"


async def test_an_exception_that_cannot_be_pickled(oraculo: Bridged) -> None:
    assert failure_of(await oraculo.task("celery://loja.peculiar")) == "Peculiar: the price is wrong 2 times"


async def test_what_is_no_json_fails_with_the_reason_and_is_not_tried_again(oraculo: Bridged) -> None:
    aggregate = await oraculo.task("celery://loja.objeto")
    assert "EncodeError" in failure_of(aggregate)
    assert "not JSON serializable" in failure_of(aggregate)


async def test_types_that_celery_knows_become_json(oraculo: Bridged) -> None:
    assert result_of(await oraculo.task("celery://loja.tipos")) == {
        "quando": "2025-10-14T12:00:00Z",
        "preço": "9.90",
        "nome": "coração",
    }


async def test_a_large_value(oraculo: Bridged) -> None:
    assert result_of(await oraculo.task("celery://loja.grande", {"size": 3_000_000})) == "x" * 3_000_000


async def test_a_task_whose_result_celery_ignores_answers_all_the_same(oraculo: Bridged) -> None:
    assert result_of(await oraculo.task("celery://loja.sem_resultado")) == "answered all the same"


async def test_celerys_own_retries_are_no_failures(oraculo: Bridged) -> None:
    aggregate = await oraculo.task("celery://loja.insistir", {"failures": 2})
    assert result_of(aggregate) == {"tentativas": 3}


async def test_celerys_own_retries_show_as_progress(oraculo: Bridged) -> None:
    destination = {"id": "t", "fila": "celery://loja.insistir", "payload": {"failures": 2}}
    run = await oraculo.submit({"destinos": [destination], "timeout": 30})
    await oraculo.ended(run)
    history = str(await oraculo.operations.history(run))
    assert "Celery runs it again after ConnectionError('the bank is away')" in history


async def test_a_retry_that_no_exception_asked_for_names_none(oraculo: Bridged) -> None:
    run = await oraculo.submit({"destinos": [{"id": "t", "fila": "celery://loja.adiar"}], "timeout": 30})
    assert result_of(await oraculo.ended(run)) == "now"
    assert "0 % Celery runs it again" in [entry.detail for entry in await oraculo.operations.history(run)]


async def test_celerys_last_retry_is_the_failure(oraculo: Bridged) -> None:
    aggregate = await oraculo.task("celery://loja.insistir", {"failures": 9})
    assert failure_of(aggregate) == "ConnectionError: the bank is away"
    assert aggregate["falhas"]["t"]["tentativas"] == 1


async def test_a_task_that_puts_another_in_its_place(oraculo: Bridged) -> None:
    assert result_of(await oraculo.task("celery://loja.trocar", {"a": 3, "b": 4})) == {"soma": 7}


async def test_a_pool_process_that_dies(oraculo: Bridged) -> None:
    assert "WorkerLostError: Worker exited prematurely" in failure_of(await oraculo.task("celery://loja.morrer"))


async def test_a_time_limit(oraculo: Bridged) -> None:
    assert "TimeLimitExceeded" in failure_of(await oraculo.task("celery://loja.limite"))


async def test_wrong_arguments_are_the_reason_of_a_failure(oraculo: Bridged) -> None:
    assert "missing 1 required positional argument: 'a'" in failure_of(await oraculo.task("celery://loja.somar"))


async def test_a_task_that_no_worker_knows_ends_with_the_reason(oraculo: Bridged, worker: CeleryWorker) -> None:
    aggregate = await oraculo.task("celery://loja.nenhuma")
    assert failure_of(aggregate) == f"NotRegistered: the worker {worker.queue}@{_host()} has no such task"


async def test_a_revoked_task_ends_with_the_reason(oraculo: Bridged, worker: CeleryWorker, tmp_path: Path) -> None:
    from celery import Celery

    started = tmp_path / "started"
    run = await oraculo.submit(
        {
            "destinos": [
                {
                    "id": "t",
                    "fila": "celery://loja.esperar",
                    "payload": {"path": str(tmp_path / "never"), "mark": str(started)},
                }
            ],
            "timeout": 30,
        }
    )
    await until(started.exists, within=20, saying="the task to begin")
    control = Celery(broker=worker.broker, set_as_current=False).control
    [[task]] = control.inspect([f"{worker.queue}@{_host()}"], limit=1).active().values()
    control.revoke(task["id"], terminate=True)
    assert failure_of(await oraculo.ended(run)) == "TaskRevokedError: someone terminated it (signal 15)"


@pytest.mark.parametrize(
    "url",
    [
        "nenhum://localhost",
        "no url",
        "memory://",
        "sqs://",
        "redis://localhost;Sentinel://localhost:26379",
        "amqp://localhost//;redis://localhost",
    ],
)
def test_a_broker_that_is_no_rabbitmq_and_no_redis_is_refused(url: str) -> None:
    with pytest.raises(InvalidSettings, match="ORACULO_CELERY_BROKER_URL: must lead to RabbitMQ or Redis"):
        Bridged(url, "celery")


def test_a_url_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="ORACULO_CELERY_BROKER_URL: cannot be read"):
        Bridged("amqp://localhost//;amqp://localhost:porta//", "celery")


@pytest.mark.parametrize("module", ["packaging", "redis"])
def test_a_package_that_kombu_lacks_for_redis_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    advice = re.escape(how_to_add("celery"))
    with pytest.raises(InvalidSettings, match=rf"ORACULO_CELERY_BROKER_URL: .*\({module}\): {advice}"):
        Bridged("redis://localhost", "celery")
    with pytest.raises(InvalidSettings, match=rf"ORACULO_BROKER_URL: .*\({module}\): {advice}"):
        make_celery_app(Settings(broker=BrokerSettings(url="redis://localhost")))


@pytest.mark.parametrize("url", ["redis://localhost", "redis://localhost//3", "redis+socket:///run/redis.sock"])
def test_a_redis_with_and_without_a_number(url: str) -> None:
    Bridged(url, "celery")


def _host() -> str:
    from celery.utils.nodenames import gethostname

    return str(gethostname())
