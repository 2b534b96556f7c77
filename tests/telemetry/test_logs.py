import io
import logging
import re
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Literal

import pytest
import structlog

from oraculo.ports.telemetry import (
    AnswerTaken,
    BatchCommitted,
    BrokerChanged,
    CommandsPublished,
    DeadLettered,
    DeliveryAttempted,
    HistoryAdded,
    LoopFailed,
    PublishFailed,
    Record,
    RunFinished,
    RunsPruned,
    StoreBack,
)
from oraculo.settings import LogSettings
from oraculo.telemetry import logs
from oraculo.telemetry.logs import LogSubscriber, configure_logging
from tests.telemetry.stage import configured, lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(record: Record, level: Literal["debug", "info", "warning"] = "debug") -> dict[str, Any] | None:
    stream = configured(level)
    LogSubscriber()(record)
    found = lines(stream)
    assert len(found) <= 1
    return found[0] if found else None


def test_a_json_line_has_the_names_of_ecs_and_an_iso_time() -> None:
    stream = configured()
    structlog.get_logger("somewhere").info("said", correlation_id="c1", number=3)
    (line,) = lines(stream)
    assert datetime.fromisoformat(line.pop("@timestamp")).utcoffset() == timedelta(0)
    assert line == {
        "log.level": "info",
        "message": "said",
        "log.logger": "somewhere",
        "ecs.version": logs.ECS_VERSION,
        "correlation_id": "c1",
        "number": 3,
    }


@pytest.fixture
def sao_paulo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/Sao_Paulo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("sao_paulo")
def test_people_read_local_time_with_its_zone_and_json_has_utc() -> None:
    fields = {"proxima_tentativa_em": "2025-10-14T12:00:01.500Z", "reason": "said at 2025-10-14T12:00:01Z"}
    console = configured(layout="console")
    structlog.get_logger().info("attempt failed", **fields)
    [line] = console.getvalue().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d -03 ", line)
    assert "proxima_tentativa_em='2025-10-14 09:00:01 -03'" in line
    as_json = configured()
    structlog.get_logger().info("attempt failed", **fields)
    [document] = lines(as_json)
    assert document["@timestamp"].endswith("Z")
    assert document["proxima_tentativa_em"] == "2025-10-14T12:00:01.500Z"


@pytest.mark.parametrize("name", ["anything", "uvicorn", "uvicorn.error", "uvicorn.access"])
def test_stdlib_and_uvicorn_speak_the_same_format(name: str) -> None:
    stream = configured()
    logging.getLogger(name).info("%s took %d", "it", 5, extra={"correlation_id": "c2"})
    (line,) = lines(stream)
    assert (line["message"], line["log.logger"], line["correlation_id"]) == ("it took 5", name, "c2")


@pytest.mark.parametrize("name", ["uvicorn", "uvicorn.error", "uvicorn.access"])
def test_uvicorns_own_handlers_go(name: str) -> None:
    logger, own = logging.getLogger(name), io.StringIO()
    logger.addHandler(logging.StreamHandler(own))
    logger.propagate = False
    stream = configured()
    logger.warning("once")
    assert own.getvalue() == ""
    assert len(lines(stream)) == 1


def test_a_bound_correlation_id_reaches_both_kinds_of_logger() -> None:
    stream = configured()
    with structlog.contextvars.bound_contextvars(correlation_id="c3"):
        structlog.get_logger().info("one")
        logging.getLogger("x").info("two")
    assert [line["correlation_id"] for line in lines(stream)] == ["c3", "c3"]


def test_an_exception_is_one_line_with_its_trace() -> None:
    stream = configured()
    try:
        raise ValueError("odd\nvalue")
    except ValueError:
        logging.getLogger("x").exception("failed")
        structlog.get_logger("y").exception("failed")
    for line in lines(stream):
        assert "ValueError: odd\nvalue" in line["error.stack_trace"]
        assert "exc_info" not in line
    assert len(lines(stream)) == 2


def test_a_trace_for_people_does_not_show_what_variables_hold() -> None:
    stream = configured(layout="console")
    senha = "".join(["ab", "racadabra"])
    try:
        raise ValueError(len(senha))
    except ValueError:
        structlog.get_logger("y").exception("failed")
    assert "ValueError: 11" in stream.getvalue()
    assert "abracadabra" not in stream.getvalue()


@pytest.mark.parametrize("layout", ["json", "console"])
def test_of_an_error_that_carries_megabytes_the_middle_is_left_out(layout: Literal["json", "console"]) -> None:
    stream = configured(layout=layout)
    try:
        raise ValueError("first " + "x" * 5_000_000 + " last")
    except ValueError:
        structlog.get_logger("somewhere").exception("failed", reason="y" * 5_000_000)
    written = stream.getvalue()
    assert len(written) < 3 * logs._LONGEST
    assert "in test_of_an_error_that_carries_megabytes" in written
    assert "ValueError: first x" in written
    assert "x last" in written
    assert "characters…" in written or "characters\\u2026" in written


def test_what_cannot_be_json_is_still_logged() -> None:
    stream = configured()
    structlog.get_logger("x").info("odd", value=object(), text="\ud800 não")
    assert lines(stream)[0]["message"] == "odd"


def test_below_the_level_nothing_is_logged() -> None:
    stream = configured("warning")
    structlog.get_logger("x").info("no")
    logging.getLogger("x").info("no")
    logging.getLogger("x").warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def test_chatty_libraries_are_kept_down() -> None:
    stream = configured("info")
    logging.getLogger("httpx").info("HTTP Request: POST …")
    assert stream.getvalue() == ""


