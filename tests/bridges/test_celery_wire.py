"""What is sent to Celery and what is read from it, without a server."""

import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from celery import Celery
from celery.utils.serialization import UnpickleableExceptionWrapper

from oraculo.bridges.celery import reports
from oraculo.bridges.celery.reports import NO_REASON, read_report
from oraculo.bridges.celery.tasks import FAILED, RETURNED, Task, address_of, make_task, read_destination
from oraculo.core.bridge import read_bridge
from oraculo.core.message import Message
from oraculo.errors import InvalidMessage

APP = Celery("test", set_as_current=False)
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


def task_of(message: Message) -> Task:
    return make_task(
        APP,
        message,
        read_destination(message),
        address=address_of(message, "rabbitmq"),
        reply_exchange="respostas",
        default_queue="celery",
    )


def arguments(task: Task) -> tuple[list[Any], dict[str, Any]]:
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
    """The keyword arguments with which Celery sends the callback on."""
    _, _, embed = msgspec.json.decode(task_of(command({})).body)
    signature = embed[kind][0]
    if kind == "errbacks":
        [signature] = signature["kwargs"]["tasks"]
    keywords: dict[str, Any] = signature["kwargs"]
    return keywords


def test_a_value_finds_its_command() -> None:
    body = msgspec.json.encode([[{"soma": 5}], callback_of("callbacks"), {}])
    report = read_report(body, JSON, RETURNED)
    assert report.value == {"soma": 5}
    assert report.reason is None
    told = report.command
    assert (told.correlation_id, told.tarefa, told.tentativa, told.responder_em) == ("r", "t", 2, "resultados.e1")
    assert told.via == "rabbitmq"


def test_version_1_of_the_protocol_is_read_too() -> None:
    """It has the task's name in the body, not in a header."""
    body = msgspec.json.encode({"task": RETURNED, "args": [5], "kwargs": callback_of("callbacks")})
    assert read_report(body, JSON, None).value == 5
    failed = {"task": FAILED, "args": [object(), ValueError("x"), ""], "kwargs": callback_of("errbacks")}
    assert read_report(pickle.dumps(failed), PICKLE, None).reason == "ValueError: x"


@pytest.mark.parametrize("kind", ["Money", "datetime", ["Money"]], ids=str)
def test_a_type_that_only_the_app_knows_stays_the_object_that_it_wrote(kind: object) -> None:
    value = {"preço": {"__type__": kind, "__value__": 5}}
    body = msgspec.json.encode([[value], callback_of("callbacks"), {}])
    assert read_report(body, JSON, RETURNED).value == value


@pytest.mark.parametrize(
    ("error", "reason", "retry"),
    [
        (ValueError("boom"), "ValueError: boom", True),
        (KeyError("a", 1), "KeyError: 'a', 1", True),
        (RuntimeError(), "RuntimeError", True),
        (ValueError(TypeError("inner")), "ValueError: TypeError('inner')", True),
    ],
)
def test_an_exception_is_read_out_of_a_pickle(error: Exception, reason: str, retry: bool) -> None:
    body = pickle.dumps([[object(), error, "Traceback"], callback_of("errbacks"), {}])
    report = read_report(body, PICKLE, FAILED)
    assert (report.reason, report.retry) == (reason, retry)
    assert report.command.tarefa == "t"


class Evil:
    """Unpickled by pickle itself, it would run a command."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    path = tmp_path / "made"
    body = pickle.dumps([[Evil(str(path)), ValueError("x"), "Traceback"], callback_of("errbacks"), {}])
    assert read_report(body, PICKLE, FAILED).reason == "ValueError: x"
    assert not path.exists()
    pickle.loads(body)
    assert path.exists(), "the test is of no use if pickle itself does not run it"


@pytest.mark.parametrize("arguments", [5, None])
def test_an_exception_that_cannot_be_put_in_words_is_a_failure_all_the_same(arguments: Any) -> None:
    error = UnpickleableExceptionWrapper("loja", "Odd", [], "text")
    error.args = ("loja", "Odd", arguments, "text")
    report = read_report(pickle.dumps([[object(), error, ""], callback_of("errbacks"), {}]), PICKLE, FAILED)
    assert report.reason == "UnpickleableExceptionWrapper"
    assert report.command.tarefa == "t"


def test_whatever_the_reading_raises_is_told_as_an_unreadable_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def unforeseen(_: object) -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(reports, "read_address", unforeseen)
    with pytest.raises(InvalidMessage, match="ZeroDivisionError: unforeseen"):
        read_report(msgspec.json.encode([[5], callback_of("callbacks"), {}]), JSON, RETURNED)


def test_an_errback_that_was_sent_on_with_the_id_alone_is_a_failure_without_a_reason() -> None:
    body = msgspec.json.encode([["the-task-id"], callback_of("errbacks"), {}])
    assert read_report(body, JSON, FAILED).reason == NO_REASON


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"- [5]\n- {}\n- {}\n", YAML),
        (b"[[], {}, {}]", YAML),
        (b"W1tdLCB7fSwge31d", JSON),
        (b"no json", JSON),
        (b"[]", JSON),
        (b"[[], {}, {}]", JSON),
        (b"no pickle", PICKLE),
        (b"[[], [], {}]", JSON),
    ],
)
def test_what_is_no_report_is_told(body: bytes, content_type: str) -> None:
    with pytest.raises(InvalidMessage):
        read_report(body, content_type, RETURNED)
