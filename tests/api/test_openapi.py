"""The OpenAPI document says of requests what the service does: a client that is generated from it refuses none that
would be taken."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from oraculo.api.schemas import COMPONENTS
from oraculo.settings import BullmqSettings, CelerySettings

from .service import SETTINGS, Service, running

ALLOWING = msgspec.structs.replace(
    SETTINGS,
    celery=CelerySettings(tasks_allow=("*",), queues_allow=("*",)),
    bullmq=BullmqSettings(queues_allow=("*",)),
)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running(tmp_path, ALLOWING) as service:
        yield service


def fits(schema: str, value: object) -> None:
    """Raises ValidationError."""
    document = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": COMPONENTS}}
    Draft202012Validator(document).validate(value)


REQUESTS: list[dict[str, Any]] = [
    {"destinos": ["escavador_x", "executador-y.2"]},
    {"destinos": ["celery://loja.precos", "bullmq://images-queue?attempts=3"]},
    {"destinos": [{"id": "escavador_x"}, {"fila": "escavador_y", "payload": {}, "timeout": 3}]},
    {"destinos": [{"id": "precos", "fila": "celery://loja.precos?queue=alta&send=payload"}]},
    {"pipeline": "coleta-execucao", "payload": {"parametros": {}}, "quorum": "60%", "prioridade": 9},
    {"tipo": "coleta_completa", "webhook": "http://example.org/x", "responder_em": "respostas", "timeout": 9.5},
]


@pytest.mark.parametrize("request_", REQUESTS)
async def test_a_request_that_is_taken_fits_the_document(request_: dict[str, Any], service: Service) -> None:
    reply = await service.client.post("/orquestracoes", json=request_)
    assert reply.status_code == 202, reply.text
    fits("Pedido", request_)
    shown = (await service.client.get(f"/orquestracoes/{reply.json()['correlation_id']}")).json()
    fits("Orquestracao", shown)


STEPS: list[dict[str, Any]] = [
    {"type": "ENHANCED_IMAGES", "config": {"count": 5}, "retry": {"maxAttempts": 3}, "timeout": 120},
    {"type": "escavador_x", "optional": True},
    {"id": "a", "queue": "celery://loja.precos"},
    {"type": "b", "queue": "bullmq://images-queue?name=job"},
    {"id": "c", "celery": {"task": "loja.precos", "queue": "alta", "args": [1], "kwargs": {"moeda": "BRL"}}},
    {"id": "d", "celery": {"task": "loja.precos", "send": "payload"}},
    {"type": "VOICE_OVER", "bullmq": {"queue": "voiceover-queue", "name": "job", "attempts": 3}},
]


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_is_taken_fits_the_document(step: dict[str, Any], service: Service) -> None:
    pipeline = {"name": "meu", "steps": [step]}
    reply = await service.client.put("/pipelines/meu", json=pipeline)
    assert reply.status_code == 201, reply.text
    fits("PipelinePedido", pipeline)
    fits("Pipeline", reply.json())


async def document_of(service: Service) -> dict[str, Any]:
    document: dict[str, Any] = (await service.client.get("/openapi.json")).json()
    return document


BOUNDED = [
    ("/orquestracoes", "limit", 1, 500),
    ("/filas/{fila}/dlq", "limit", 1, 500),
    ("/orquestracoes/{correlation_id}/eventos", "apos", 0, 2**31 - 1),
    ("/orquestracoes/{correlation_id}/eventos", "limite", 1, 1000),
]


@pytest.mark.parametrize(("path", "name", "least", "most"), BOUNDED)
async def test_the_bounds_of_a_parameter_are_in_the_document(
    path: str, name: str, least: int, most: int, service: Service
) -> None:
    parameters = (await document_of(service))["paths"][path]["get"]["parameters"]
    schema = next(parameter["schema"] for parameter in parameters if parameter["name"] == name)
    assert (schema["minimum"], schema["maximum"]) == (least, most)
    accepted = Draft202012Validator(schema)
    assert accepted.is_valid(most)
    assert not accepted.is_valid(most + 1)


async def test_only_what_can_break_a_rule_is_said_to_be_refused_for_it(service: Service) -> None:
    document = await document_of(service)
    refusing = {
        (method, path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "422" in operation["responses"]
    }
    places = ("/orquestracoes", "/pipelines", "/filas")
    assert refusing == {
        (method, path)
        for path, operations in document["paths"].items()
        for method in operations
        if path.startswith(places)
    }
    assert ("get", "/health") not in refusing
    assert "HTTPValidationError" not in document["components"]["schemas"]
