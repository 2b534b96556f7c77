import asyncio
import json
import tracemalloc
from pathlib import Path

import pytest

from oraculo.settings import EngineSettings, Settings
from tests.waiting import until

from .service import Service, assert_problem, running

FAN_OUT = {"destinos": ["escavador_youtube", "executador_relatorio"], "payload": {"fonte": "x"}}


async def test_a_run_is_accepted_with_its_links(service: Service) -> None:
    reply = await service.client.post("/orquestracoes", json=FAN_OUT)
    assert reply.status_code == 202
    accepted = reply.json()
    assert accepted["status"] == "em_execucao"
    assert reply.headers["location"] == accepted["links"]["self"] == f"/orquestracoes/{accepted['correlation_id']}"
    assert "preference-applied" not in reply.headers
    for link in ("self", "eventos", "explicacao"):
        assert (await service.client.get(accepted["links"][link])).status_code == 200


@pytest.mark.parametrize(
    "request_body", [{"tipo": "coleta_completa"}, {"pipeline": "coleta-execucao", "payload": {"a": 1}}]
)
async def test_a_route_and_a_pipeline_are_accepted(service: Service, request_body: dict[str, object]) -> None:
    run_id = await service.start_run(**request_body)
    assert (await service.runs())[0]["correlation_id"] == run_id


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/vnd.x+json"])
async def test_json_by_any_name_is_read(service: Service, kind: str) -> None:
    headers = {"content-type": kind}
    reply = await service.client.post("/orquestracoes", content=json.dumps(FAN_OUT), headers=headers)
    assert reply.status_code == 202


async def test_a_payload_is_handed_on_byte_for_byte(service: Service) -> None:
    payload = '{"n": 1.10, "big": 123456789012345678901234567890,  "é": "\\u00e9"}'
    await service.client.post("/orquestracoes", content='{"destinos": ["escavador_x"], "payload": ' + payload + "}")
    command = await service.answer("escavador_x", {"resultado": "ok"})
    assert bytes(command.payload).decode() == payload


async def test_waiting_gives_the_aggregate(service: Service) -> None:
    await service.start_run(destinos=["escavador_x"], correlation_id="esperada")
    await service.answer("escavador_x", {"resultado": "ok"})
    await service.ended("esperada")
    again = {"destinos": ["escavador_y"], "correlation_id": "outra"}
    key = {"Idempotency-Key": "k", "Prefer": "respond-async, wait=10; x=1"}
    await service.client.post("/orquestracoes", json=again, headers={"Idempotency-Key": "k"})
    await service.answer("escavador_y", {"resultado": [1]})
    reply = await service.client.post("/orquestracoes", json=again, headers=key)
    assert reply.status_code == 200
    assert reply.headers["preference-applied"] == "wait=10"
    assert reply.headers["location"] == "/orquestracoes/outra"
    assert reply.json()["status"] == "concluida"
    assert reply.json()["resultados"] == {"escavador_y": {"resultado": [1]}}


async def test_a_wait_in_vain_gives_202(service: Service) -> None:
    reply = await service.client.post("/orquestracoes", json=FAN_OUT, headers={"Prefer": "wait=0"})
    assert reply.status_code == 202
    assert reply.headers["preference-applied"] == "wait=0"


async def test_the_same_key_and_body_give_the_same_run(service: Service) -> None:
    headers = {"Idempotency-Key": "chave-1"}
    first = await service.client.post("/orquestracoes", json=FAN_OUT, headers=headers)
    second = await service.client.post("/orquestracoes", json=FAN_OUT, headers=headers)
    assert first.status_code == second.status_code == 202
    assert first.json() == second.json()
    assert len(await service.runs()) == 1


async def test_blanks_around_a_key_are_not_of_it(service: Service) -> None:
    for key in ("chave-1", "chave-1  ", "\tchave-1"):
        reply = await service.client.post("/orquestracoes", json=FAN_OUT, headers={"Idempotency-Key": key})
        assert reply.status_code == 202
    assert len(await service.runs()) == 1


async def test_the_same_key_and_body_give_the_same_run_though_its_pipeline_is_gone(service: Service) -> None:
    await service.client.put("/pipelines/minha", json={"steps": [{"type": "A", "queue": "executador_a"}]})
    headers, body = {"Idempotency-Key": "chave-1"}, {"pipeline": "minha"}
    first = await service.client.post("/orquestracoes", json=body, headers=headers)
    await service.client.delete("/pipelines/minha")
    second = await service.client.post("/orquestracoes", json=body, headers=headers)
    assert first.status_code == second.status_code == 202
    assert first.json() == second.json()
    other = await service.client.post("/orquestracoes", json=body, headers={"Idempotency-Key": "chave-2"})
    assert_problem(other, 422, "pipeline", "there is no pipeline")


