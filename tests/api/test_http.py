"""What every path has in common: methods, unknown addresses, keys, the OpenAPI document."""

from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from oraculo.api import auth
from oraculo.api.preferences import wait_of
from oraculo.core.run import RunStatus
from oraculo.settings import ApiSettings

from .service import SETTINGS, Service, assert_problem, running

WITH_KEYS = msgspec.structs.replace(SETTINGS, api=ApiSettings(keys=("chave-um", "chave-dóis", "chave-à")))


async def test_an_unknown_address_is_a_problem(service: Service) -> None:
    for path in ("/nada", "/orquestracoes/", "/filas/x", "/orquestracoes%2Fx"):
        assert_problem(await service.client.get(path), 404, None, "/docs")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/orquestracoes", "GET, HEAD, OPTIONS, POST"),
        ("POST", "/orquestracoes/x", "GET, HEAD, OPTIONS"),
        ("GET", "/orquestracoes/x/cancelar", "OPTIONS, POST"),
        ("POST", "/orquestracoes/x/eventos", "GET, HEAD, OPTIONS"),
        ("POST", "/pipelines/x", "DELETE, GET, HEAD, OPTIONS, PUT"),
        ("HEAD", "/orquestracoes/x/cancelar", "OPTIONS, POST"),
        ("TRACE", "/health", "GET, HEAD, OPTIONS"),
        ("POST", "/swagger/swagger-ui.css", "GET, HEAD, OPTIONS"),
    ],
)
async def test_a_wrong_method_gets_the_right_ones(service: Service, method: str, path: str, allowed: str) -> None:
    reply = await service.client.request(method, path)
    assert reply.status_code == 405
    assert reply.headers["allow"] == allowed
    options = await service.client.options(path)
    assert options.status_code == 204
    assert options.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/orquestracoes", "/health", "/metrics", "/pipelines/coleta-execucao", "/nada"])
async def test_head_is_get_without_the_body(service: Service, path: str) -> None:
    head, get = await service.client.head(path), await service.client.get(path)
    assert head.status_code == get.status_code
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.content == b""


GOOD_KEYS = [
    {"Authorization": "Bearer chave-um"},
    {"authorization": "bearer  chave-um "},
    {"X-API-Key": "chave-um"},
    {b"X-API-Key": "chave-dóis".encode()},
    {"X-API-Key": " \tchave-um\t "},
    {b"X-API-Key": "chave-à ".encode()},  # its last byte is a blank to who takes it for latin-1
    {b"Authorization": "Bearer chave-à".encode()},
]
BAD_KEYS: list[dict[Any, Any]] = [
    {},
    {"Authorization": "Bearer chave-tres"},
    {"Authorization": "Bearer"},
    {"Authorization": "Basic chave-um"},
    {"X-API-Key": ""},
    {"X-API-Key": "chave-u"},
    {b"X-API-Key": b"\xff\xfe"},
]