def test_configured_twice_a_line_appears_once() -> None:
    first = configured()
    second = configured()
    logging.getLogger("x").warning("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


def test_auto_is_console_on_a_terminal_and_json_elsewhere() -> None:
    terminal = Terminal()
    configure_logging(LogSettings(), terminal)
    logging.getLogger("x").warning("for people")
    assert "for people" in terminal.getvalue()
    assert "{" not in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()
    stream = configured(layout="auto")
    logging.getLogger("x").warning("for machines")
    assert lines(stream)[0]["message"] == "for machines"


def test_console_in_a_file_has_no_colours() -> None:
    stream = configured(layout="console")
    logging.getLogger("x").warning("plain")
    assert "plain" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


@pytest.mark.parametrize(
    ("record", "level"),
    [
        (BatchCommitted(1, 1, 1, 0, 0.1), "debug"),
        (RunFinished("c", "p", "concluida", 1, 3, 0.1), "info"),
        (AnswerTaken("c", "applied", "resultado_coleta"), "debug"),
        (AnswerTaken("c", "duplicate", "resultado_coleta"), "debug"),
        (AnswerTaken("c", "late", "resultado_coleta"), "info"),
        (AnswerTaken("c", "unknown", "resultado_coleta"), "warning"),
        (CommandsPublished(1, 0.1), "debug"),
        (PublishFailed(1, "refused"), "warning"),
        (DeadLettered("q", "not JSON"), "warning"),
        (DeliveryAttempted("c", "webhook", "delivered"), "info"),
        (DeliveryAttempted("c", "webhook", "failed", "503"), "warning"),
        (DeliveryAttempted("c", "webhook", "given_up", "503"), "error"),
        (LoopFailed("timers", "boom"), "error"),
        (RunsPruned(3), "info"),
        (BrokerChanged("rabbitmq", "refused"), "error"),
        (BrokerChanged("rabbitmq", None), "warning"),
        (StoreBack("postgres"), "warning"),
    ],
)
def test_each_record_is_logged_at_its_level(record: Record, level: str) -> None:
    line = logged(record)
    assert line is not None
    assert line["log.level"] == level


def test_every_kind_of_record_has_words() -> None:
    assert set(logs._LINES) == set(Record.__subclasses__()) - {HistoryAdded}


def test_a_records_run_is_its_correlation_id_and_what_is_none_is_left_out() -> None:
    line = logged(DeadLettered("q", "no such task", "c9", "t", 2))
    assert line is not None
    assert (line["correlation_id"], line["fila"], line["reason"]) == ("c9", "q", "no such task")
    assert (line["tarefa"], line["tentativa"]) == ("t", 2)
    assert "run_id" not in line
    nobody = logged(DeadLettered("q", "not JSON"))
    assert nobody is not None
    assert "correlation_id" not in nobody


def test_a_broker_that_was_lost_and_one_that_is_back_are_logged_in_words_of_their_own() -> None:
    lost, back = logged(BrokerChanged("rabbitmq", "refused")), logged(BrokerChanged("rabbitmq", None))
    assert lost is not None
    assert back is not None
    assert (lost["message"], lost["trouble"]) == ("a broker was lost", "refused")
    assert back["message"] == "a broker is back"


def test_what_fails_every_moment_is_logged_once_a_minute_with_how_often_it_did() -> None:
    stream, now = configured(), 0.0
    subscriber = LogSubscriber(lambda: now)
    for second in range(61):
        now = float(second)
        for queue in ("resultados", "orquestrador"):
            subscriber(LoopFailed(f"consume {queue}", "refused"))
        subscriber(PublishFailed(second + 1, "refused"))
        if second == 30:
            subscriber(LoopFailed("consume resultados", "no such user"))
    found = [(line.get("duty", line["message"]), line["reason"], line.get("times")) for line in lines(stream)]
    each = ("consume resultados", "consume orquestrador", "publish failed")
    assert found == [
        *((name, "refused", None) for name in each),
        ("consume resultados", "no such user", None),
        *((name, "refused", 60) for name in each),
    ]


def test_replies_that_fail_for_the_same_reason_are_logged_once_a_minute_with_how_often_they_did() -> None:
    stream, now = configured(), 0.0
    subscriber = LogSubscriber(lambda: now)
    for second in range(61):
        now = float(second)
        subscriber(DeliveryAttempted(f"run-{second}", "fila", "failed", "refused"))
    found = [(line["correlation_id"], line["reason"], line.get("times")) for line in lines(stream)]
    assert found == [("run-0", "refused", None), ("run-60", "refused", 60)]


@pytest.mark.parametrize(("channel", "outcome"), [("webhook", "failed"), ("fila", "given_up"), ("fila", "delivered")])
def test_webhooks_that_fail_and_deliveries_that_ended_are_each_logged(channel: str, outcome: str) -> None:
    stream, subscriber = configured(), LogSubscriber()
    for _ in range(2):
        subscriber(DeliveryAttempted("c", channel, outcome, "refused"))
    assert len(lines(stream)) == 2


def test_records_that_are_no_failures_are_each_logged() -> None:
    stream, subscriber = configured(), LogSubscriber()
    for _ in range(2):
        subscriber(DeadLettered("q", "not JSON"))
    assert len(lines(stream)) == 2


def test_a_silenced_record_is_not_logged() -> None:
    assert logged(BatchCommitted(1, 1, 1, 0, 0.1), level="info") is None
    assert logged(RunFinished("c", "p", "concluida", 1, 3, 0.1), level="warning") is None


def test_a_silenced_record_costs_no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    configured("warning")
    monkeypatch.setattr(logs, "_fields", lambda _record: pytest.fail("rendered in vain"))
    LogSubscriber()(RunFinished("c", "p", "concluida", 1, 3, 0.1))
