from collections.abc import Sequence
from typing import Any

import pytest

from oraculo.errors import BrokerUnavailable

from .service import Service, assert_problem

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


KINDS = ["application/yaml", "text/yaml", "application/x-yaml", "text/plain; charset=utf-8", ""]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_is_put_as_yaml(service: Service, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
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


async def test_one_is_put_while_the_broker_is_away(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_queues: Sequence[str]) -> None:
        raise BrokerUnavailable("no broker works")

    monkeypatch.setattr(service.broker, "declare", away)
    reply = await service.client.put("/pipelines/meu", content=YAML)
    assert reply.status_code == 201
    assert (await service.client.get("/pipelines/meu")).json() == reply.json()


async def test_what_is_shown_can_be_put_again_as_json(service: Service) -> None:
    shown = (await service.client.get("/pipelines/promotional-video-full")).json()
    own = {key: value for key, value in shown.items() if key not in ("origem", "hash")}
    reply = await service.client.put("/pipelines/promotional-video-full", json=own)
    assert reply.status_code == 200
    assert reply.json() == {**shown, "origem": "api"}


async def test_a_run_can_name_it(service: Service) -> None:
    await service.client.put("/pipelines/meu", json={"steps": [{"type": "fila_x"}]})
    run_id = await service.start_run(pipeline="meu")
    await service.answer("fila_x", {"ok": 1})
    assert (await service.ended(run_id))["status"] == "concluida"


async def test_a_step_may_have_a_queue_and_no_type(service: Service) -> None:
    reply = await service.client.put("/pipelines/meu", content="steps: [{id: um, queue: fila_x}]")
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
    pytest.param('steps: [{type: "a\\0"}]', "steps[0].type", "NUL", id="NUL"),
    pytest.param('description: !!timestamp "x"', "", "line 1, column 14", id="tag"),
    pytest.param(f"quorum: {'0' * 5000}50%\nsteps: [{{type: a}}]", "quorum", '"60%"', id="long percentage"),
    pytest.param("steps: [{type: a, config: {1: 2}}]", "steps[0] (a).config", "in quotes", id="a number as a key"),
    pytest.param("#" * (1024 * 1024 + 1), "", "JSON may have", id="long YAML"),
    pytest.param("steps: " + "[" * 200 + "]" * 200, "", "nested", id="deep"),
]


@pytest.mark.parametrize(("text", "field", "word"), BAD)
async def test_a_bad_one_is_refused_with_step_and_fault(service: Service, text: str, field: str, word: str) -> None:
    before = (await service.client.get("/pipelines")).json()
    reply = await service.client.put("/pipelines/meu", content=text)
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
    assert_problem(await service.client.put("/pipelines/meu", content=text), 422)


async def test_a_bad_name_is_refused(service: Service) -> None:
    reply = await service.client.put("/pipelines/a%2Fb", content="steps: [{type: a}]")
    assert_problem(reply, 422, "name")


async def test_one_that_is_too_large_is_refused(service: Service) -> None:
    reply = await service.client.put("/pipelines/meu", content=b"#" * (4 * 1024 * 1024 + 1))
    assert_problem(reply, 413, "request")


async def test_one_is_deleted_but_a_built_in_one_is_not(service: Service) -> None:
    await service.client.put("/pipelines/meu", content=YAML)
    reply = await service.client.delete("/pipelines/meu")
    assert reply.status_code == 204
    assert reply.content == b""
    assert_problem(await service.client.delete("/pipelines/meu"), 404, None, "'meu'")
    assert_problem(await service.client.get("/pipelines/meu"), 404, None, "'meu'")
    assert_problem(await service.client.delete("/pipelines/coleta-execucao"), 409, None, "built in")


async def test_an_unknown_one_is_told_the_nearest(service: Service) -> None:
    assert_problem(await service.client.get("/pipelines/coleta-execusao"), 404, None, "'coleta-execucao'")
