"""What comes back for a command: wrapped values, failures, and the fields that are echoed."""

import asyncio
import contextvars
import math
import threading
import types
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict

import msgspec
import pytest
import structlog

from oraculo.wire.timestamps import from_iso, to_iso
from oraculo.worker import Answer, App, Context, DoNotRetry

from .stage import NOW, FixedClock, Stage


async def test_a_collector_answers_with_dados(stage: Stage) -> None:
    app = App("a")

    @app.escavador("youtube")
    async def collect(payload: dict[str, Any]) -> list[str]:
        return [payload["termo"]]

    answer = await stage.payload_for(app, "escavador_youtube", {"termo": "gatos"}, tipo_evento="iniciar_coleta")
    assert answer == {"status": "ok", "dados": ["gatos"]}


@pytest.mark.parametrize("queue", ["executador_relatorio", "images-queue"])
async def test_every_other_queue_answers_with_resultado(stage: Stage, queue: str) -> None:
    app = App("a")
    app.queue(queue)(lambda payload: 7)
    assert await stage.payload_for(app, queue) == {"status": "ok", "resultado": 7}


@pytest.mark.parametrize("event", ["iniciar_coleta", "iniciar_execucao"])
async def test_a_handler_receives_both_kinds_of_command(stage: Stage, event: str) -> None:
    app = App("a")
    app.queue("q")(lambda payload: 1)
    assert (await stage.payload_for(app, "q", tipo_evento=event))["status"] == "ok"


@pytest.mark.parametrize(
    ("queue", "event"), [("escavador_x", "resultado_coleta"), ("executador_x", "resultado_execucao")]
)
async def test_the_envelope_echoes_the_command(stage: Stage, queue: str, event: str) -> None:
    app = App("a")
    app.queue(queue)(lambda payload: 1)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with stage.worker(app, clock=FixedClock()):
        await stage.send(queue, correlation_id="c", tarefa="t", tentativa=3, traceparent=trace, responder_em="mine")
        answer = await stage.answer("mine")
    assert (answer.correlation_id, answer.tipo_evento) == ("c", event)
    assert (answer.tarefa, answer.tentativa, answer.traceparent) == ("t", 3, trace)
    assert from_iso(answer.timestamp) == NOW


async def test_a_prefix_is_put_before_the_queues(stage: Stage) -> None:
    app = App("a")
    app.escavador("x")(lambda payload: 1)
    async with stage.worker(app, prefix="lab."):
        await stage.send("escavador_x", prefix="lab.")
        answer = await stage.answer("lab.resultados")
    assert answer.tipo_evento == "resultado_coleta"


async def test_an_answer_is_sent_as_it_is(stage: Stage) -> None:
    app = App("a")
    app.executador("x")(lambda payload: Answer({"resultado": "ok", "arquivo": "relatorio.pdf"}))
    assert await stage.payload_for(app, "executador_x") == {"resultado": "ok", "arquivo": "relatorio.pdf"}


@pytest.mark.parametrize(
    "payload",
    [
        {"status": "erro", "erros": ["sem estoque"]},
        {"status": "FAILED", "erros": ["sem estoque"], "repetir": False},
        {"erros": ["sem estoque"]},
        {"status": "ok", "dados": [1]},
        {"status": "OK", "arquivo": "relatorio.pdf"},
    ],
)
async def test_a_mapping_that_reads_as_a_result_payload_is_sent_as_it_is(stage: Stage, payload: dict[str, Any]) -> None:
    app = App("a")
    app.executador("x")(lambda _: types.MappingProxyType(payload))
    assert await stage.payload_for(app, "executador_x") == payload


@pytest.mark.parametrize(
    "value", [{}, {"status": "enviado"}, {"status": 200}, {"erros": []}, {"status": "enviado", "erros": ["x"]}]
)
async def test_any_other_mapping_is_the_result(stage: Stage, value: dict[str, Any]) -> None:
    app = App("a")
    app.executador("x")(lambda _: value)
    assert await stage.payload_for(app, "executador_x") == {"status": "ok", "resultado": value}


async def test_a_failure_that_a_handler_returns_is_logged(stage: Stage) -> None:
    app = App("a")
    app.executador("x")(lambda _: {"status": "erro", "erros": ["sem estoque", {"codigo": 7}]})
    with structlog.testing.capture_logs() as lines:
        await stage.payload_for(app, "executador_x", tarefa="t")
    (line,) = [line for line in lines if line["event"] == "handler failed"]
    assert (line["tarefa"], line["reason"]) == ("t", 'sem estoque; {"codigo":7}')


class Cyclic:
    """No JSON, and says so in its own way."""


HTML = msgspec.Raw(b"<html>502 Bad Gateway</html>")


