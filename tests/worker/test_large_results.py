"""Large results in the SDK: read before the handler sees them, put aside before they are answered."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.core.result_reference import CLAIM, encode_reference, make_reference, read_reference
from oraculo.errors import ObjectsUnavailable
from oraculo.ports.objects import get_result, put_result
from oraculo.stores.objects import FolderObjects
from oraculo.worker import Answer, App, large_results
from tests.worker.stage import Stage

RUN = "run-1"  # as `stage.command` has it
LARGE = "x" * 300_000
INPUT = msgspec.json.encode({"dados": LARGE})


def app_that(returns: Any = None, seen: list[Any] | None = None) -> App:
    app = App("large")

    @app.queue("executador_b")
    async def work(payload: dict[str, Any]) -> Any:
        if seen is not None:
            seen.append(payload)
        return returns

    return app


def reference(run_id: str = RUN) -> Any:
    return msgspec.json.decode(encode_reference(make_reference(run_id, "escavador_a", INPUT)))


async def answered(stage: Stage, app: App, payload: object, objects: FolderObjects | None, **fields: Any) -> Any:
    async with stage.worker(app, objects=objects):
        await stage.send("executador_b", payload, **fields)
        return await stage.payload()


async def claimed(folder: Path) -> FolderObjects:
    """As an engine does at its start."""
    objects = FolderObjects(folder)
    await objects.claim("um")
    return objects


# -- what it is given ---------------------------------------------------------------------------------------------


async def test_a_reference_is_read_before_the_handler_sees_it(stage: Stage, tmp_path: Path) -> None:
    objects, seen = await claimed(tmp_path), []
    await put_result(objects, RUN, "escavador_a", INPUT)
    payload = {"config": {"n": 1}, "resultados": {"escavador_a": reference(), "escavador_c": {"dados": 2}}}
    assert (await answered(stage, app_that("ok", seen), payload, objects))["status"] == "ok"
    assert seen == [{"config": {"n": 1}, "resultados": {"escavador_a": {"dados": LARGE}, "escavador_c": {"dados": 2}}}]


async def test_a_worker_without_the_object_store_says_what_to_set(stage: Stage) -> None:
    seen: list[Any] = []
    payload = {"resultados": {"escavador_a": reference()}}
    failure = await answered(stage, app_that("ok", seen), payload, None)
    assert failure["status"] == "erro"
    assert "ORACULO_OBJECTS_URL" in failure["erros"][0]
    assert "repetir" not in failure, "another worker may know it"
    assert not seen


async def test_a_result_that_is_not_there_fails_the_attempt(stage: Stage, tmp_path: Path) -> None:
    failure = await answered(
        stage, app_that("ok"), {"resultados": {"escavador_a": reference()}}, await claimed(tmp_path)
    )
    assert failure["status"] == "erro"
    assert "there is no" in failure["erros"][0]
    assert "ORACULO_OBJECTS_URL" in failure["erros"][0]


@pytest.mark.parametrize(
    "payload",
    [
        {"resultados": {"escavador_a": reference("another run")}},
        {"resultados": {"escavador_a": {"texto": "oraculo_referencia"}}},
        {"resultados": "oraculo_referencia"},
        {"texto": "oraculo_referencia"},
        reference(),
    ],
)
async def test_what_is_no_result_of_this_run_stays_as_it_came(stage: Stage, payload: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    assert (await answered(stage, app_that("ok", seen), payload, FolderObjects(tmp_path)))["status"] == "ok"
    assert seen == [payload]


# -- what it gives ------------------------------------------------------------------------------------------------


async def test_a_large_result_is_put_aside_and_answered_by_reference(stage: Stage, tmp_path: Path) -> None:
    objects = await claimed(tmp_path)
    payload = await answered(stage, app_that(LARGE), {}, objects, tarefa="executador_b", tentativa=1)
    found = read_reference(RUN, msgspec.json.encode(payload))
    assert found is not None
    assert msgspec.json.decode(await get_result(objects, found)) == {"status": "ok", "resultado": LARGE}


@pytest.mark.parametrize(
    ("returns", "fields"),
    [
        ("small", {"tarefa": "executador_b"}),
        (LARGE, {}),  # the orchestrator would look for the task's name in the payload
        (Answer({"status": "erro", "erros": ["não"], "rastro": LARGE}), {"tarefa": "executador_b"}),
    ],
)
async def test_what_the_orchestrator_must_read_itself_travels_whole(
    stage: Stage, tmp_path: Path, returns: Any, fields: dict[str, Any]
) -> None:
    payload = await answered(stage, app_that(returns), {}, await claimed(tmp_path), **fields)
    assert "status" in payload
    assert os.listdir(tmp_path) == [CLAIM]


async def test_without_an_object_store_it_travels_whole(stage: Stage) -> None:
    payload = await answered(stage, app_that(LARGE), {}, None, tarefa="executador_b")
    assert payload == {"status": "ok", "resultado": LARGE}


async def test_a_folder_that_no_engine_uses_gets_nothing(stage: Stage, tmp_path: Path) -> None:
    """As when it is not mounted where the worker is: the engine would not find there what is put."""
    payload = await answered(stage, app_that(LARGE), {}, FolderObjects(tmp_path), tarefa="executador_b")
    assert payload == {"status": "ok", "resultado": LARGE}
    assert not os.listdir(tmp_path)


class Away(FolderObjects):
    puts = 0

    async def put(self, run_id: str, key: str, body: bytes) -> None:
        self.puts += 1
        raise ObjectsUnavailable("nobody home")


class Stuck(FolderObjects):
    async def put(self, run_id: str, key: str, body: bytes) -> None:
        await asyncio.Event().wait()


async def test_an_object_store_that_is_away_costs_no_answer(stage: Stage, tmp_path: Path) -> None:
    objects = Away(tmp_path)
    async with stage.worker(app_that(LARGE), objects=objects):
        for attempt in range(1, 4):
            await stage.send("executador_b", {}, tarefa="executador_b", tentativa=attempt)
            assert (await stage.payload())["resultado"] == LARGE
    assert objects.puts == 1, "it is not asked again at once"


async def test_an_object_store_that_hangs_costs_no_answer(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_results, "PATIENCE", 0.05)
    payload = await answered(stage, app_that(LARGE), {}, Stuck(tmp_path), tarefa="executador_b")
    assert payload["resultado"] == LARGE


@pytest.mark.parametrize("with_room", [0, 1], ids=["no thread", "one thread"])
async def test_a_system_without_room_for_threads_costs_no_answer(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_room: int
) -> None:
    """The handler has done its work: it is not told as failed, nor called again."""
    await (await claimed(tmp_path)).close()
    seen, start = list[Any](), threading.Thread.start
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # none has started yet
    started: list[threading.Thread] = []

    def start_some(thread: threading.Thread) -> None:
        if len(started) >= with_room:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    payload = await answered(stage, app_that(LARGE, seen), {}, FolderObjects(tmp_path), tarefa="executador_b")
    assert payload == {"status": "ok", "resultado": LARGE}
    assert len(seen) == 1


# -- what a client is given ---------------------------------------------------------------------------------------


async def test_a_large_result_that_python_cannot_read_stays_a_reference_in_the_aggregate(tmp_path: Path) -> None:
    objects = await claimed(tmp_path)
    references = {
        name: msgspec.json.decode(encode_reference(await put_result(objects, RUN, name, b'{"n": %s}' % number)))
        for name, number in (("far", b"1e999"), ("near", b"1"))
    }
    aggregate = await large_results.completed(objects, {"correlation_id": RUN, "resultados": dict(references)})
    assert aggregate["resultados"] == {"far": references["far"], "near": {"n": 1}}
