import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.api import replies
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.telemetry import LoopFailed
from oraculo.settings import LimitSettings, Settings
from oraculo.wire import naming
from oraculo.wire.message import Message, encode_message
from tests.waiting import until

from .service import SETTINGS, Service, assert_problem, running

YAML = """
name: meu
description: Pipeline customizado
timeout: 600
steps:
  - type: ENHANCED_IMAGES
    config: {count: 5}
  - type: VIRAL_COPY
    retry: {maxAttempts: 3, backoff: 2, maxBackoff: 60}
    timeout: 120
  - type: PROMOTIONAL_VIDEO
    dependsOn: [ENHANCED_IMAGES, VIRAL_COPY]
"""


async def test_the_built_in_ones_are_there(service: Service) -> None:
    listed = {item["name"]: item for item in (await service.client.get("/pipelines")).json()["pipelines"]}
    assert len(listed) == 8
    assert listed["coleta-execucao"]["origem"] == "embutido"
    assert "executador_relatorio" in listed["coleta-execucao"]["steps"]
    shown = (await service.client.get("/pipelines/coleta-execucao")).json()
    assert shown["hash"] == listed["coleta-execucao"]["hash"]
    assert shown["origem"] == "embutido"
    assert shown["steps"][-1]["dependsOn"] == ["escavador_youtube", "escavador_blog"]


async def test_a_list_of_many_ends_early_and_the_next_page_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (await service.client.get("/pipelines")).json()
    assert whole["cursor"] is None
    monkeypatch.setattr(replies, "PAGE_BYTES", 2 * max(len(json.dumps(each)) for each in whole["pipelines"]))
    seen: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await service.client.get("/pipelines", params={"cursor": cursor})).json()
        assert 0 < len(page["pipelines"]) < len(whole["pipelines"])
        seen, cursor = seen + page["pipelines"], page["cursor"]
    assert seen == whole["pipelines"]


KINDS = ["application/yaml", "text/yaml", "application/x-yaml; charset=utf-8"]
AS_YAML = {"Content-Type": "application/yaml"}


@pytest.mark.parametrize("kind", KINDS)
async def test_one_is_put_as_yaml(service: Service, kind: str) -> None:
    headers = {"Content-Type": kind}
    reply = await service.client.put("/pipelines/meu", content=YAML, headers=headers)
    assert reply.status_code == 201
    assert reply.headers["location"] == "/pipelines/meu"
    shown = reply.json()
    assert shown["origem"] == "api"
    assert shown["steps"][2]["queue"] == "video-queue"
    assert (await service.client.get("/pipelines/meu")).json() == shown
    again = await service.client.put("/pipelines/meu", content=YAML, headers=headers)
    assert again.status_code == 200
    assert again.json() == shown


@pytest.mark.parametrize("error", [BrokerUnavailable("no broker works"), BrokerError("not allowed")])
async def test_one_is_put_while_the_broker_is_away_or_refuses_a_queue(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: BrokerError
) -> None:
    async def fails(_queues: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(service.broker, "declare", fails)
    reply = await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML)
    assert reply.status_code == 201
    assert (await service.client.get("/pipelines/meu")).json() == reply.json()


async def test_what_is_shown_can_be_put_again_as_it_is(service: Service) -> None:
    shown = (await service.client.get("/pipelines/promotional-video-full")).json()
    assert {"origem", "hash"} <= shown.keys()
    reply = await service.client.put("/pipelines/promotional-video-full", json=shown)
    assert reply.status_code == 200
    assert reply.json() == {**shown, "origem": "api"}


async def test_a_run_can_name_it(service: Service) -> None:
    await service.client.put("/pipelines/meu", json={"steps": [{"type": "fila_x"}]})
    run_id = await service.start_run(pipeline="meu")
    await service.answer("fila_x", {"ok": 1})
    assert (await service.ended(run_id))["status"] == "concluida"


async def test_a_step_may_have_a_queue_and_no_type(service: Service) -> None:
    reply = await service.client.put("/pipelines/meu", content="steps: [{id: um, queue: fila_x}]", headers=AS_YAML)
    assert reply.status_code == 201
    (step,) = reply.json()["steps"]
    assert (step["id"], step["type"], step["queue"]) == ("um", "fila_x", "fila_x")


