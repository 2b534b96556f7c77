import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.api.replies import PAGE_BYTES
from oraculo.errors import BrokerError, QueueFull
from oraculo.ports.broker_admin import DeadLetter, QueueState
from oraculo.ports.telemetry import CommandsPublished, DeadLettered
from oraculo.settings import BrokerSettings

from .service import SETTINGS, Service, assert_problem, running

COMMAND = {
    "correlation_id": "r",
    "tipo_evento": "iniciar_coleta",
    "tarefa": "t",
    "payload": {},
    "timestamp": "2025-10-14T12:00:00Z",
}


async def letters(service: Service, queue: str = "fila_x", **query: Any) -> dict[str, Any]:
    reply = await service.client.get(f"/filas/{queue}/dlq", params=query)
    assert reply.status_code == 200, reply.text
    page: dict[str, Any] = reply.json()
    return page


async def test_queues_show_their_depth_and_consumers(service: Service) -> None:
    await service.bury("fila_x", b"{}")
    queues = {queue["fila"]: queue for queue in (await service.client.get("/filas")).json()["filas"]}
    assert list(queues) == sorted(queues)
    assert {"fila_x", "orquestrador", "resultados"} <= set(queues)
    assert queues["fila_x"] == {
        "fila": "fila_x",
        "mensagens": 0,
        "em_processamento": 0,
        "consumidores": 0,
        "dlq": 1,
    }
    assert queues["resultados"]["consumidores"] == 1


