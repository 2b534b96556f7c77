"""ORACULO_QUEUES_ALLOW and system queues, at every place where the outside names a queue."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.pipeline.definition import Definition, Kind, Step, encode_definition
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.settings import QueueSettings
from oraculo.wire import naming
from oraculo.wire.message import Message, encode_message
from tests.waiting import until

from .service import SETTINGS, Service, assert_problem, running

OUTSIDE = "is outside ORACULO_QUEUES_ALLOW (loja.*, minhas_respostas)"
BOUNDED = msgspec.structs.replace(
    SETTINGS,
    queues=QueueSettings(allow=("loja.*", "minhas_respostas")),
    rotas={"de_fora": ("pagamentos",), "de_dentro": ("loja.a",)},
)
OUTSIDER = Definition("de-fora", (Step("um", "pagamentos"),), Kind.PIPELINE)
PIPELINE = {"name": "p", "steps": [{"id": "um", "type": "X", "queue": "loja.a"}, {"id": "dois", "type": "pagamentos"}]}


@pytest.fixture
async def bounded(tmp_path: Path) -> AsyncIterator[Service]:
    async with running(tmp_path, BOUNDED) as service:
        yield service


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"destinos": ["loja.a", "pagamentos"]}, "destinos[1]"),
        ({"destinos": [{"id": "loja.a", "fila": "pagamentos"}]}, "destinos[0]"),
        ({"destinos": ["loja.a"], "responder_em": "pagamentos"}, "responder_em"),
        ({"tipo": "de_fora"}, "tipo"),
        ({"pipeline": "de-fora"}, "pipeline"),
    ],
)
async def test_a_request_names_no_queue_outside(bounded: Service, request_: dict[str, Any], field: str) -> None:
    await bounded.engine.ports.store.put_pipeline(
        "de-fora", encode_definition(OUTSIDER), 0.0
    )  # put before it was bounded
    reply = await bounded.client.post("/orquestracoes", json=request_)
    assert_problem(reply, 422, field, OUTSIDE)
    assert await bounded.runs() == []
    assert not await bounded.broker.queues(["pagamentos"])


async def test_queues_outside_are_reported_with_the_other_faults_of_a_pipeline(bounded: Service) -> None:
    steps = [{"type": "pagamentos"}, {"type": "loja.a", "timeout": "x"}, {"type": "amq.a"}, {"type": "estoque"}]
    reply = await bounded.client.put("/pipelines/p", json={"steps": steps})
    assert reply.status_code == 422
    assert sorted(fault["campo"] for fault in reply.json()["erros"]) == [
        "steps[0] (pagamentos).queue",
        "steps[1] (loja.a).timeout",
        "steps[2] (amq.a).queue",
        "steps[3] (estoque).queue",
    ]


@pytest.mark.parametrize(
    "request_", [{"destinos": ["loja.a"], "responder_em": "minhas_respostas"}, {"tipo": "de_dentro"}]
)
async def test_a_request_names_queues_inside(bounded: Service, request_: dict[str, Any]) -> None:
    await bounded.start_run(**request_)


async def test_a_message_names_no_queue_outside_either(bounded: Service) -> None:
    message = Message(
        correlation_id="r",
        tipo_evento=naming.START_RUN,
        payload=msgspec.Raw(b'{"destinos": ["loja.a"]}'),
        timestamp="2025-10-14T12:00:00Z",
        responder_em="pagamentos",
    )
    await publish_all(bounded.broker, [Outgoing(naming.REQUESTS, encode_message(message))])

    async def letters() -> Any:
        return (await bounded.client.get("/filas/orquestrador/dlq")).json()["mensagens"]

    (letter,) = await until(letters)
    assert OUTSIDE in letter["motivo"]


async def test_a_pipeline_names_no_queue_outside(bounded: Service) -> None:
    reply = await bounded.client.put("/pipelines/p", json=PIPELINE)
    assert_problem(reply, 422, "steps[1] (dois).queue", OUTSIDE)
    assert (await bounded.client.get("/pipelines/p")).status_code == 404


async def test_a_file_of_the_folder_names_no_queue_outside(tmp_path: Path) -> None:
    (folder := tmp_path / "fluxos").mkdir()
    (folder / "p.json").write_text(json.dumps(PIPELINE))
    async with running(tmp_path, msgspec.structs.replace(BOUNDED, pipelines=str(folder))) as service:
        (bad,) = (await service.client.get("/pipelines")).json()["arquivos_invalidos"]
        assert OUTSIDE in bad["erros"][0]["motivo"]
        assert not await service.broker.queues(["pagamentos"])


@pytest.mark.parametrize(
    ("queue", "problem"), [("pagamentos", OUTSIDE), ("amq.gen-x", OUTSIDE), ("unacked", "a system queue")]
)
async def test_no_call_reaches_dead_letters_outside(bounded: Service, queue: str, problem: str) -> None:
    await bounded.bury(queue, b"{}")
    for method, path in (("GET", ""), ("POST", "/reenviar"), ("DELETE", "/1")):
        assert_problem(await bounded.client.request(method, f"/filas/{queue}/dlq{path}"), 422, "fila", problem)
    (state,) = await bounded.broker.queues([queue])
    assert state.dead_letters == 1


async def test_only_queues_inside_and_our_own_are_listed(bounded: Service) -> None:
    for queue in ("pagamentos", "loja.a", "unacked"):
        await bounded.bury(queue, b"{}")
    listed = [queue["fila"] for queue in (await bounded.client.get("/filas")).json()["filas"]]
    assert listed == ["loja.a", "orquestrador", "resultados"]
    assert (await bounded.client.get("/filas/loja.a/dlq")).status_code == 200
    assert (await bounded.client.get("/filas/resultados/dlq")).status_code == 200


async def test_what_built_in_pipelines_name_outside_is_not_made(bounded: Service) -> None:
    assert not await bounded.broker.queues(["video-queue", "escavador_youtube"])


async def test_a_system_queue_is_refused_without_any_pattern(service: Service) -> None:
    for field in ("destinos", "responder_em"):
        request = {"destinos": ["a"]} | {field: ["unacked"] if field == "destinos" else "amq.direct"}
        reply = await service.client.post("/orquestracoes", json=request)
        assert_problem(reply, 422, "destinos[0]" if field == "destinos" else field, "is a system queue")
