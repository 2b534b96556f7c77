import asyncio
from collections.abc import Sequence

import pytest

from oraculo.ports.store import Snapshot

from .service import Service, assert_problem


async def test_a_run_shows_its_tasks_and_at_its_end_the_aggregate(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x", "executador_y"])
    open_run = (await service.client.get(f"/orquestracoes/{run_id}")).json()
    assert open_run["status"] == "em_execucao"
    assert [task["id"] for task in open_run["tarefas"]] == ["escavador_x", "executador_y"]
    assert "resultados" not in open_run
    await service.answer("escavador_x", {"dados": [1.0]})
    await service.answer("executador_y", {"status": "erro", "erros": ["sem disco"]})
    aggregate = await service.ended(run_id)
    run = (await service.client.get(f"/orquestracoes/{run_id}")).json()
    assert run["status"] == "parcial"
    assert {key: run[key] for key in aggregate} == aggregate
    assert [task["status"] for task in run["tarefas"]] == ["concluida", "erro"]


async def test_results_come_out_byte_for_byte(service: Service) -> None:
    await service.start_run(destinos=["escavador_x"], correlation_id="r")
    await service.answer("escavador_x", {"dados": 123456789012345678901234567890})
    await service.ended("r")
    assert '{"dados":123456789012345678901234567890}' in (await service.client.get("/orquestracoes/r")).text


async def test_ids_may_hold_slashes_and_end_like_a_path_of_ours(service: Service) -> None:
    await service.start_run(destinos=["escavador_x"], correlation_id="a")
    links = {}
    for run_id in ("a/eventos", "a/b c", "é/%2F?#", "a/cancelar"):
        request = {"destinos": ["escavador_x"], "correlation_id": run_id}
        reply = await service.client.post("/orquestracoes", json=request)
        links[run_id] = reply.json()["links"]
    for run_id, link in links.items():
        assert (await service.client.get(link["self"])).json()["correlation_id"] == run_id
        assert (await service.client.get(link["explicacao"])).json()["correlation_id"] == run_id
        assert len((await service.client.get(link["eventos"])).json()["eventos"]) >= 1
        assert (await service.client.post(link["cancelar"])).json()["correlation_id"] == run_id
    assert (await service.client.get("/orquestracoes/a/b c")).json()["correlation_id"] == "a/b c"
    assert "eventos" in (await service.client.get("/orquestracoes/a/eventos")).json()
    assert (await service.client.get("/orquestracoes/a")).json()["status"] == "em_execucao"


async def test_unknown_runs_are_not_found(service: Service) -> None:
    for suffix in ("", "/eventos", "/explicacao"):
        assert_problem(await service.client.get(f"/orquestracoes/nada{suffix}"), 404, None, "'nada'")
    for suffix in ("/cancelar", "/repetir"):
        assert_problem(await service.client.post(f"/orquestracoes/nada{suffix}"), 404, None, "'nada'")


async def test_the_list_is_newest_first_and_goes_on_at_its_cursor(service: Service) -> None:
    ids = [await service.start_run(destinos=["escavador_x"], correlation_id=f"r{number}") for number in range(5)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await service.client.get("/orquestracoes", params={"limit": 2, "cursor": cursor})).json()
        seen += [run["correlation_id"] for run in page["orquestracoes"]]
        assert len(page["orquestracoes"]) <= 2
        if page["cursor"] is None:
            break
        cursor = page["cursor"]
    assert seen == ids[::-1]


async def test_the_list_is_filtered(service: Service) -> None:
    await service.start_run(destinos=["escavador_x"], correlation_id="Alfa")
    await service.start_run(pipeline="coleta-execucao", correlation_id="beta")
    await service.client.post("/orquestracoes/beta/cancelar")

    async def ids(**query: str) -> list[str]:
        reply = await service.client.get("/orquestracoes", params=query)
        return [run["correlation_id"] for run in reply.json()["orquestracoes"]]

    assert await ids(status="cancelada") == ["beta"]
    assert await ids(status="em_execucao") == ["Alfa"]
    assert await ids(status="cancelada,em_execucao") == ["beta", "Alfa"]
    assert await ids(status="erro,timeout,") == []
    assert await ids(pipeline="coleta-execucao") == ["beta"]
    assert await ids(q="ALF") == ["Alfa"]
    assert await ids(q="nada") == []
    assert await ids(status="", pipeline="", q="", limit="", cursor="") == ["beta", "Alfa"]


async def test_the_list_is_bounded_by_when_runs_began(service: Service) -> None:
    for run_id in ("old", "new"):
        await service.start_run(destinos=["escavador_x"], correlation_id=run_id)
        await asyncio.sleep(0.002)  # the API shows thousandths of a second
    began = (await service.client.get("/orquestracoes/new")).json()["iniciada_em"]

    async def ids(**query: str) -> list[str]:
        reply = await service.client.get("/orquestracoes", params=query)
        return [run["correlation_id"] for run in reply.json()["orquestracoes"]]

    assert await ids(desde=began) == ["new"]
    assert await ids(ate=began) == ["old"]
    assert await ids(desde=began, ate=began) == []
    assert await ids(desde="2020-01-01T00:00:00-03:00", ate="") == ["new", "old"]


async def test_filters_that_nothing_can_fit_are_refused_by_name(service: Service) -> None:
    for field, value in (("desde", "ontem"), ("ate", "2026-01-31T12:00:00")):
        reply = await service.client.get("/orquestracoes", params={field: value})
        assert_problem(reply, 422, field, "ISO 8601")
    assert_problem(await service.client.get("/orquestracoes", params={"status": "erro,nada"}), 422, "status", "erro")


@pytest.mark.parametrize("address", ["", "/a", "/a/eventos", "/a/explicacao"])
async def test_what_a_newer_version_wrote_is_refused_with_what_to_do(service: Service, address: str) -> None:
    await service.start_run(destinos=["escavador_x"], correlation_id="a")
    service.write_as_newer("a")
    reply = await service.client.get(f"/orquestracoes{address}")
    assert_problem(reply, 503, None, "'novo' for the status of a run, as a newer ORÁCULO writes it: run that version")
    assert reply.json()["type"] == "urn:oraculo:problem:written-by-newer"


async def test_a_history_that_a_newer_version_wrote_is_refused_with_what_to_do(service: Service) -> None:
    await service.start_run(destinos=["escavador_x"], correlation_id="a")
    service.write_as_newer("a", table="history", column="what")
    assert_problem(await service.client.get("/orquestracoes/a/eventos"), 503, None, "run that version")
    assert (await service.client.get("/orquestracoes/a")).status_code == 200


async def test_an_explanation_is_one_sentence(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    said = (await service.client.get(f"/orquestracoes/{run_id}/explicacao")).json()
    assert said["correlation_id"] == run_id
    assert said["status"] == "em_execucao"
    assert "escavador_x" in said["explicacao"]


async def test_an_explanation_reads_the_run_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide one takes a while."""
    run_id = await service.start_run(destinos=["escavador_x"])
    load, loaded = service.engine.ports.store.load, []

    async def counted(run_ids: Sequence[str]) -> dict[str, Snapshot]:
        loaded.extend(run_ids)
        return await load(run_ids)

    monkeypatch.setattr(service.engine.ports.store, "load", counted)
    await service.client.get(f"/orquestracoes/{run_id}/explicacao")
    assert loaded == [run_id]


async def test_a_run_is_cancelled_once(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    reply = await service.client.post(f"/orquestracoes/{run_id}/cancelar")
    assert reply.status_code == 200
    assert reply.json()["status"] == "cancelada"
    assert reply.json()["falhas"]["escavador_x"]["status"] == "cancelada"
    assert_problem(await service.client.post(f"/orquestracoes/{run_id}/cancelar"), 409, None, "cancelada")


async def test_what_failed_is_repeated_and_what_succeeded_is_kept(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x", "escavador_y"])
    assert_problem(await service.client.post(f"/orquestracoes/{run_id}/repetir"), 409, None, "em_execucao")
    await service.answer("escavador_x", {"dados": 1})
    await service.answer("escavador_y", {"status": "erro"})
    assert (await service.ended(run_id))["status"] == "parcial"
    reply = await service.client.post(f"/orquestracoes/{run_id}/repetir")
    assert reply.status_code == 202
    assert reply.headers["location"] == f"/orquestracoes/{run_id}"
    assert reply.json()["status"] == "em_execucao"
    assert reply.json()["tarefas"][0]["status"] == "concluida"
    await service.answer("escavador_y", {"dados": 2})
    aggregate = await service.ended(run_id)
    assert aggregate["status"] == "concluida"
    assert aggregate["versao"] == 2
    assert_problem(await service.client.post(f"/orquestracoes/{run_id}/repetir"), 409, None, "nothing to repeat")
