"""Every bad input is refused with the field that is wrong, and nothing of it is kept."""

import gzip
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.api import bodies
from oraculo.engine.deliver.webhooks import Webhooks
from oraculo.ports.clock import SystemClock
from oraculo.settings import LimitSettings
from tests.waiting import until

from .exchange import Exchange
from .live import live
from .service import SETTINGS, Service, assert_problem, running

DEEP = b'{"destinos":["escavador_x"],"payload":{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}}"
BIG = b'{"destinos":["escavador_x"],"payload":{"a":"' + b"x" * 2 * 1024 * 1024 + b'"}}'

BAD_BODIES = [
    pytest.param(b"nada", 400, "", "JSON", id="not JSON"),
    pytest.param(b"", 400, "", "not valid JSON: it is empty", id="empty"),
    pytest.param(b" \n", 400, "", "not valid JSON: it is empty", id="blank"),
    pytest.param(b"\xff\xfe", 400, "", "UTF-8", id="not UTF-8"),
    pytest.param(b'{"destinos":["a"],"payload":{"x":"\\u0000"}}', 400, "", "NUL", id="escaped NUL"),
    pytest.param(b'{"destinos":["a\x00"]}', 400, "", "NUL", id="NUL byte"),
    pytest.param(DEEP, 400, "", "nested deeper", id="10,000 levels"),
    pytest.param(b"[]", 422, "", "object", id="a list"),
    pytest.param(b"{}", 422, "destinos", "exactly one of", id="nothing to do"),
    pytest.param(b'{"payload":{}}', 422, "destinos", "exactly one of", id="missing fields"),
    pytest.param(b'{"destinos":[]}', 422, "destinos", "at least one", id="no destination"),
    pytest.param(b'{"destinos":"a"}', 422, "destinos", "array", id="destinos of a wrong type"),
    pytest.param(b'{"destinos":[1]}', 422, "destinos[0]", "", id="a destination of a wrong type"),
    pytest.param(b'{"destinos":["a b"]}', 422, "destinos[0]", "letters", id="a bad name"),
    pytest.param(b'{"destinos":["a","a"]}', 422, "destinos[1]", "already", id="the same id twice"),
    pytest.param(b'{"tipo":"coleta_completa","pipeline":"x"}', 422, "pipeline", "exactly one of", id="two subjects"),
    pytest.param(b'{"destinos":["a"],"tipo":"coleta_completa"}', 422, "tipo", "exactly one of", id="two subjects too"),
    pytest.param(b'{"tipo":"coleta_complet"}', 422, "tipo", "'coleta_completa'", id="unknown route"),
    pytest.param(b'{"pipeline":"coleta-execusao"}', 422, "pipeline", "'coleta-execucao'", id="unknown pipeline"),
    pytest.param(b'{"destinos":["a"],"timeout":-1}', 422, "timeout", "more than 0", id="negative timeout"),
    pytest.param(b'{"destinos":["a"],"timeout":"1"}', 422, "timeout", "number of seconds", id="timeout as text"),
    pytest.param(b'{"destinos":["a"],"payload":[]}', 422, "payload", "object", id="payload not an object"),
    pytest.param(b'{"destinos":["a"],"payload":{"n":1e999}}', 422, "payload", "too large to be read", id="far number"),
    pytest.param(b'{"destinos":["a"],"prioridade":10}', 422, "prioridade", "0 to 9", id="priority"),
    pytest.param(b'{"destinos":["a"],"quorum":2}', 422, "quorum", "from 1 to 1", id="quorum"),
    pytest.param(b'{"destinos":["a"],"quorum":"%s50%%"}' % (b"0" * 5000), 422, "quorum", "60%", id="long percentage"),
    pytest.param(b'{"destinos":["a"],"quorum":%s}' % (b"9" * 5000), 422, "quorum", "out of range", id="long quorum"),
    pytest.param(b'{"destinos":["a"],"timeout":%s}' % (b"9" * 5000), 422, "timeout", "out of range", id="long timeout"),
    pytest.param(
        b'{"destinos":["a"],"prioridade":%s}' % (b"9" * 5000), 422, "prioridade", "out of range", id="long priority"
    ),
    pytest.param(b'{"destinos":["a"],"quorum":[[],[]]}', 422, "quorum", "`int | str", id="quorum of lists"),
    pytest.param(b'{"destinos":["a"],"webhook":"ftp://x"}', 422, "webhook", "http", id="webhook"),
    pytest.param(
        b'{"destinos":["a"],"webhook":"http://0xA9FEA9FE/latest"}',
        422,
        "webhook",
        "169.254.169.254, which is not global; webhooks may not, unless ORACULO_WEBHOOK_ALLOW",
        id="webhook to a metadata service",
    ),
    pytest.param(b'{"destinos":["a"],"responder_em":"?"}', 422, "responder_em", "letters", id="reply queue"),
    pytest.param(b'{"destinos":["a"],"correlation_id":""}', 422, "correlation_id", "1 to 128", id="empty id"),
    pytest.param(b'{"destinos":["a"],"correlation_id":".."}', 422, "correlation_id", "folders", id="dots as id"),
    pytest.param(b'{"destinos":[".."]}', 422, "destinos[0]", "folders", id="dots as queue"),
    pytest.param(b'{"destinos":["a"],"paylod":{}}', 422, "paylod", "'payload'", id="unknown field"),
    pytest.param(BIG, 413, "payload", "1048576", id="2 MB payload"),
]


