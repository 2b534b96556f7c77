"""ORACULO_QUEUES_NEW_PER_REQUEST and ORACULO_QUEUES_NEW_PER_MINUTE, wherever the outside can name a new queue."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from oraculo.engine.queues import limits as queue_limits
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.settings import QueueSettings
from oraculo.wire import naming
from oraculo.wire.message import Message, encode_message
from tests.waiting import until

from .service import SETTINGS, Service, assert_problem, running

BOUNDED = msgspec.structs.replace(
    SETTINGS,
    queues=QueueSettings(new_per_request=3, new_per_minute=5),
    rotas={"de_muitas": ("rota.a", "rota.b", "rota.c", "rota.d", "rota.e", "rota.f")},
)
OVER = "more than 3 new queues; ORACULO_QUEUES_NEW_PER_REQUEST"


@pytest.fixture
async def bounded(tmp_path: Path) -> AsyncIterator[Service]:
    async with running(tmp_path, BOUNDED) as service:
        yield service


def names(beginning: str, count: int) -> list[str]:
    return [f"{beginning}.{number}" for number in range(count)]


async def start(service: Service, queues: Sequence[str], **more: Any) -> httpx2.Response:
    return await service.client.post("/orquestracoes", json={"destinos": list(queues), **more})


async def put(service: Service, name: str, queues: Sequence[str]) -> httpx2.Response:
    steps = [{"type": queue, "queue": queue} for queue in queues]
    return await service.client.put(f"/pipelines/{name}", json={"name": name, "steps": steps})


async def send(service: Service, run_id: str, queues: Sequence[str]) -> None:
    message = Message(
        correlation_id=run_id,
        tipo_evento=naming.START_RUN,
        payload=msgspec.Raw(msgspec.json.encode({"destinos": queues})),
        timestamp="2025-10-14T12:00:00Z",
    )
    await publish_all(service.broker, [Outgoing(naming.REQUESTS, encode_message(message))])


async def queues_there(service: Service) -> set[str]:
    return {state.queue for state in await service.broker.queues()}


@pytest.mark.parametrize("more", [{}, {"responder_em": "respostas"}])
async def test_a_request_names_few_new_queues(bounded: Service, more: dict[str, str]) -> None:
    before = await queues_there(bounded)
    reply = await start(bounded, names("nova", 4 - len(more)), **more)
    assert_problem(reply, 422, "destinos", OVER)
    assert await bounded.runs() == []
    assert await queues_there(bounded) == before


async def test_a_pipeline_names_few_new_queues(bounded: Service) -> None:
    before = await queues_there(bounded)
    assert_problem(await put(bounded, "p", names("nova", 4)), 422, "steps", OVER)
    assert (await bounded.client.get("/pipelines/p")).status_code == 404
    assert await queues_there(bounded) == before


async def test_a_message_names_few_new_queues(bounded: Service) -> None:
    await send(bounded, "r", names("nova", 4))

    async def letters() -> Any:
        return (await bounded.client.get("/filas/orquestrador/dlq")).json()["mensagens"]

    (letter,) = await until(letters)
    assert f"payload.destinos: names {OVER}" in letter["motivo"]


async def test_a_minute_brings_few_new_queues_whichever_way_they_are_named(bounded: Service) -> None:
    assert (await start(bounded, names("a", 2), responder_em="respostas")).status_code == 202
    assert (await put(bounded, "p", names("b", 2))).status_code == 201
    for late in (await start(bounded, ["c"]), await put(bounded, "q", ["c"])):
        assert late.status_code == 429
        assert late.json()["type"] == "urn:oraculo:problem:too-many-new-queues"
        assert 0 < int(late.headers["Retry-After"]) <= 60
    assert "c" not in await queues_there(bounded)


async def test_a_message_waits_until_there_is_room_for_its_new_queues(
    bounded: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_limits, "MINUTE", 1.0)
    for each in ("a", "b"):
        await send(bounded, each, names(each, 3))

    async def both() -> bool:
        return {run["correlation_id"] for run in await bounded.runs()} == {"a", "b"}

    await until(both)
    assert (await bounded.client.get("/filas/orquestrador/dlq")).json()["mensagens"] == []


async def test_queues_that_are_there_do_not_count(bounded: Service) -> None:
    await bounded.broker.declare(names("antiga", 10))
    assert (await start(bounded, names("antiga", 10))).status_code == 202
    assert (await bounded.client.post("/orquestracoes", json={"tipo": "de_muitas"})).status_code == 202


async def test_queues_that_were_named_before_do_not_count_again(bounded: Service) -> None:
    for _ in range(5):
        assert (await start(bounded, names("a", 3))).status_code == 202
    assert (await start(bounded, names("b", 2))).status_code == 202


async def test_a_request_that_was_taken_is_taken_again_under_its_key(bounded: Service) -> None:
    body, headers = {"destinos": names("a", 3)}, {"Idempotency-Key": "k"}
    first = await bounded.client.post("/orquestracoes", json=body, headers=headers)
    engine = bounded.engine
    for forgotten in (engine.parts.queues.known, engine.parts.queues.limits._admitted):  # as after a restart
        forgotten._queues.clear()
    for name in names("a", 3):
        await bounded.broker.remove([name])
    assert (await start(bounded, names("b", 2))).status_code == 202
    again = await bounded.client.post("/orquestracoes", json=body, headers=headers)
    assert again.json()["correlation_id"] == first.json()["correlation_id"]


@pytest.mark.parametrize(
    ("method", "address"),
    [
        ("GET", "/filas/ninguem/dlq"),
        ("POST", "/filas/ninguem/dlq/reenviar"),
        ("DELETE", "/filas/ninguem/dlq/1"),
        ("GET", "/filas"),
    ],
)
async def test_a_call_about_an_unknown_queue_makes_none(bounded: Service, method: str, address: str) -> None:
    before = await queues_there(bounded)
    await bounded.client.request(method, address)
    assert await queues_there(bounded) == before
    assert "ninguem" not in before
