"""`GET /asyncapi.json`: of the pipelines that there are, with the messages that really travel."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft7Validator, Draft202012Validator  # type: ignore[import-untyped]

from oraculo.brokers.memory import MemoryBroker
from oraculo.settings import ApiSettings, BrokerSettings
from oraculo.wire.message import encode_message

from .service import SETTINGS, Service, assert_problem, running

OFFICIAL = Path(__file__).parent / "data" / "asyncapi-3.0.0.json"


async def document(service: Service) -> dict[str, Any]:
    reply = await service.client.get("/asyncapi.json")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    made: dict[str, Any] = reply.json()
    return made


async def test_it_is_valid_and_knows_the_built_in_pipelines_and_routes(service: Service) -> None:
    made = await document(service)
    Draft7Validator(json.loads(OFFICIAL.read_text("utf-8"))).validate(made)
    assert {"escavador_youtube", "executador_relatorio", "video-queue", "captions-queue.dlq"} <= set(made["channels"])
    assert "servers" not in made


async def test_it_changes_with_the_pipelines(service: Service) -> None:
    before = await document(service)
    pipeline = {"steps": [{"id": "um", "type": "fila_nova", "config": {"cor": "azul"}}, {"type": "video-queue"}]}
    await service.client.put("/pipelines/meu", json=pipeline)
    made = await document(service)
    assert set(made["channels"]) - set(before["channels"]) == {"fila_nova", "fila_nova.dlq"}
    assert {"comandar.fila_nova", "reenviar.fila_nova"} == set(made["operations"]) - set(before["operations"])
    assert "pipeline `meu`, step `um`" in made["channels"]["fila_nova"]["description"]
    assert "`meu`" in made["channels"]["video-queue"]["description"]
    await service.client.delete("/pipelines/meu")
    assert await document(service) == before


async def test_the_prefix_is_there_and_no_secret_is(tmp_path: Path) -> None:
    broker = BrokerSettings(url="amqp://user:segredo@rabbit:5672/v,redis://:segredo@redis", prefix="px.")
    settings = msgspec.structs.replace(SETTINGS, broker=broker, api=ApiSettings(keys=("chave",)))
    async with running(tmp_path, settings) as service:
        assert_problem(await service.client.get("/asyncapi.json"), 401)
        service.client.headers["X-API-Key"] = "chave"
        made = await document(service)
    assert {channel["address"] for name, channel in made["channels"].items() if name != "resposta"} == {
        f"px.{name}" for name in made["channels"] if name != "resposta"
    }
    assert [(name, server["host"]) for name, server in made["servers"].items()] == [
        ("rabbitmq", "rabbit:5672"),
        ("redis", "redis"),
    ]
    assert "segredo" not in json.dumps(made)
    assert "chave" not in json.dumps(made)


async def test_the_channels_are_the_queues_that_the_broker_has(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, broker=BrokerSettings(prefix="px."))
    async with running(tmp_path, settings) as service:
        await service.client.put("/pipelines/meu", json={"steps": [{"type": "fila_nova"}]})
        channels = (await document(service))["channels"]
        declared = {state.queue for state in await service.broker.queues()}
    assert {channel["address"] for name, channel in channels.items() if not name.endswith(".dlq")} == {*declared, None}


@pytest.fixture
async def components(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = (await document(service))["components"]
    return found


def meant(components: dict[str, Any], body: bytes) -> list[str]:
    """Every message of the document, but for the dead letter, that it is valid as."""
    return [
        name
        for name in components["messages"]
        if name != "carta_morta"
        and Draft7Validator({"$ref": f"#/components/messages/{name}/payload", "components": components}).is_valid(
            json.loads(body)
        )
    ]


async def taken(broker: MemoryBroker, queue: str) -> bytes:
    consumer = await broker.consume(queue, prefetch=1)
    async with asyncio.timeout(10):
        (delivery,) = await consumer.take(1)
    await consumer.ack([delivery])
    await consumer.close()
    return delivery.body


async def test_what_travels_is_what_it_says(service: Service, components: dict[str, Any]) -> None:
    run_id = await service.start_run(pipeline="coleta-execucao", payload={"parametros": {"a": 1}}, responder_em="volta")
    for queue, event in (
        ("escavador_youtube", "iniciar_coleta"),
        ("escavador_blog", "iniciar_coleta"),
        ("executador_relatorio", "iniciar_execucao"),
    ):
        command = await service.answer(queue, {"status": "ok", "dados": [queue]})
        assert meant(components, encode_message(command)) == [event]
    assert (await service.ended(run_id))["status"] == "concluida"
    assert meant(components, await taken(service.broker, "volta")) == ["orquestracao_concluida"]


async def test_it_is_in_the_openapi_document(service: Service) -> None:
    openapi = (await service.client.get("/openapi.json")).json()
    answers = openapi["paths"]["/asyncapi.json"]["get"]["responses"]
    assert answers.keys() == {"200", "421", "503"}
    answer = answers["200"]
    schema = answer["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/AsyncApi"}
    validator = Draft202012Validator({**schema, "components": openapi["components"]})
    made = await document(service)
    validator.validate(made)
    assert not validator.is_valid(made | {"asyncapi": "2.6.0"})
    assert not validator.is_valid(made | {"outra": 1})