@pytest.mark.parametrize(("body", "status", "field", "word"), BAD_BODIES)
async def test_a_bad_body_is_refused_and_nothing_is_kept(
    service: Service, body: bytes, status: int, field: str, word: str
) -> None:
    headers = {"Idempotency-Key": "chave"}
    reply = await service.client.post("/orquestracoes", content=body, headers=headers)
    assert_problem(reply, status, field, word)
    assert await service.runs() == []
    assert (await service.client.post("/orquestracoes", json={"tipo": "coleta_completa"}, headers=headers)).is_success


async def test_every_fault_is_named_at_once(service: Service) -> None:
    body = {"destinos": ["a b", {"timeout": 1}], "timeout": 0, "prioridade": -1}
    problem = (await service.client.post("/orquestracoes", json=body)).json()
    assert [fault["campo"] for fault in problem["erros"]] == ["destinos[0]", "destinos[1]", "timeout", "prioridade"]


@pytest.mark.parametrize("path", ["/orquestracoes", "/filas/resultados/dlq/reenviar"])
async def test_another_kind_of_body_is_refused(service: Service, path: str) -> None:
    headers = {"content-type": "application/xml"}
    assert_problem(await service.client.post(path, content=b"<a/>", headers=headers), 415, None, "application/json")
    assert_problem(await service.client.put("/pipelines/x", content=b"<a/>", headers=headers), 415, None, "yaml")


async def test_a_packed_body_is_refused_as_that(service: Service) -> None:
    headers = {"content-encoding": "gzip"}
    for method, path in (("POST", "/orquestracoes"), ("PUT", "/pipelines/x")):
        reply = await service.client.request(method, path, content=gzip.compress(b"{}"), headers=headers)
        assert_problem(reply, 415, None, "gzip")
        assert reply.headers["accept-encoding"] == "identity"


async def test_a_body_that_is_said_to_be_unpacked_is_taken(service: Service) -> None:
    headers = {"content-encoding": "identity"}
    assert (await service.client.post("/orquestracoes", json={"destinos": ["a"]}, headers=headers)).status_code == 202


SMALL = msgspec.structs.replace(SETTINGS, limits=LimitSettings(payload_bytes=100, request_bytes=1000))


async def test_a_declared_length_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    async with (
        running(tmp_path, SMALL) as service,
        Exchange(service.app, "POST", "/orquestracoes", {"Content-Length": "1001"}) as exchange,
    ):
        assert (await exchange.next())["status"] == 413  # though not a byte was sent