BAD: list[Any] = [
    pytest.param("nada: [", "", "line ", id="not YAML"),
    pytest.param("[]", "", "object", id="a list"),
    pytest.param("{}", "steps", "at least one step", id="no steps"),
    pytest.param("steps: [{type: x y}]", "steps[0] (x y).queue", "letters", id="queue"),
    pytest.param("steps: [{type: a, dependsOn: [b]}, {type: c}]", "steps[0] (a).dependsOn", "'b'", id="dependency"),
    pytest.param(
        "steps: [{type: a, dependsOn: [b]}, {type: b, dependsOn: [a]}]",
        "steps[0] (a).dependsOn",
        "a → b → a",
        id="circle",
    ),
    pytest.param("name: outro\nsteps: [{type: a}]", "name", "'meu'", id="another name"),
    pytest.param("steps: [{type: a, timout: 1}]", "steps[0] (a).timout", "'timeout'", id="unknown key"),
    pytest.param('steps: [{type: "a\\0"}]', "steps[0].type", "control", id="NUL"),
    pytest.param('description: !!timestamp "x"', "", "line 1, column 14", id="tag"),
    pytest.param(f"quorum: {'0' * 5000}50%\nsteps: [{{type: a}}]", "quorum", '"60%"', id="long percentage"),
    pytest.param("steps: [{type: a, config: {1: 2}}]", "steps[0] (a).config", "in quotes", id="a number as a key"),
    pytest.param("#" * (1024 * 1024 + 1), "", "JSON may have", id="long YAML"),
    pytest.param("steps: " + "[" * 200 + "]" * 200, "", "nested", id="deep"),
]


@pytest.mark.parametrize(("text", "field", "word"), BAD)
async def test_a_bad_one_is_refused_with_step_and_fault(service: Service, text: str, field: str, word: str) -> None:
    before = (await service.client.get("/pipelines")).json()
    reply = await service.client.put("/pipelines/meu", content=text, headers=AS_YAML)
    assert_problem(reply, 422, field, word)
    assert (await service.client.get("/pipelines")).json() == before


@pytest.mark.parametrize(
    "text",
    [
        'steps: [{type: a, "\\ud800": 1}]',
        'description: "\\ud800"\nsteps: [{type: a}]',
        'steps: [{type: a, config: {x: "\\ud800"}}]',
        "steps: [{type: a}]\nquorum: 0x" + "f" * 5000,
        "steps: [{type: a, retry: {maxAttempts: 0x" + "f" * 5000 + "}}]",
        "steps: [{type: a, timeout: 0x" + "f" * 5000 + "}]",
        "steps: [{type: a, config: {? [1, 2] : 3}}]",
        "steps: [{type: a, config: {? !!set {1, 2} : 3}}]",
        "onLate: [1]\nsteps: [{type: a}]",
        "onLate: {a: 1}\nsteps: [{type: a}]",
        "steps: [{type: {a: 1}, id: [2]}]",
        "? {a: 1}\n: 2",
        "a: &a [*a]",
        "!!python/object/apply:os.system [ls]",
        "steps: [{type: a, retry: {backoff: .nan}}]",
        "name: 5\nsteps: [{type: a}]",
    ],
)
async def test_an_odd_one_is_refused_without_harm(service: Service, text: str) -> None:
    assert_problem(await service.client.put("/pipelines/meu", content=text, headers=AS_YAML), 422)


async def test_a_bad_name_is_refused(service: Service) -> None:
    reply = await service.client.put("/pipelines/a%2Fb", content="steps: [{type: a}]", headers=AS_YAML)
    assert_problem(reply, 422, "name")


async def test_one_that_is_too_large_is_refused(service: Service) -> None:
    reply = await service.client.put("/pipelines/meu", content=b"#" * (4 * 1024 * 1024 + 1), headers=AS_YAML)
    assert_problem(reply, 413, "request")


async def test_one_is_deleted_but_a_built_in_one_is_not(service: Service) -> None:
    await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML)
    reply = await service.client.delete("/pipelines/meu")
    assert reply.status_code == 204
    assert reply.content == b""
    assert_problem(await service.client.delete("/pipelines/meu"), 404, None, "'meu'")
    assert_problem(await service.client.get("/pipelines/meu"), 404, None, "'meu'")
    assert_problem(await service.client.delete("/pipelines/coleta-execucao"), 409, None, "built in")


async def test_of_those_who_delete_one_at_once_all_but_one_learn_that_it_is_gone(service: Service) -> None:
    await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML)
    replies = await asyncio.gather(*(service.client.delete("/pipelines/meu") for _ in range(5)))
    done, *others = sorted(replies, key=lambda reply: reply.status_code)
    assert done.status_code == 204
    for reply in others:
        assert_problem(reply, 404, None, "'meu'")