@pytest.mark.parametrize("headers", GOOD_KEYS)
async def test_a_key_opens(tmp_path: Path, headers: dict[Any, Any]) -> None:
    async with running(tmp_path, WITH_KEYS) as service:
        assert (await service.client.get("/orquestracoes", headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", BAD_KEYS)
async def test_without_a_key_only_health_and_the_page_that_asks_for_one_are_open(
    tmp_path: Path, headers: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "WRONG_KEY_PAUSE", 0.01)
    async with running(tmp_path, WITH_KEYS) as service:
        for path in ("/orquestracoes", "/metrics", "/openapi.json", "/nada", "/filas"):
            reply = await service.client.get(path, headers=headers)
            assert_problem(reply, 401, None, "X-API-Key")
            assert reply.headers["www-authenticate"].startswith("Bearer")
        for path in ("/health", "/health/ready", "/docs"):
            assert (await service.client.get(path, headers=headers)).status_code == 200
        reply = await service.client.post("/orquestracoes", json={"destinos": ["escavador_x"]}, headers=headers)
        assert_problem(reply, 401)
        opened = await service.client.get("/orquestracoes", headers={"X-API-Key": "chave-um"})
        assert opened.json()["orquestracoes"] == []


async def test_health_is_open_behind_a_prefix_too(tmp_path: Path) -> None:
    async with running(tmp_path, WITH_KEYS) as service:
        transport = httpx2.ASGITransport(service.app, root_path="/oraculo")
        async with httpx2.AsyncClient(transport=transport, base_url="http://proxy") as client:
            for path in ("/oraculo/health", "/oraculo/health/ready"):
                assert (await client.get(path)).status_code == 200
            for path in ("/oraculo/orquestracoes", "/outro/health", "/oraculo/health/nada"):
                assert (await client.get(path)).status_code == 401


CALLS = {
    ("get", "/asyncapi.json"),
    ("get", "/orquestracoes"),
    ("post", "/orquestracoes"),
    ("get", "/orquestracoes/{correlation_id}"),
    ("get", "/orquestracoes/{correlation_id}/eventos"),
    ("get", "/orquestracoes/{correlation_id}/explicacao"),
    ("get", "/orquestracoes/{correlation_id}/resultados/{tarefa}"),
    ("post", "/orquestracoes/{correlation_id}/cancelar"),
    ("post", "/orquestracoes/{correlation_id}/repetir"),
    ("get", "/pipelines"),
    ("get", "/pipelines/{name}"),
    ("put", "/pipelines/{name}"),
    ("delete", "/pipelines/{name}"),
    ("get", "/filas"),
    ("get", "/filas/{fila}/dlq"),
    ("post", "/filas/{fila}/dlq/reenviar"),
    ("delete", "/filas/{fila}/dlq/{letter_id}"),
    ("get", "/health"),
    ("get", "/health/ready"),
    ("get", "/metrics"),
}


async def test_the_document_has_every_call(service: Service) -> None:
    document = (await service.client.get("/openapi.json")).json()
    found = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert found == CALLS
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    start = document["paths"]["/orquestracoes"]["post"]
    assert set(start["responses"]) == {
        "200",
        "202",
        "400",
        "403",
        "408",
        "409",
        "413",
        "415",
        "421",
        "422",
        "429",
        "503",
    }
    assert set(start["requestBody"]["content"]["application/json"]["examples"]) == {"destinos", "tipo", "pipeline"}
    assert {parameter["name"].lower() for parameter in start["parameters"]} == {
        "idempotency-key",
        "traceparent",
        "prefer",
    }
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert document["components"]["schemas"]["Aceita"]["properties"]["status"]["enum"] == list(RunStatus)
    assert "securitySchemes" not in document["components"]


async def test_the_document_shows_keys_when_there_are_some(tmp_path: Path) -> None:
    async with running(tmp_path, WITH_KEYS) as service:
        document = service.app.openapi()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "api_key"}
    assert "401" in document["paths"]["/filas"]["get"]["responses"]
    assert "401" not in document["paths"]["/health"]["get"]["responses"]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (["wait=5"], 5),
        (["WAIT = 5"], 5),
        (['wait="7"'], 7),
        (["respond-async, wait=9;x=1"], 9),
        (["respond-async", "wait=3", "wait=4"], 3),
        (["wait=301"], 300),
        (["wait=" + "9" * 9000], 300),
        (["wait=000000000000005"], 5),
        (["wait=0"], 0),
        (["wait=-1"], None),
        (["wait=1.5"], None),
        (["wait"], 30),
        (["respond-async, Wait; x=1"], 30),
        (["wait="], 30),
        (['wait=""'], 30),
        (["waiter"], None),
        (["wait=٣"], None),
        (["xwait=3"], None),
        ([], None),
    ],
)
def test_how_long_to_wait(headers: list[str], seconds: float | None) -> None:
    assert wait_of(headers, 300.0) == seconds


def test_a_bare_wait_is_capped_too() -> None:
    assert wait_of(["wait"], 10.0) == 10
