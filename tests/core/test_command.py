"""The command that a task sends."""

import json
from typing import Any

from oraculo.core.command import Written, encode_command
from oraculo.wire.message import decode_message

from .building import RUN_ID, Driver, fan_out, flow, pipeline, run_of

NOW = "2025-10-14T12:00:00.000Z"


def command(driver: Driver, name: str) -> dict[str, Any]:
    body = encode_command(driver.run, driver.task(name), NOW, "resultados")
    decode_message(body)
    parsed: dict[str, Any] = json.loads(body)
    return parsed


def test_the_whole_command_of_a_collector() -> None:
    driver = fan_out("escavador_youtube", payload={"fonte": "x", "n": [1]}, timeout=30)
    assert command(driver, "escavador_youtube") == {
        "correlation_id": RUN_ID,
        "tipo_evento": "iniciar_coleta",
        "payload": {"fonte": "x", "n": [1]},
        "timestamp": NOW,
        "tarefa": "escavador_youtube",
        "tentativa": 1,
        "responder_em": "resultados",
        "prazo": "2025-10-14T12:00:30.000Z",
    }


def test_every_other_destination_is_asked_to_execute() -> None:
    assert command(fan_out("executador_relatorio"), "executador_relatorio")["tipo_evento"] == "iniciar_execucao"
    assert command(fan_out("qualquer"), "qualquer")["tipo_evento"] == "iniciar_execucao"


def test_a_destination_gets_the_requests_payload_to_the_byte_or_its_own() -> None:
    driver = fan_out("a", {"fila": "b", "payload": {"own": 1}}, payload={"n": 1})
    driver.run.payload = b'{ "n": 1.10 }'
    assert b'{ "n": 1.10 }' in encode_command(driver.run, driver.task("a"), NOW, "resultados")
    assert command(driver, "b")["payload"] == {"own": 1}
    assert command(fan_out("a"), "a")["payload"] == {}


def test_the_deadline_is_the_tasks_own_when_it_comes_first() -> None:
    driver = fan_out({"fila": "a", "timeout": 5}, {"fila": "b", "timeout": 50}, timeout=30)
    assert command(driver, "a")["prazo"] == "2025-10-14T12:00:05.000Z"
    assert command(driver, "b")["prazo"] == "2025-10-14T12:00:30.000Z"


def test_a_resent_command_is_the_same_and_a_retry_has_the_next_attempt() -> None:
    driver = flow({"type": "a", "retry": {"backoff": 0}})
    first = command(driver, "a")
    assert command(driver.sent(), "a") == first
    driver.fail("a")
    driver.due("a")
    assert command(driver, "a") == first | {"tentativa": 2}


def test_the_trace_goes_along() -> None:
    driver = fan_out("a")
    driver.head.traceparent = "00-x"
    assert command(driver, "a")["traceparent"] == "00-x"


def test_a_step_gets_its_config_the_entry_and_the_results_before_it() -> None:
    driver = flow({"type": "a", "config": {"z": 1, "b": 2}}, "b", "c<a,b", request={"payload": {"produto": "x"}})
    assert command(driver, "a")["payload"] == {
        "config": {"z": 1, "b": 2},
        "entrada": {"produto": "x"},
        "resultados": {},
    }
    driver.ok("a", b'{"n": 1.10}')
    driver.ok("b", b'{"resultado": "ok"}')
    assert command(driver, "c")["payload"] == {
        "config": {},
        "entrada": {"produto": "x"},
        "resultados": {"a": {"n": 1.1}, "b": {"resultado": "ok"}},
    }
    assert b'"a":{"n": 1.10}' in encode_command(driver.run, driver.task("c"), NOW, "resultados")


def test_commands_that_are_sent_together_share_what_they_hand_on_and_are_the_same() -> None:
    driver = flow("a", "b", "c<a,b", "d<a,b", "e<b")
    driver.ok("a", b'{"n": 1.10}')
    driver.ok("b", b'{"n": 2}')
    written = Written()
    for name in ("c", "d", "e"):
        alone = encode_command(driver.run, driver.task(name), NOW, "resultados")
        assert encode_command(driver.run, driver.task(name), NOW, "resultados", written=written) == alone
    assert sorted(written) == [(0, 1), (1,)]


def collector(entry: Any, config: dict[str, Any] | None = None) -> dict[str, Any]:
    step = {"type": "escavador_youtube", "config": config}
    payload: dict[str, Any] = command(flow(step, request={"payload": entry}), "escavador_youtube")["payload"]
    return payload


def test_a_collectors_step_has_the_seeds_words_too() -> None:
    payload = collector({"parametros": {"canal": "c", "periodo": "2025-10"}}, {"periodo": "2025-11", "max": 3})
    assert payload["fonte"] == "youtube"
    assert payload["parametros"] == {"canal": "c", "periodo": "2025-11", "max": 3}
    assert (payload["config"], payload["resultados"]) == ({"periodo": "2025-11", "max": 3}, {})


def test_parameters_that_are_no_object_are_left_out() -> None:
    for entry in ({}, {"parametros": None}, {"parametros": [1]}, {"parametros": "x"}):
        assert collector(entry)["parametros"] == {}
    assert collector({"parametros": [1]}, {"a": 1})["parametros"] == {"a": 1}


def test_other_steps_have_no_parameters() -> None:
    assert set(command(flow("VIRAL_COPY"), "VIRAL_COPY")["payload"]) == {"config", "entrada", "resultados"}


def test_a_parameter_that_python_cannot_hold_is_handed_on() -> None:
    definition = pipeline("escavador_a")
    run = run_of({"pipeline": "p"}, definition)
    run.payload = b'{"parametros": {"x": 1e999, "y": ' + b"9" * 5000 + b"}}"
    driver = Driver(run)
    body = encode_command(driver.run, driver.task("escavador_a"), NOW, "resultados")
    assert body.count(b"1e999") == 2