async def test_one_that_another_engine_deletes_at_the_same_time_is_gone_and_no_file(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML)
    delete = service.engine.ports.store.delete_pipeline

    async def slower(name: str) -> bool:
        assert await delete(name)
        return await delete(name)

    monkeypatch.setattr(service.engine.ports.store, "delete_pipeline", slower)
    assert_problem(await service.client.delete("/pipelines/meu"), 404, None, "'meu'")
    assert_problem(await service.client.get("/pipelines/meu"), 404, None, "'meu'")


@pytest.mark.parametrize("change", ["PUT", "DELETE"])
async def test_what_was_read_before_a_change_does_not_undo_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Every process looks now and then what others put, also while it learns something newer."""
    old = (await service.client.put("/pipelines/meu", json={"steps": [{"type": "velho"}]})).json()
    pipelines, has_read, may_go_on = service.engine.ports.store.pipelines, asyncio.Event(), asyncio.Event()

    async def slowly() -> Mapping[str, bytes]:
        found, is_first = await pipelines(), not has_read.is_set()
        has_read.set()
        if is_first:
            await may_go_on.wait()
        return found

    monkeypatch.setattr(service.engine.ports.store, "pipelines", slowly)
    looking = asyncio.create_task(service.engine.parts.catalogue.refresh_stored(service.engine.ports.store))
    await has_read.wait()
    request = service.client.request(
        change, "/pipelines/meu", content=YAML if change == "PUT" else None, headers=AS_YAML
    )
    changing = asyncio.create_task(request)
    await asyncio.wait({changing}, timeout=0.3)  # it may wait for the look, or be done before
    may_go_on.set()
    reply, _ = await asyncio.gather(changing, looking)
    assert reply.status_code == (200 if change == "PUT" else 204)
    shown = await service.client.get("/pipelines/meu")
    assert shown.status_code == (200 if change == "PUT" else 404)
    assert shown.json().get("hash") != old["hash"]


async def test_whoever_waits_too_long_for_those_before_learns_that_the_store_is_away(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take as long as a frozen store lets it, one after the other."""
    monkeypatch.setattr("oraculo.engine.pipelines._PATIENCE", 0.05)
    async with service.engine.parts.catalogue._turn:
        assert_problem(
            await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML), 503, None, "other requests"
        )
    assert (await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML)).status_code == 201


async def test_an_unknown_one_gets_the_nearest(service: Service) -> None:
    assert_problem(await service.client.get("/pipelines/coleta-execusao"), 404, None, "'coleta-execucao'")


NOW = "2026-01-01T00:00:00Z"
OF_A_NEWER_VERSION = b'{"of": "a newer version"}'


async def put_by_a_newer_version(service: Service, name: str) -> None:
    await service.engine.ports.store.put_pipeline(name, OF_A_NEWER_VERSION, 1.0)
    await service.engine.parts.catalogue.refresh_stored(service.engine.ports.store)


async def test_one_that_a_newer_version_put_holds_up_no_other(service: Service) -> None:
    await put_by_a_newer_version(service, "estranho")
    said = await service.records.of(LoopFailed)
    assert isinstance(said, LoopFailed)
    assert said.duty == "pipelines"
    assert said.reason.startswith("'estranho'")
    assert (await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML)).status_code == 201
    await service.start_run(pipeline="meu")
    listed = (await service.client.get("/pipelines")).json()["pipelines"]
    assert {"meu"} == {one["name"] for one in listed if one["origem"] == "api"}
    assert (await service.client.delete("/pipelines/meu")).status_code == 204
    assert not [record for record in service.records._records if isinstance(record, LoopFailed)], (
        "it was reported before"
    )


@pytest.mark.parametrize("name", ["estranho", "coleta-execucao"])
async def test_whoever_asks_for_one_that_a_newer_version_put_learns_so(service: Service, name: str) -> None:
    await put_by_a_newer_version(service, name)
    shown = await service.client.get(f"/pipelines/{name}")
    started = await service.client.post("/orquestracoes", json={"pipeline": name})
    for reply in (shown, started):
        assert_problem(reply, 503, None, "run that version")
        assert reply.json()["type"] == "urn:oraculo:problem:written-by-newer"


