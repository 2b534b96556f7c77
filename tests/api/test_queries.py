"""A parameter that a call does not have is refused, like a field that a body does not have."""

import httpx2
import pytest

from .calls import CALLS, Unknown
from .service import Service, assert_problem
from .test_doors import local

__all__ = ["local"]  # a fixture: with and without keys

REFUSING = [call for call in CALLS if call.unknown is Unknown.REFUSED]
IGNORING = [call for call in CALLS if call.unknown is Unknown.IGNORED]


def faults_of(reply: httpx2.Response) -> list[tuple[str, str]]:
    assert_problem(reply, 422)
    return [(fault["campo"], fault["motivo"]) for fault in reply.json()["erros"]]


async def test_an_unknown_parameter_is_refused(local: httpx2.AsyncClient) -> None:
    for call in REFUSING:
        before = [(await local.get(path)).json() for path in ("/orquestracoes", "/pipelines", "/filas/escavador_y/dlq")]
        for method in [call.method, *(["HEAD"] if call.is_safe else [])]:
            for query in ("?sobra=1", "?sobra", "?sobra=1&sobra=2", "?%73obra=", "?=1"):
                reply = await local.request(method, call.address + query, json=call.good_body)
                assert reply.status_code == 422
                if method != "HEAD":
                    assert "is not a known parameter" in dict(faults_of(reply))["" if query == "?=1" else "sobra"]
        after = [(await local.get(path)).json() for path in ("/orquestracoes", "/pipelines", "/filas/escavador_y/dlq")]
        assert after == before


async def test_what_probes_scrapers_and_browsers_ask_for_comes_whatever_they_add(local: httpx2.AsyncClient) -> None:
    for call in IGNORING:
        for method in ("GET", "HEAD"):
            plain = await local.request(method, call.address)
            assert plain.status_code in (200, 307)
            for query in ("?probe=1", "?format=prometheus&name[]=up", "?v=3"):
                assert (await local.request(method, call.address + query)).status_code == plain.status_code


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/orquestracoes?limt=3", ("limt", "is not a known parameter; did you mean 'limit'?")),
        ("/orquestracoes?estado=erro", ("estado", "is not a known parameter; did you mean 'desde'?")),
        ("/orquestracoes?Limit=3", ("Limit", "is not a known parameter; did you mean 'limit'?")),
        ("/filas/escavador_y/dlq?limite=3", ("limite", "is not a known parameter; did you mean 'limit'?")),
        ("/orquestracoes/r/eventos?limit=3", ("limit", "is not a known parameter; did you mean 'limite'?")),
        ("/orquestracoes/r/eventos?xyz=3", ("xyz", "is not a known parameter; known: apos, limite")),
        ("/orquestracoes/r?limit=3", ("limit", "is not a known parameter; this call takes none")),
        ("/filas?limit=3", ("limit", "is not a known parameter; this call takes none")),
    ],
)
async def test_the_parameter_that_may_be_meant_is_named(path: str, said: tuple[str, str], service: Service) -> None:
    assert faults_of(await service.client.get(path)) == [said]


async def test_an_empty_query_is_none(service: Service) -> None:
    for path in ("/filas?", "/filas?&", "/orquestracoes?&&limit=3&", "/orquestracoes?status=&limit="):
        assert (await service.client.get(path)).status_code == 200, path


async def test_a_query_of_a_thousand_parameters_gets_a_short_answer(service: Service) -> None:
    query = "&".join(f"p{number}" for number in range(1_000))
    for method, path in (("GET", "/orquestracoes"), ("POST", "/orquestracoes")):
        reply = await service.client.request(method, f"{path}?{query}", json={"destinos": ["a"]})
        assert len(faults_of(reply)) == 20


# -- all at once -------------------------------------------------------------------------------------------------


async def test_all_faults_of_query_and_headers_are_reported_at_once(service: Service) -> None:
    headers = {"Last-Event-ID": "x"}
    reply = await service.client.get("/orquestracoes/r/eventos?apos=-1&limite=x&limit=3", headers=headers)
    assert [field for field, _ in faults_of(reply)] == ["apos", "limite", "limit", "Last-Event-ID"]
    reply = await service.client.get("/orquestracoes?status=pronta&limit=0&desde=ontem&limt=3")
    assert [field for field, _ in faults_of(reply)] == ["status", "desde", "limit", "limt"]


async def test_a_fault_of_the_query_comes_before_those_of_the_body(service: Service) -> None:
    for method, path in (("POST", "/orquestracoes"), ("PUT", "/pipelines/p"), ("POST", "/filas/q/dlq/reenviar")):
        reply = await service.client.request(method, f"{path}?x=1", content=b"nada")
        assert [field for field, _ in faults_of(reply)] == ["x"]


async def test_a_payload_that_is_too_large_has_a_status_of_its_own(service: Service) -> None:
    large = {"a": "x" * 1024 * 1024}
    reply = await service.client.post("/orquestracoes", json={"destinos": ["a"], "payload": large})
    assert_problem(reply, 413, "payload")