async def test_the_same_key_and_body_give_the_same_run_though_a_newer_version_put_its_pipeline_again(
    service: Service,
) -> None:
    await service.client.put("/pipelines/minha", json={"steps": [{"type": "A", "queue": "executador_a"}]})
    headers, body = {"Idempotency-Key": "chave-1"}, {"pipeline": "minha"}
    first = await service.client.post("/orquestracoes", json=body, headers=headers)
    await service.engine.ports.store.put_pipeline("minha", b'{"of": "a newer version"}', 1.0)
    await service.engine.parts.catalogue.refresh_stored(service.engine.ports.store)
    second = await service.client.post("/orquestracoes", json=body, headers=headers)
    assert first.status_code == second.status_code == 202
    assert first.json() == second.json()


async def test_the_same_key_and_another_body_are_refused(service: Service) -> None:
    headers = {"Idempotency-Key": "chave-1"}
    await service.client.post("/orquestracoes", json=FAN_OUT, headers=headers)
    reply = await service.client.post("/orquestracoes", json={"destinos": ["escavador_x"]}, headers=headers)
    assert_problem(reply, 422, "Idempotency-Key", "another body")
    assert len(await service.runs()) == 1


async def test_a_key_does_not_make_another_request_s_run_one_s_own(service: Service) -> None:
    named, headers = {**FAN_OUT, "correlation_id": "i1"}, {"Idempotency-Key": "chave-1"}
    await service.client.post("/orquestracoes", json=named)
    reply = await service.client.post("/orquestracoes", json=named, headers=headers)
    assert_problem(reply, 409, "correlation_id", "the correlation_id 'i1' is in use")
    other = await service.client.post("/orquestracoes", json={"destinos": ["escavador_x"]}, headers=headers)
    assert other.status_code == 202, "the key was not used up"
    again = await service.client.post("/orquestracoes", json=FAN_OUT, headers=headers)
    assert_problem(again, 422, "Idempotency-Key", "another body")


async def test_a_request_that_names_its_run_and_has_a_key_may_be_repeated(service: Service) -> None:
    named, headers = {**FAN_OUT, "correlation_id": "i1"}, {"Idempotency-Key": "chave-1"}
    first = await service.client.post("/orquestracoes", json=named, headers=headers)
    second = await service.client.post("/orquestracoes", json=named, headers=headers)
    assert first.status_code == second.status_code == 202
    other_key = await service.client.post("/orquestracoes", json=named, headers={"Idempotency-Key": "chave-2"})
    assert_problem(other_key, 409, "correlation_id", "the correlation_id 'i1' is in use")
    assert len(await service.runs()) == 1


@pytest.mark.parametrize("key", [b"", b"\x80\xff", b"k" * 256])
async def test_an_odd_key_is_refused(service: Service, key: bytes) -> None:
    reply = await service.client.post("/orquestracoes", json=FAN_OUT, headers={b"Idempotency-Key": key})
    assert_problem(reply, 422, "Idempotency-Key")
    assert await service.runs() == []


async def test_an_id_in_use_is_refused(service: Service) -> None:
    await service.start_run(destinos=["escavador_x"], correlation_id="minha")
    reply = await service.client.post("/orquestracoes", json={"destinos": ["escavador_y"], "correlation_id": "minha"})
    assert_problem(reply, 409, "correlation_id", "'minha'", "in use")
    assert len(await service.runs()) == 1


async def test_a_trace_is_passed_on_when_it_is_one(service: Service) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await service.client.post("/orquestracoes", json={"destinos": ["escavador_x"]}, headers={"traceparent": trace})
    assert (await service.answer("escavador_x", {})).traceparent == trace
    await service.client.post("/orquestracoes", json={"destinos": ["escavador_x"]}, headers={"traceparent": "00-0-0-0"})
    assert (await service.answer("escavador_x", {})).traceparent != "00-0-0-0"


async def test_who_waits_keeps_nothing_of_a_large_request(tmp_path: Path) -> None:
    """Of many that wait, each may have sent megabytes, which are in the store by then."""
    async with running(tmp_path, Settings(engine=EngineSettings(cached_tasks=0))) as service:
        text = json.dumps({"destinos": ["escavador_x"], "payload": {"x": "a" * 1_000_000}}).encode()
        tracemalloc.start()
        try:
            post = service.client.post
            calls = [
                asyncio.create_task(post("/orquestracoes", content=text, headers={"Prefer": "wait=60"}))
                for _ in range(10)
            ]

            async def are_sent() -> bool:
                return [state.ready for state in await service.broker.queues(["escavador_x"])] == [len(calls)]

            await until(are_sent)
            ours = [tracemalloc.Filter(True, f"*/oraculo/{place}.py") for place in ("api/bodies", "core/request")]

            def is_little_kept() -> bool:
                kept = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
                return sum(each.size for each in kept) < 3_000_000

            await until(is_little_kept, saying="that every one has heard that it is committed, and lets go")
        finally:
            tracemalloc.stop()
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