@pytest.mark.parametrize(
    "value",
    [
        Cyclic(),
        {"deep": "\0"},
        "\ud800",
        Answer([1]),  # type: ignore[arg-type]
        HTML,
        {"deep": [HTML]},
        msgspec.Raw(b""),
        msgspec.Raw(b"1}"),
        Answer({"resultado": HTML}),
    ],
)
async def test_what_cannot_be_sent_is_an_error_that_is_not_retried(stage: Stage, value: object) -> None:
    app = App("a")
    app.queue("q")(lambda payload: value)
    answer = await stage.payload_for(app, "q")
    assert answer["status"] == "erro"
    assert answer["repetir"] is False
    assert "the handler's answer cannot be sent" in answer["erros"][0]


async def test_what_is_json_already_is_sent_to_the_byte(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: msgspec.Raw(b'{"a": 1.50}'))
    async with stage.worker(app):
        await stage.send("q")
        assert bytes((await stage.answer()).payload) == b'{"status":"ok","resultado":{"a": 1.50}}'


async def test_an_endless_value_is_an_error(stage: Stage) -> None:
    app = App("a")
    knot: list[Any] = []
    knot.append(knot)
    app.queue("q")(lambda payload: knot)
    assert (await stage.payload_for(app, "q"))["repetir"] is False


async def test_json_like_values_are_encoded(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: {"at": datetime(2025, 1, 2, tzinfo=UTC), "set": {1}, "nan": math.nan})
    assert (await stage.payload_for(app, "q"))["resultado"] == {"at": "2025-01-02T00:00:00Z", "set": [1], "nan": None}


async def test_an_exception_becomes_an_error_that_may_be_retried(stage: Stage) -> None:
    app = App("a")

    @app.queue("q")
    async def fail(payload: Any) -> None:
        raise ValueError("no such video")

    with structlog.testing.capture_logs() as logs:
        answer = await stage.payload_for(app, "q", correlation_id="c", tarefa="t", tentativa=2)
    trace = answer.pop("rastreamento")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith('    raise ValueError("no such video")\nValueError: no such video\n')
    assert answer == {"status": "erro", "erros": ["ValueError: no such video"]}
    (entry,) = [log for log in logs if log["event"] == "handler failed"]
    assert isinstance(entry["exc_info"], ValueError)
    assert entry["exc_info"].__traceback__ is not None
    assert (entry["correlation_id"], entry["tarefa"], entry["tentativa"]) == ("c", "t", 2)


async def test_do_not_retry_says_so(stage: Stage) -> None:
    app = App("a")

    @app.queue("q")
    def fail(payload: Any) -> None:
        raise DoNotRetry("the video was deleted")

    answer = await stage.payload_for(app, "q")
    assert answer == {"status": "erro", "erros": ["DoNotRetry: the video was deleted"], "repetir": False}


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class PanicException(BaseException):
    """As a library written in Rust raises it."""


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError(), "KeyError"),
        (Unprintable(), "Unprintable: (its text cannot be shown)"),
        (ValueError("a\0b\ud800"), "ValueError: a\ufffdb?"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
        (PanicException("index out of bounds"), "PanicException: index out of bounds"),
        (GeneratorExit(), "GeneratorExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (BaseExceptionGroup("one", [KeyboardInterrupt()]), "KeyboardInterrupt"),
        (
            ExceptionGroup("three", [ExceptionGroup("two", [KeyError(1), OSError()]), OSError()]),
            "KeyError: 1 (and 2 more)",
        ),
        (ExceptionGroup("two", [KeyError(1), DoNotRetry("no such video")]), "DoNotRetry: no such video (and 1 more)"),
    ],
)
async def test_odd_exceptions_are_answered_too(stage: Stage, error: BaseException, text: str, is_async: bool) -> None:
    app = App("a")

    def fail(payload: Any) -> None:
        raise error

    async def fail_async(payload: Any) -> None:
        fail(payload)

    app.queue("q")(fail_async if is_async else fail)
    assert (await stage.payload_for(app, "q"))["erros"] == [text]
    assert await stage.left("q") == (0, 0, 0)


async def test_what_fails_in_a_task_group_is_the_answers_reason(stage: Stage) -> None:
    async def collect(payload: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())

    async def refuse() -> None:
        raise DoNotRetry("no such channel")

    app = App("a")
    app.queue("q")(collect)
    answer = await stage.payload_for(app, "q")
    assert answer["erros"] == ["DoNotRetry: no such channel"]
    assert answer["repetir"] is False


async def test_a_stop_iteration_is_answered_too(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: next(iter(())))
    assert (await stage.payload_for(app, "q"))["erros"] == ["RuntimeError: the handler raised StopIteration"]


@dataclass
class Careless:
    name: str

    def __post_init__(self) -> None:
        raise LookupError(self.name)


