"""The OpenAPI document says of requests what the service does: a client that is generated from it refuses none that
would be taken."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from oraculo.api.schemas import COMPONENTS

from .service import Service


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
