"""How deep a value may be nested: what is taken from outside is handed on and read again, and what grows deeper from
step to step is refused with the reason."""

import json
from typing import Any

import pytest

from oraculo.testing.harness import Harness
from oraculo.wire.json_guard import MAX_DEPTH
from oraculo.worker import Answer, App, Client, DoNotRetry
from tests.engine.workers import answer
from tests.waiting import until

DEEPEST = MAX_DEPTH - 1  # of a payload: the request or the message around it is the other level
A_THEN_B = {"steps": [{"type": "a"}, {"type": "b", "dependsOn": ["a"]}], "timeout": 60}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"fundo": 1}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


async def put(oraculo: Harness, definition: dict[str, Any]) -> None:
    await oraculo.operations.put_pipeline("p", json.dumps(definition).encode())


async def test_the_deepest_payload_and_result_reach_a_step_its_redrive_and_the_client() -> None:
    app, seen = App("deep"), []

    @app.queue("a")
    async def first(payload: dict[str, Any]) -> Answer:
        return Answer(nested(DEEPEST))

    @app.queue("b")
    async def second(payload: dict[str, Any]) -> str:
        seen.append(payload)
        if len(seen) == 1:
            raise DoNotRetry("not yet")
        return "ok"

    async with Harness(app) as oraculo, Client(oraculo.broker) as client:
        await put(oraculo, A_THEN_B)
        failed = await client.run({"pipeline": "p", "payload": nested(DEEPEST)}, timeout=30)
        assert (failed["status"], failed["resultados"]) == ("erro", {"a": nested(DEEPEST)})
        await until(lambda: oraculo.operations.dead_letters("b"))
        done = await oraculo.operations.redrive("b")
        assert (done.moved, done.reopened) == (0, 1)
        mended = await oraculo.ended(failed["correlation_id"])
    assert mended["status"] == "concluida"
    assert [payload["entrada"] for payload in seen] == [nested(DEEPEST)] * 2
    assert [payload["resultados"] for payload in seen] == [{"a": nested(DEEPEST)}] * 2


async def test_a_result_that_grows_from_step_to_step_fails_the_one_that_makes_it_too_deep() -> None:
    app = App("echo")
    names = [f"passo{number}" for number in range(50)]
    for name in names:
        app.queue(name)(lambda payload: payload)
    steps = [
        {"type": name, "dependsOn": names[number - 1 : number] if number else []} for number, name in enumerate(names)
    ]
    async with Harness(app) as oraculo:
        await put(oraculo, {"steps": steps, "timeout": 60})
        aggregate = await oraculo.ended(await oraculo.submit({"pipeline": "p"}))
    assert aggregate["status"] == "erro"
    failed = [name for name, fault in aggregate["falhas"].items() if fault["status"] == "erro"]
    assert failed == [names[len(aggregate["resultados"])]]
    assert aggregate["falhas"][failed[0]]["tentativas"] == 1, "another attempt would come to the same"
    assert "nested deeper than 128 levels" in aggregate["falhas"][failed[0]]["motivo"]


@pytest.mark.parametrize("levels", [DEEPEST + 1, 500])
async def test_an_answer_that_is_too_deep_is_told_in_its_run(levels: int) -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})

        async def is_sent() -> bool:
            return (await oraculo.operations.run(run_id)).tasks[0].status == "em_execucao"

        await until(is_sent)
        message = answer(run_id, tipo_evento="resultado_execucao", tarefa="executador_x", payload=nested(levels))
        await oraculo.publish("resultados", message)
        (letter,) = await until(lambda: oraculo.operations.dead_letters("resultados"))
        assert letter.reason == "nested deeper than 128 levels"
        assert "an answer was refused (nested deeper than 128 levels" in await oraculo.operations.explain(run_id)
        message["payload"] = nested(DEEPEST)
        await oraculo.publish("resultados", message)
        assert (await oraculo.ended(run_id))["resultados"] == {"executador_x": nested(DEEPEST)}