async def test_what_the_broker_does_not_say_is_null(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what workers hold on RabbitMQ."""

    async def queues(_names: Sequence[str] | None = None) -> list[QueueState]:
        return [QueueState("fila_x", 3, None, 0, 1)]

    monkeypatch.setattr(service.engine.ports.broker, "queues", queues)
    (shown,) = (await service.client.get("/filas")).json()["filas"]
    assert (shown["em_processamento"], shown["consumidores"]) == (None, 1)
    document = (await service.client.get("/openapi.json")).json()
    said = document["components"]["schemas"]["Filas"]["properties"]["filas"]["items"]["properties"]
    assert {"type": "null"} in said["em_processamento"]["anyOf"]


async def test_a_prefix_is_not_shown(tmp_path: Path) -> None:
    async with running(tmp_path, msgspec.structs.replace(SETTINGS, broker=BrokerSettings(prefix="p."))) as service:
        await service.bury("p.fila_x", b"{}")
        await service.bury("alheia", b"{}")
        names = [queue["fila"] for queue in (await service.client.get("/filas")).json()["filas"]]
        assert {"fila_x", "orquestrador", "resultados"} <= set(names)
        assert "alheia" not in names
        assert not [name for name in names if name.startswith("p.")]
        assert len((await letters(service))["mensagens"]) == 1
        assert b'queue="fila_x"' in (await service.client.get("/metrics")).content


async def test_a_dead_letter_shows_why_and_what(service: Service) -> None:
    await service.bury("fila_x", json.dumps(COMMAND).encode(), "broken on purpose")
    (letter,) = (await letters(service))["mensagens"]
    assert letter["motivo"] == "broken on purpose"
    assert letter["correlation_id"] == "r"
    assert letter["tarefa"] == "t"
    assert letter["corpo"] == COMMAND
    assert letter["corpo_texto"] is None
    assert letter["entregas"] == 1
    assert letter["timestamp"].endswith("Z")


@pytest.mark.parametrize("at", [0.0, -1.0, 1.8e12, 1e300])
async def test_a_dead_letter_whose_moment_is_not_known_has_none(
    service: Service, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    """As on RabbitMQ that of a plain client, which put it there itself: without a time, or with it in milliseconds."""
    await service.bury("fila_x", b"{}")

    async def dead_letters(queue: str, *, limit: int, after: str | None = None) -> list[DeadLetter]:
        return [DeadLetter("1", queue, b"{}", "", at)]

    monkeypatch.setattr(service.engine.ports.broker, "dead_letters", dead_letters)
    (letter,) = (await letters(service))["mensagens"]
    assert letter["timestamp"] is None
    document = (await service.client.get("/openapi.json")).json()
    said = document["components"]["schemas"]["CartasMortas"]["properties"]["mensagens"]["items"]["properties"]
    assert {"type": "null"} in said["timestamp"]["anyOf"]


@pytest.mark.parametrize(
    ("body", "shown", "text"),
    [
        (b"nada", None, "nada"),
        (b"\xff\x00", None, "base64:" + base64.b64encode(b"\xff\x00").decode()),
        (b'{"a": "\xe7"}', None, "base64:" + base64.b64encode(b'{"a": "\xe7"}').decode()),
        (b'{"\xe7": 1}', None, "base64:" + base64.b64encode(b'{"\xe7": 1}').decode()),
        (b"", None, ""),
        (b"[1]", [1], None),
        (b"null", None, None),
        (b'{"correlation_id": 5}', {"correlation_id": 5}, None),
        (b"[" * 5000 + b"]" * 5000, None, "[" * 5000 + "]" * 5000),
        (b"[" * 131 + b"]" * 131, json.loads("[" * 131 + "]" * 131), None),  # as deep as ours may be
        (b'"\\ud800"', None, '"\\ud800"'),
    ],
)
async def test_any_body_can_be_shown(service: Service, body: bytes, shown: Any, text: str | None) -> None:
    await service.bury("fila_x", body)
    (letter,) = (await letters(service))["mensagens"]
    assert letter["corpo"] == shown
    assert letter["corpo_texto"] == text
    assert letter["correlation_id"] is None


async def test_dead_letters_come_in_pages(service: Service) -> None:
    for number in range(5):
        await service.bury("fila_x", str(number).encode())
    seen: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await letters(service, limit=2, cursor=cursor)
        seen += [letter["corpo"] for letter in page["mensagens"]]
        cursor = page["cursor"]
    assert seen == [0, 1, 2, 3, 4]


async def test_a_page_of_large_dead_letters_is_bounded_and_the_next_goes_on(service: Service) -> None:
    for number in range(20):
        await service.bury("fila_x", json.dumps({"n": number, "x": "á" * 300_000}).encode())
    seen: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        reply = await service.client.get("/filas/fila_x/dlq", params={"limit": 500, "cursor": cursor})
        assert len(reply.content) <= PAGE_BYTES + 1000
        page = reply.json()
        seen += [int(letter["corpo_texto"][6:].partition(",")[0]) for letter in page["mensagens"]]
        cursor = page["cursor"]
    assert seen == list(range(20))


@pytest.mark.parametrize("beginning", [b"\x01", b"\xff", '"áé€'.encode(), b"[[[["])
async def test_what_takes_more_room_as_json_is_bounded_too(service: Service, beginning: bytes) -> None:
    for _ in range(4):
        await service.bury("fila_x", beginning * (3 * 2**20 // len(beginning)))
    seen, cursor = 0, ""
    while cursor is not None:
        reply = await service.client.get("/filas/fila_x/dlq", params={"cursor": cursor})
        assert len(reply.content) <= PAGE_BYTES + 1000
        seen, cursor = seen + len(reply.json()["mensagens"]), reply.json()["cursor"]
    assert seen == 4


async def test_a_long_body_is_cut_and_says_so(service: Service) -> None:
    body = json.dumps(COMMAND | {"payload": {"x": "€" * 2**20}}, ensure_ascii=False).encode()
    await service.bury("fila_x", body)
    await service.bury("fila_x", json.dumps(COMMAND).encode())
    long, short = (await letters(service))["mensagens"]
    assert (long["corpo"], long["corpo_bytes"], long["corpo_cortado"]) == (None, len(body), True)
    shown = long["corpo_texto"].encode()
    assert body.startswith(shown), "it does not end amid a character"
    assert 2**20 - 3 <= len(shown) <= 2**20
    assert (long["correlation_id"], long["tarefa"]) == ("r", None), "what its beginning names"
    assert (short["corpo"], short["corpo_bytes"], short["corpo_cortado"]) == (COMMAND, len(json.dumps(COMMAND)), False)


@pytest.mark.parametrize("query", ["cursor=lixo", "cursor=%00", "limit=0"])
async def test_a_bad_page_is_refused(service: Service, query: str) -> None:
    await service.bury("fila_x", b"{}")
    assert_problem(await service.client.get(f"/filas/fila_x/dlq?{query}"), 422, query.partition("=")[0])


async def test_a_limit_that_was_left_empty_is_not_given(service: Service) -> None:
    await service.bury("fila_x", b"1")
    assert len((await letters(service, limit=""))["mensagens"]) == 1


async def test_all_are_sent_again(service: Service) -> None:
    await service.bury("fila_x", b"1")
    await service.bury("fila_x", b"2")
    reply = await service.client.post("/filas/fila_x/dlq/reenviar")
    assert reply.json() == {"reenviadas": 2, "reabertas": 0, "obsoletas": 0}
    assert (await letters(service))["mensagens"] == []


async def test_those_named_are_sent_again(service: Service) -> None:
    await service.bury("fila_x", b"1")
    await service.bury("fila_x", b"2")
    first, second = (await letters(service))["mensagens"]
    url = "/filas/fila_x/dlq/reenviar"
    assert (await service.client.post(url, json={"ids": []})).json()["reenviadas"] == 0
    assert_problem(await service.client.post(url, json={"ids": [first["id"], "9999"]}), 404, None, "9999")
    assert (await service.client.post(url, json={"ids": [first["id"]]})).json()["reenviadas"] == 1
    assert (await letters(service))["mensagens"] == [second]
    assert (await service.client.post(url, json={})).json()["reenviadas"] == 1


@pytest.mark.parametrize(
    ("body", "status", "field", "word"),
    [
        (b"nada", 400, "", "not valid JSON"),
        (b'{"ids":[', 400, "", "not valid JSON"),
        (b'{"ids":["\xe7"]}', 400, "", "not UTF-8: byte 9"),
        (b"x" * 1024 * 1025, 413, "request", "limit"),
        (b"[" * 9000, 422, "", "`object`"),
        (b'{"ids":"1"}', 422, "ids", "`array | null`"),
        (b'{"ids":[1]}', 422, "ids[0]", "`str`"),
        (b'{"id":["1"]}', 422, "id", "is not a known field; did you mean 'ids'?"),
    ],
)
async def test_a_bad_redrive_moves_nothing(service: Service, body: bytes, status: int, field: str, word: str) -> None:
    await service.bury("fila_x", b"1")
    assert_problem(await service.client.post("/filas/fila_x/dlq/reenviar", content=body), status, field, word)
    assert len((await letters(service))["mensagens"]) == 1


async def test_the_command_of_a_failed_task_reopens_its_run(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    await service.records.of(CommandsPublished)
    await service.answer("escavador_x", {"status": "erro", "erros": ["fora do ar"]})
    assert (await service.ended(run_id))["status"] == "erro"
    await service.records.of(DeadLettered)
    (letter,) = (await letters(service, "escavador_x"))["mensagens"]
    assert letter["correlation_id"] == run_id
    assert letter["tarefa"] == "escavador_x"
    reply = await service.client.post("/filas/escavador_x/dlq/reenviar", json={"ids": [letter["id"]]})
    assert reply.json() == {"reenviadas": 0, "reabertas": 1, "obsoletas": 0}
    await service.answer("escavador_x", {"dados": 1})
    assert (await service.ended(run_id))["status"] == "concluida"


async def failed_run(service: Service) -> str:
    run_id = await service.start_run(destinos=["escavador_x"])
    await service.records.of(CommandsPublished)
    await service.answer("escavador_x", {"status": "erro", "erros": ["fora do ar"]})
    await service.ended(run_id)
    await service.records.of(DeadLettered)
    return run_id


async def test_the_command_of_a_run_that_a_newer_version_wrote_stays_and_holds_up_no_other(service: Service) -> None:
    runs = [await failed_run(service) for _ in range(3)]
    service.write_as_newer(runs[1])
    reply = await service.client.post("/filas/escavador_x/dlq/reenviar")
    assert reply.json() == {"reenviadas": 0, "reabertas": 2, "obsoletas": 0}
    (left,) = (await letters(service, "escavador_x"))["mensagens"]
    assert left["correlation_id"] == runs[1]
    reply = await service.client.post("/filas/escavador_x/dlq/reenviar")
    assert_problem(reply, 503, None, "'novo' for the status of a run", "run that version")
    assert (await letters(service, "escavador_x"))["mensagens"] == [left]
    assert (await service.client.delete(f"/filas/escavador_x/dlq/{left['id']}")).status_code == 204


async def test_whoever_names_the_command_of_a_run_that_a_newer_version_wrote_is_reported_once_the_others_are_done(
    service: Service,
) -> None:
    runs = [await failed_run(service) for _ in range(2)]
    service.write_as_newer(runs[0])
    ids = [letter["id"] for letter in (await letters(service, "escavador_x"))["mensagens"]]
    reply = await service.client.post("/filas/escavador_x/dlq/reenviar", json={"ids": ids})
    assert_problem(reply, 503, None, "'novo' for the status of a run", "run that version")
    (left,) = (await letters(service, "escavador_x"))["mensagens"]
    assert left["correlation_id"] == runs[0]
    await service.answer("escavador_x", {"dados": 1})
    assert (await service.ended(runs[1]))["status"] == "concluida"


async def test_one_is_discarded(service: Service) -> None:
    await service.broker.declare(["fila_x"])  # else it is forgotten with its last letter
    await service.bury("fila_x", b"1")
    (letter,) = (await letters(service))["mensagens"]
    url = f"/filas/fila_x/dlq/{letter['id']}"
    reply = await service.client.delete(url)
    assert reply.status_code == 204
    assert reply.content == b""
    assert_problem(await service.client.delete(url), 404, None, letter["id"])
    assert (await letters(service))["mensagens"] == []


async def test_one_that_somebody_else_moves_at_the_same_time_is_not_discarded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.bury("fila_x", b"1")
    (letter,) = (await letters(service))["mensagens"]
    discard = service.broker.discard

    async def slower(queue: str, ids: Sequence[str]) -> int:
        assert await service.broker.redrive(queue) == 1
        return await discard(queue, ids)

    monkeypatch.setattr(service.broker, "discard", slower)
    assert_problem(await service.client.delete(f"/filas/fila_x/dlq/{letter['id']}"), 404, None, letter["id"])


REFUSED = "fila_x holds something under that name that is not a stream"


@pytest.mark.parametrize(
    ("method", "path", "described"),
    [
        ("GET", "/filas", "/filas"),
        ("GET", "/filas/fila_x/dlq", "/filas/{fila}/dlq"),
        ("GET", "/filas/fila_x/dlq?cursor=1", "/filas/{fila}/dlq"),
        ("POST", "/filas/fila_x/dlq/reenviar", "/filas/{fila}/dlq/reenviar"),
        ("DELETE", "/filas/fila_x/dlq/1", "/filas/{fila}/dlq/{letter_id}"),
    ],
)
async def test_a_refusal_of_the_broker_is_reported_in_its_words(
    service: Service, monkeypatch: pytest.MonkeyPatch, method: str, path: str, described: str
) -> None:
    async def refuse(_names: Sequence[str] | None = None) -> Sequence[QueueState]:
        raise BrokerError(REFUSED)

    monkeypatch.setattr(service.broker, "queues", refuse)
    reply = await service.client.request(method, path)
    assert_problem(reply, 502, None, REFUSED)
    document = (await service.client.get("/openapi.json")).json()
    assert "502" in document["paths"][described][method.lower()]["responses"]


async def test_a_full_queue_is_not_reported_as_a_broker_that_cannot_be_reached(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def has_no_room(*_: object) -> int:
        raise QueueFull("did not take 1 of 1 messages, for fila_x")

    await service.bury("fila_x", b"{}")
    monkeypatch.setattr(service.broker, "redrive", has_no_room)
    reply = await service.client.post("/filas/fila_x/dlq/reenviar")
    assert_problem(reply, 503, None, "did not take 1 of 1")
    assert reply.json()["title"] == "The broker did not take it now: a queue is full, or does not work"


async def test_unknown_queues_are_not_found(service: Service) -> None:
    assert_problem(await service.client.get("/filas/nada/dlq"), 404, None, "'nada'")
    assert_problem(await service.client.get("/filas/nada.dlq/dlq"), 404, None, "name the queue itself, 'nada'")
    assert_problem(await service.client.post("/filas/nada/dlq/reenviar"), 404, None, "'nada'")
    assert_problem(await service.client.delete("/filas/nada/dlq/1"), 404, None, "'nada'")