async def test_a_body_without_a_length_is_read_no_further_than_the_limit(tmp_path: Path) -> None:
    async with (
        running(tmp_path, SMALL) as service,
        Exchange(service.app, "POST", "/orquestracoes") as exchange,
    ):
        for _ in range(10):
            exchange.upload(b" " * 300, more=True)
        assert (await exchange.next())["status"] == 413
        assert exchange.unread_uploads == 6


async def test_a_client_that_leaves_amid_its_body_starts_nothing(service: Service) -> None:
    async with Exchange(service.app, "POST", "/orquestracoes") as exchange:
        exchange.upload(b'{"tipo":', more=True)
        exchange.leave()
        await exchange.finished()
    assert await service.runs() == []


LARGE = {"Content-Length": str(SETTINGS.limits.request_bytes)}


async def test_bodies_that_stay_half_sent_take_only_so_much_memory(service: Service) -> None:
    async with AsyncExitStack() as stack:
        half = []
        for headers in [LARGE] * 7 + [{}]:
            exchange = await stack.enter_async_context(Exchange(service.app, "POST", "/orquestracoes", headers))
            for _ in range(32):
                exchange.upload(b" " * (SETTINGS.limits.request_bytes // 32), more=True)
            half.append(exchange)
        await until(lambda: not any(exchange.unread_uploads for exchange in half))
        async with Exchange(service.app, "PUT", "/pipelines/x", {"Content-Length": "70000"}) as refused:
            start = await refused.next()
            assert start["status"] == 503  # though not a byte was sent
            assert (b"retry-after", b"1") in start["headers"]
            assert "large requests" in await refused.next_chunk()
        assert await service.start_run(destinos=["escavador_x"]), "a small one needs no room"
        half[0].leave()
        await half[0].finished()
        async with Exchange(service.app, "PUT", "/pipelines/x", {"Content-Length": "70000"}) as taken:
            taken.upload(b"x", more=False)
            assert (await taken.next())["status"] == 422, "what was given back is another's"


async def test_a_body_that_is_allowed_finds_room_though_requests_are_to_be_small(tmp_path: Path) -> None:
    limits = LimitSettings(payload_bytes=200_000, request_bytes=1000)
    async with running(tmp_path, msgspec.structs.replace(SETTINGS, limits=limits)) as service:
        ids = {"ids": ["x" * 100] * 1_500}
        assert (await service.client.post("/filas/fila_x/dlq/reenviar", json=ids)).status_code in (404, 422)


async def test_bodies_of_which_nothing_was_sent_keep_out_no_other(service: Service) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(Exchange(service.app, "POST", "/orquestracoes", LARGE))
        async with Exchange(service.app, "PUT", "/pipelines/x", {"Content-Length": "70000"}) as taken:
            taken.upload(b"x" * 70_000, more=False)
            assert (await taken.next())["status"] == 422


async def test_a_body_whose_rest_does_not_come_is_not_waited_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_PATIENCE", 0.05)
    async with Exchange(service.app, "POST", "/orquestracoes") as exchange:
        exchange.upload(b'{"tipo":', more=True)
        start = await exchange.next()
        assert start["status"] == 408
        assert (b"connection", b"close") in start["headers"]
        assert "0.05 s" in await exchange.next_chunk()
    assert await service.runs() == []


def test_a_client_amid_its_body_learns_that_the_server_stops(tmp_path: Path) -> None:
    with live(tmp_path) as served:
        place = served.url.removeprefix("http://").split(":")
        with socket.create_connection((place[0], int(place[1])), timeout=20) as client:
            client.sendall(
                b"POST /orquestracoes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 99\r\nExpect: 100-continue\r\n\r\n"
            )
            assert b"100 Continue" in client.recv(1000)  # its body is awaited
            client.sendall(b'{"tipo":')
            served.stop()
            head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"content-type: application/problem+json" in head
    assert "stopping" in msgspec.json.decode(body)["detail"]


ODD_QUERIES: list[tuple[dict[str, Any], str]] = [
    ({"status": "pronta"}, "status"),
    ({"limit": 0}, "limit"),
    ({"limit": 501}, "limit"),
    ({"limit": 10**30}, "limit"),
    ({"limit": "x"}, "limit"),
    ({"cursor": "lixo"}, "cursor"),
    ({"cursor": "\0"}, "cursor"),
    ({"q": "\0"}, "q"),
    ({"q": "x" * 129}, "q"),
    ({"pipeline": "a\0b"}, "pipeline"),
]


@pytest.mark.parametrize(("query", "field"), ODD_QUERIES)
async def test_a_bad_query_is_refused(service: Service, query: dict[str, Any], field: str) -> None:
    assert_problem(await service.client.get("/orquestracoes", params=query), 422, field)


async def test_a_long_text_learns_how_long_it_may_be(service: Service) -> None:
    reply = await service.client.get("/orquestracoes", params={"q": "x" * 129})
    assert_problem(reply, 422, "q", "q: must have at most 128 characters")


async def test_a_wrong_status_gets_the_right_ones(service: Service) -> None:
    reply = await service.client.get("/orquestracoes", params={"status": "pronta"})
    assert_problem(
        reply, 422, "status", "em_execucao", "concluida", "parcial", "'erro'", "timeout", "cancelada", "must be"
    )


@pytest.mark.parametrize("odd", ["%00", "a%00b", "%ff", "%ed%a0%80", "%0a", "x" * 5000, "%F0%9F%92%A9", "a%2Fb"])
@pytest.mark.parametrize("suffix", ["", "/eventos", "/explicacao", "/cancelar", "/repetir"])
async def test_an_odd_id_is_just_unknown(service: Service, odd: str, suffix: str) -> None:
    method = "POST" if suffix in ("/cancelar", "/repetir") else "GET"
    reply = await service.client.request(method, f"/orquestracoes/{odd}{suffix}")
    # A store is not asked for a NUL: PostgreSQL would fail on one.
    assert_problem(reply, 404, None, "NUL" if "%00" in odd else "no run")


@pytest.mark.parametrize("odd", ["%00", "%ff", "%0a", "x" * 300, "a%2Fb"])
async def test_odd_names_of_pipelines_and_queues_are_just_unknown(service: Service, odd: str) -> None:
    call = service.client.request
    assert_problem(await call("GET", f"/pipelines/{odd}"), 404)
    assert_problem(await call("DELETE", f"/pipelines/{odd}"), 404)
    assert_problem(await call("GET", f"/filas/{odd}/dlq"), 404)
    assert_problem(await call("POST", f"/filas/{odd}/dlq/reenviar"), 404)
    assert_problem(await call("DELETE", f"/filas/resultados/dlq/{odd}"), 404)


@pytest.mark.parametrize(
    ("path", "described"),
    [
        ("/orquestracoes/r/repetir", "/orquestracoes/{correlation_id}/repetir"),
        ("/orquestracoes/r/cancelar", "/orquestracoes/{correlation_id}/cancelar"),
        ("/filas/escavador_x/dlq/reenviar", "/filas/{fila}/dlq/reenviar"),
    ],
)
async def test_no_webhook_of_a_run_opens_or_cancels_one(service: Service, path: str, described: str) -> None:
    await service.start_run(correlation_id="r", destinos=["escavador_x"])
    replies = []

    async def post(_url: str, body: bytes, headers: dict[str, str]) -> int:
        replies.append(await service.client.post(path, content=body, headers=headers))
        return 200

    await Webhooks(post, "", SystemClock()).send("r", "http://oraculo" + path, 1, b"{}")
    assert_problem(replies[0], 409, None, "webhook-id of a webhook")
    document = (await service.client.get("/openapi.json")).json()
    assert "`webhook-id`" in document["paths"][described]["post"]["description"]
    assert (await service.client.get("/orquestracoes/r")).json()["status"] == "em_execucao"
