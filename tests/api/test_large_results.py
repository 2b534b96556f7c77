"""Large results over HTTP: in the run's view, and one by one."""

import shutil
from pathlib import Path

import msgspec
import pytest

from oraculo.core.result_reference import run_folder
from oraculo.core.run import Run
from oraculo.errors import ObjectsUnavailable
from oraculo.stores.objects import FolderObjects

from .service import SETTINGS, Service, assert_problem, running

LARGE = "x" * 300_000


async def large_run(service: Service, run_id: str = "r", task: str = "escavador_x") -> None:
    await service.start_run(destinos=[{"id": task, "fila": "escavador_x"}], correlation_id=run_id)
    await service.answer("escavador_x", {"dados": LARGE, "n": 1.0})
    await service.ended(run_id)


async def test_a_run_shows_a_large_result_whole(service: Service, tmp_path: Path) -> None:
    await large_run(service)
    assert list((tmp_path / "objects").rglob("escavador_x-*.json")), "it rests outside of the store"
    run = (await service.client.get("/orquestracoes/r")).json()
    assert run["resultados"] == {"escavador_x": {"dados": LARGE, "n": 1.0}}


async def test_one_result_comes_out_byte_for_byte(service: Service) -> None:
    await large_run(service)
    reply = await service.client.get("/orquestracoes/r/resultados/escavador_x")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.text == f'{{"dados":"{LARGE}","n":1.0}}'


async def test_a_small_result_is_there_too_and_while_the_run_is_open(service: Service) -> None:
    await service.start_run(destinos=["escavador_x", "escavador_y"], correlation_id="r")
    assert_problem(await service.client.get("/orquestracoes/r/resultados/escavador_x"), 404, None, "has no result")
    await service.answer("escavador_x", {"dados": 1})
    async for _ in service.operations.follow("r"):
        reply = await service.client.get("/orquestracoes/r/resultados/escavador_x")
        if reply.status_code == 200:
            break
    assert reply.text == '{"dados":1}'
    assert (await service.client.get("/orquestracoes/r")).json()["status"] == "em_execucao"


async def test_one_result_after_the_other_reads_the_run_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all results of a wide run would take its width squared. After a restart, which knows no plan: what the engine
    itself still does for a run that ended a moment ago may read it once more."""
    names = [f"t{n}" for n in range(5)]
    async with running(tmp_path) as before:
        await before.start_run(destinos=[{"id": name, "fila": f"fila_{name}"} for name in names], correlation_id="r")
        for name in names:
            await before.answer(f"fila_{name}", {"de": name})
        await before.ended("r")
    async with running(tmp_path) as service:
        reads, read = 0, service.operations.run

        async def counted(run_id: str) -> Run:
            nonlocal reads
            reads += 1
            return await read(run_id)

        monkeypatch.setattr(service.operations, "run", counted)
        for name in names:
            assert (await service.client.get(f"/orquestracoes/r/resultados/{name}")).json() == {"de": name}
        assert_problem(await service.client.get("/orquestracoes/r/resultados/t5"), 404, None, "not one of its tasks")
        assert reads == 1


async def test_ids_with_slashes_are_distinct_from_the_word_between_them(service: Service) -> None:
    await large_run(service, "a/b", "t/u")
    for path in ("a%2Fb/resultados/t%2Fu", "a/b/resultados/t%2Fu"):
        reply = await service.client.get(f"/orquestracoes/{path}")
        assert reply.json()["dados"] == LARGE
    await service.start_run(destinos=["escavador_x"], correlation_id="a/resultados/b")
    run = (await service.client.get("/orquestracoes/a%2Fresultados%2Fb")).json()
    assert run["correlation_id"] == "a/resultados/b"


async def test_what_there_is_not_is_404(service: Service) -> None:
    assert_problem(await service.client.get("/orquestracoes/nada/resultados/x"), 404)
    await large_run(service)
    reply = await service.client.get("/orquestracoes/r/resultados/outra")
    assert_problem(reply, 404, None, "not one of its tasks")


async def test_a_lost_result_is_404_and_an_object_store_that_is_away_503(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await large_run(service)

    async def away(_key: str) -> bytes:
        raise ObjectsUnavailable("nobody home")

    with monkeypatch.context() as patch:
        patch.setattr(service.engine.ports.objects, "get", away)
        assert_problem(await service.client.get("/orquestracoes/r/resultados/escavador_x"), 503, None, "nobody home")
    shutil.rmtree(tmp_path / "objects" / run_folder("r"))
    assert_problem(await service.client.get("/orquestracoes/r/resultados/escavador_x"), 404, None, "lost")
    shown = (await service.client.get("/orquestracoes/r")).json()
    assert "oraculo_referencia" in shown["resultados"]["escavador_x"]


async def test_an_object_store_that_is_away_does_not_make_it_unready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await service.client.get("/health/ready")).json()["partes"]["objects folder"]["ok"]

    async def away() -> str:
        raise ObjectsUnavailable("nobody home")

    monkeypatch.setattr(service.engine.ports.objects, "check", away)
    reply = await service.client.get("/health/ready")
    assert (reply.status_code, reply.json()["status"]) == (200, "degradado")
    assert reply.json()["partes"]["objects folder"] == {"ok": False, "problema": "nobody home"}


async def test_a_folder_that_cannot_be_looked_at_does_not_make_it_unready(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.engine.ports.objects, "check", FolderObjects(tmp_path / ("x" * 300)).check)
    reply = await service.client.get("/health/ready")
    assert (reply.status_code, reply.json()["status"]) == (200, "degradado")
    assert "File name too long" in reply.json()["partes"]["objects folder"]["problema"]


async def test_the_document_knows_the_path_and_every_readiness(tmp_path: Path) -> None:
    async with running(tmp_path, msgspec.structs.replace(SETTINGS)) as service:
        document = (await service.client.get("/openapi.json")).json()
    path = document["paths"]["/orquestracoes/{correlation_id}/resultados/{tarefa}"]["get"]
    assert set(path["responses"]) >= {"200", "404", "503"}
    assert "degradado" in document["components"]["schemas"]["Prontidao"]["properties"]["status"]["enum"]