async def test_what_the_type_of_a_payload_raises_is_answered_too(stage: Stage) -> None:
    def work(payload: Careless) -> None: ...

    app = App("a")
    app.queue("q")(work)
    assert (await stage.payload_for(app, "q", {"name": "x"}))["erros"] == ["LookupError: x"]


async def test_a_plain_handler_runs_in_a_thread_with_the_context_variables(stage: Stage) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("seen")
    app = App("a")
    app.queue("q")(lambda payload: [threading.current_thread() is threading.main_thread(), variable.get()])
    assert (await stage.payload_for(app, "q"))["resultado"] == [False, "seen"]


async def test_a_plain_function_that_returns_a_coroutine_is_awaited(stage: Stage) -> None:
    async def inner() -> str:
        return "awaited"

    app = App("a")
    app.queue("q")(lambda payload: inner())
    assert (await stage.payload_for(app, "q"))["resultado"] == "awaited"


class Video(msgspec.Struct):
    seconds: int
    title: str = "untitled"


@dataclass
class Frame:
    width: int


class Cut(TypedDict):
    start: float


def takes_struct(payload: Video) -> str:
    return f"{payload.title} {payload.seconds}"


def takes_dataclass(payload: Frame) -> int:
    return payload.width


def takes_typed_dict(payload: Cut) -> float:
    return payload["start"]


def takes_dict(payload: dict[str, Any]) -> dict[str, Any]:
    return payload


def takes_anything(payload: Any) -> Any:
    return payload


@pytest.mark.parametrize(
    ("function", "payload", "result"),
    [
        (takes_struct, {"seconds": 3, "unknown": 1}, "untitled 3"),
        (takes_dataclass, {"width": 640}, 640),
        (takes_typed_dict, {"start": 1.5}, 1.5),
        (takes_dict, {"a": {"b": [1]}}, {"a": {"b": [1]}}),
        (takes_anything, {"a": "ção"}, {"a": "ção"}),
    ],
)
async def test_the_payload_is_read_as_annotated(stage: Stage, function: Any, payload: object, result: object) -> None:
    app = App("a")
    app.queue("q")(function)
    assert (await stage.payload_for(app, "q", payload))["resultado"] == result


@pytest.mark.parametrize(
    ("function", "payload", "reason"),
    [
        (takes_struct, {}, "payload.seconds: is required"),
        (takes_struct, {"seconds": "x"}, "payload.seconds: expected `int`, got `str`"),
        (takes_dataclass, {"width": None}, "payload.width: expected `int`, got `null`"),
        (takes_typed_dict, {}, "payload.start: is required"),
    ],
)
async def test_a_payload_that_does_not_fit_is_not_retried(
    stage: Stage, function: Any, payload: object, reason: str
) -> None:
    app = App("a")
    app.queue("q")(function)
    assert await stage.payload_for(app, "q", payload) == {"status": "erro", "erros": [reason], "repetir": False}


async def test_a_command_past_its_deadline_is_not_run(stage: Stage) -> None:
    app, runs = App("a"), []
    app.queue("q")(lambda payload: runs.append(1))
    async with stage.worker(app, clock=FixedClock()):
        await stage.send("q", prazo=to_iso(NOW))
        late = await stage.payload()
        await stage.send("q", prazo=to_iso(NOW + 1))
        in_time = await stage.payload()
    assert late == {"status": "erro", "erros": ["deadline passed before it was started"], "repetir": False}
    assert in_time["status"] == "ok"
    assert runs == [1]


async def test_the_context_knows_its_command(stage: Stage) -> None:
    app, seen = App("a"), []

    @app.queue("q")
    async def look(payload: Any, ctx: Context) -> None:
        seen.append(ctx)
        ctx.log.warning("hello")

    clock = FixedClock()
    with structlog.testing.capture_logs() as logs:
        async with stage.worker(app, clock=clock):
            await stage.send("q", correlation_id="c", tarefa="t", tentativa=2, traceparent="tp", prazo=to_iso(NOW + 30))
            await stage.answer()
    (ctx,) = seen
    assert (ctx.correlation_id, ctx.tarefa, ctx.tentativa, ctx.queue, ctx.traceparent) == ("c", "t", 2, "q", "tp")
    assert ctx.deadline == datetime.fromtimestamp(NOW + 30, UTC)
    assert ctx.remaining() == 30
    clock.time += 31
    assert ctx.remaining() == 0
    (line,) = [log for log in logs if log["event"] == "hello"]
    assert (line["correlation_id"], line["tarefa"], line["tentativa"]) == ("c", "t", 2)


def test_a_context_can_be_made_to_call_a_handler_by_hand() -> None:
    ctx = Context(correlation_id="c", queue="q")
    ctx.progress(50, "half")
    assert (ctx.deadline, ctx.remaining()) == (None, None)
