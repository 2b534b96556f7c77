"""Tasks as they are sent to Celery, and replies and events as they come from it, without a server."""

import os
import pickle
from typing import Any

import msgspec
import pytest
from kombu.utils.encoding import safe_repr

from oraculo.bridges.celery.replies import NO_REASON, read_reply, reason_in
from oraculo.bridges.celery.tasks import FAILED, RETURNED, CeleryTask, address_of, make_task, read_destination
from oraculo.errors import InvalidMessage
from oraculo.pipeline.bridges import read_bridge
from oraculo.wire.message import Message

JSON, PICKLE, YAML = "application/json", "application/x-python-serialize", "application/x-yaml"


def command(payload: Any, url: str = "celery://loja.somar", block: dict[str, Any] | None = None) -> Message:
    return Message(
        correlation_id="r",
        tipo_evento="iniciar_execucao",
        payload=msgspec.Raw(msgspec.json.encode(payload)),
        timestamp="2026-01-01T00:00:00Z",
        tarefa="t",
        tentativa=2,
        responder_em="resultados.e1",
        prazo="2026-01-01T00:01:00Z",
        ponte={**msgspec.to_builtins(read_bridge(url)), **(block or {})},
    )


def task_of(message: Message) -> CeleryTask:
    return make_task(
        message,
        read_destination(message),
        address=address_of(message, "rabbitmq"),
        reply_exchange="respostas",
        default_queue="celery",
    )


def arguments(task: CeleryTask) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs, _ = msgspec.json.decode(task.body)
    return args, kwargs


def test_a_steps_config_is_the_keyword_arguments() -> None:
    payload = {"config": {"a": 1}, "entrada": {"b": 2}, "resultados": {"x": {}}}
    assert arguments(task_of(command(payload))) == ([], {"a": 1})
    assert arguments(task_of(command(payload, "celery://loja.somar?send=payload"))) == ([payload], {})


@pytest.mark.parametrize("config", [None, [1], "x", 5, True])
def test_a_config_that_is_no_object_leaves_the_payload_as_the_keyword_arguments(config: Any) -> None:
    payload = {"config": config, "entrada": {"b": 2}, "resultados": {}}
    assert arguments(task_of(command(payload))) == ([], payload)


def test_a_payload_that_only_has_a_field_called_config_is_no_steps() -> None:
    payload = {"config": {"a": 1}, "outro": 2}
    assert arguments(task_of(command(payload))) == ([], payload)


@pytest.mark.parametrize("block", [{"args": {"a": 1}}, {"kwargs": [1]}, {"fila": 5}])
def test_an_odd_block_is_refused(block: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage, match="ponte"):
        task_of(command({}, block=block))


def test_the_blocks_arguments_are_over_those_of_the_payload() -> None:
    message = command({"a": 1, "b": 1}, block={"args": [7], "kwargs": {"b": 2}})
    assert arguments(task_of(message)) == ([7], {"a": 1, "b": 2})


def test_json_that_python_cannot_hold_is_handed_on_as_it_came() -> None:
    message = command({})
    message.payload = msgspec.Raw(b'{"n": 1e999}')
    assert b'"n":1e999' in task_of(message).body.replace(b" ", b"")


def test_the_queue_is_the_destinations_or_the_default() -> None:
    assert task_of(command({})).queue == "celery"
    assert task_of(command({}, "celery://loja.somar?queue=alta")).queue == "alta"


def test_a_repeat_has_the_same_id_and_another_attempt_another() -> None:
    again, other = command({}), command({})
    other.tentativa = 3
    assert task_of(command({})).id == task_of(again).id
    assert task_of(command({})).id != task_of(other).id


def test_celerys_worker_leaves_what_begins_after_the_deadline() -> None:
    assert task_of(command({})).headers["expires"] == "2026-01-01T00:01:00+00:00"


@pytest.mark.parametrize("wrong", [None, {"tipo": "bullmq", "alvo": "x"}, {"tipo": "celery"}])
def test_a_command_without_a_task_is_refused(wrong: Any) -> None:
    message = command({})
    message.ponte = wrong
    with pytest.raises(InvalidMessage, match="ponte"):
        read_destination(message)


def callback_of(kind: str) -> dict[str, Any]:
    """Return the keyword arguments with which Celery sends the callback on."""
    _, _, embed = msgspec.json.decode(task_of(command({})).body)
    signature = embed[kind][0]
    keywords: dict[str, Any] = signature["kwargs"]
    return keywords