async def test_a_message_that_asks_for_one_that_a_newer_version_put_waits_and_holds_up_no_other(
    service: Service,
) -> None:
    await put_by_a_newer_version(service, "estranho")
    asked = {"a": "estranho", "b": "coleta-execucao"}
    for run_id, name in asked.items():
        payload = msgspec.Raw(msgspec.json.encode({"pipeline": name}))
        message = Message(correlation_id=run_id, tipo_evento=naming.START_RUN, payload=payload, timestamp=NOW)
        await publish_all(service.broker, [Outgoing(naming.REQUESTS, encode_message(message))])
    await until(service.runs, saying="the other's run")
    assert [run["correlation_id"] for run in await service.runs()] == ["b"]
    assert (
        await service.client.put("/pipelines/estranho", content=YAML.replace("meu", "estranho"), headers=AS_YAML)
    ).status_code == 200
    await until(lambda: has_run(service, "a"), saying="its run, once it can be read")


async def has_run(service: Service, run_id: str) -> bool:
    return run_id in {run["correlation_id"] for run in await service.runs()}


async def test_one_that_a_newer_version_put_is_replaced_or_deleted(service: Service) -> None:
    await put_by_a_newer_version(service, "meu")
    assert (await service.client.put("/pipelines/meu", content=YAML, headers=AS_YAML)).status_code == 200
    await service.start_run(pipeline="meu")
    await put_by_a_newer_version(service, "meu")
    assert (await service.client.delete("/pipelines/meu")).status_code == 204
    assert_problem(await service.client.get("/pipelines/meu"), 404, None, "'meu'")


async def test_an_engine_starts_beside_one_that_a_newer_version_put(tmp_path: Path) -> None:
    async with running(tmp_path) as newer:
        await newer.engine.ports.store.put_pipeline("estranho", OF_A_NEWER_VERSION, 1.0)
    async with running(tmp_path) as older:
        await older.start_run(pipeline="coleta-execucao")


async def test_a_pipeline_shows_the_queue_of_each_step_and_what_its_author_may_not_mean(service: Service) -> None:
    steps = [{"type": "ENHANCED_IMAGE"}, {"type": "VIRAL_COPY"}]
    shown = (await service.client.put("/pipelines/meu", json={"steps": steps})).json()
    assert [step["queue"] for step in shown["steps"]] == ["ENHANCED_IMAGE", "text-queue"]
    warned = [(warning["campo"], warning["motivo"]) for warning in shown["avisos"]]
    assert [field for field, _ in warned] == [
        "steps[0] (ENHANCED_IMAGE).type",
        "steps[0] (ENHANCED_IMAGE).queue",
        "steps[1] (VIRAL_COPY).queue",
    ]
    assert "'ENHANCED_IMAGES'" in warned[0][1]
    assert (await service.client.get("/pipelines/meu")).json() == shown
    assert (await service.client.put("/pipelines/meu", json=shown)).status_code == 200


def bounded_by(**limits: int) -> Settings:
    return msgspec.structs.replace(SETTINGS, limits=LimitSettings(**limits))


async def test_only_so_many_pipelines_are_stored(tmp_path: Path) -> None:
    async with running(tmp_path, bounded_by(pipelines=2)) as service:
        for name in ("um", "dois", "dois"):
            assert (await service.client.put(f"/pipelines/{name}", content=YAML.replace("meu", name))).is_success
        reply = await service.client.put("/pipelines/tres", content=YAML.replace("meu", "tres"))
        assert_problem(reply, 409, None, "2 pipelines are stored; ORACULO_LIMITS_PIPELINES allows no more")
        assert (await service.client.get("/pipelines/tres")).status_code == 404
        assert (await service.client.delete("/pipelines/um")).status_code == 204
        assert (await service.client.put("/pipelines/tres", content=YAML.replace("meu", "tres"))).is_success
    async with running(tmp_path, bounded_by(pipelines=1)) as service:  # since lowered
        assert (await service.client.put("/pipelines/dois", content=YAML.replace("meu", "dois"))).status_code == 200
        assert (await service.client.put("/pipelines/um", content=YAML.replace("meu", "um"))).status_code == 409


async def test_the_stored_pipelines_have_only_so_many_bytes(tmp_path: Path) -> None:
    large = json.dumps({"steps": [{"id": "a", "queue": "q", "type": "T", "config": {"x": "x" * 3000}}]})
    async with running(tmp_path, bounded_by(pipelines_bytes=5000)) as service:
        for text in (large, large.replace("xxx", "yyy")):
            assert (await service.client.put("/pipelines/um", content=text)).is_success
        reply = await service.client.put("/pipelines/dois", content=large)
        assert_problem(reply, 409, None, "would have", "ORACULO_LIMITS_PIPELINES_BYTES allows 5000")
        assert (await service.client.get("/pipelines/dois")).status_code == 404