def test_a_value_finds_its_command() -> None:
    body = msgspec.json.encode([[{"soma": 5}], callback_of("callbacks"), {}])
    outcome = read_reply(body, JSON, RETURNED)
    assert outcome.value == {"soma": 5}
    assert outcome.reason is None
    found = outcome.command
    assert (found.correlation_id, found.tarefa, found.tentativa, found.responder_em) == ("r", "t", 2, "resultados.e1")
    assert found.via == "rabbitmq"


@pytest.mark.parametrize("kind", ["Money", "datetime", ["Money"]], ids=str)
def test_a_type_that_only_the_app_knows_stays_the_object_that_it_wrote(kind: object) -> None:
    value = {"preço": {"__type__": kind, "__value__": 5}}
    body = msgspec.json.encode([[value], callback_of("callbacks"), {}])
    assert read_reply(body, JSON, RETURNED).value == value


class Odd(Exception):
    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("não há estoque"), ("ValueError", "não há estoque")),
        (ValueError('it\'s "quoted"\nand long'), ("ValueError", 'it\'s "quoted"\nand long')),
        (KeyError("a", 1), ("KeyError", "'a', 1")),
        (RuntimeError(), ("RuntimeError", "")),
        (ValueError(TypeError("inner")), ("ValueError", "TypeError('inner')")),
        (ValueError("x" * 20_000), ("ValueError", "'" + "x" * 1999)),
        (Odd(), ("", "<odd>")),
    ],
)
def test_an_event_names_the_exception(error: Exception, reason: tuple[str, str]) -> None:
    assert reason_in({"exception": safe_repr(error)}) == reason


def test_an_event_of_the_pools_own_exceptions_names_them_in_the_traceback() -> None:
    traceback = "Traceback (most recent call last):\n  …\nbilliard.exceptions.WorkerLostError: exitcode 9: job 3.\n"
    event = {"exception": "ExceptionWithTraceback()", "traceback": traceback}
    assert reason_in(event) == ("WorkerLostError", "exitcode 9: job 3.")


@pytest.mark.parametrize("exception", ["ValueError('a' + x)", "V('" + "(" * 500 + ")", "V('\0')", 5, None])
def test_an_event_that_cannot_be_parsed_is_shown_as_it_is(exception: object) -> None:
    kind, text = reason_in({"exception": exception})
    assert f"{kind}{text}" == str(exception or "").replace("(", "", 1).removesuffix(")")


class Evil:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/nowhere/at/all",)


@pytest.mark.parametrize(
    "body",
    [
        b"Nr\xff\xff\xff\x01.",  # would take 512 MB
        pickle.dumps([["the-task-id"], {"comando": {}}, {}]),
        pickle.dumps(Evil()),
        b"no pickle",
    ],
)
def test_no_pickle_is_read(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("a pickle was read")

    for name in ("Unpickler", "load", "loads"):
        monkeypatch.setattr(pickle, name, unexpected)
    with pytest.raises(InvalidMessage, match="is pickle, which ORÁCULO does not read"):
        read_reply(body, PICKLE, FAILED)


def test_a_failure_finds_its_command_and_names_the_task_that_failed() -> None:
    body = msgspec.json.encode([["the-task-id"], callback_of("errbacks"), {}])
    outcome = read_reply(body, JSON, FAILED)
    assert (outcome.command.tarefa, outcome.failed_id, outcome.reason) == ("t", "the-task-id", NO_REASON)


def test_celery_is_asked_for_json_whatever_the_apps_own_serializers_are() -> None:
    _, _, embed = msgspec.json.decode(task_of(command({})).body)
    assert [embed[kind][0]["options"]["serializer"] for kind in ("callbacks", "errbacks")] == ["json", "json"]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"- [5]\n- {}\n- {}\n", YAML),
        (b"[[], {}, {}]", YAML),
        (b"W1tdLCB7fSwge31d", JSON),
        (b"no json", JSON),
        (b"[]", JSON),
        (b"[[], {}, {}]", JSON),
        (b"[[], [], {}]", JSON),
    ],
)
def test_what_is_no_reply_of_ours_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(InvalidMessage):
        read_reply(body, content_type, RETURNED)
