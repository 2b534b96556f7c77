"""A log that fails costs its own line, and never an answer."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.typing import WrappedLogger

from oraculo.errors import BrokerUnavailable
from oraculo.worker import App, DoNotRetry, logs
from oraculo.worker.answers import describe
from oraculo.worker.logs import FailureLog, WorkerLog

from .stage import Stage


@pytest.fixture(autouse=True)
def _failing_log() -> Iterator[None]:
    def fail(logger: WrappedLogger, method: str, event: Any) -> str:
        raise UnicodeEncodeError("charmap", "☕", 0, 1, "character maps to <undefined>")

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[fail])
    yield
    structlog.configure(processors=before)


async def test_a_failure_is_answered_and_its_line_goes_to_stderr(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    app = App("a")

    @app.queue("q")
    def fail(payload: Any) -> None:
        raise ValueError("café ☕")

    assert (await stage.payload_for(app, "q", correlation_id="c"))["erros"] == ["ValueError: café ☕"]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "handler failed" in line]
    assert "'correlation_id': 'c'" in line
    assert "caf\\xe9 \\u2615" in line
    assert "character maps to <undefined>" in line


async def test_a_broker_that_fails_meanwhile_stops_nothing(stage: Stage) -> None:
    app = App("a")
    app.queue("q")(lambda payload: 1)
    for call in ("consume", "publish", "ack"):
        stage.broker.fail(call, BrokerUnavailable("away"))
    await stage.send("q")
    async with stage.worker(app):
        assert (await stage.payload())["resultado"] == 1
        assert (await stage.payload())["resultado"] == 1  # it could not be acked, and came again
    assert await stage.left("q") == (0, 0, 0)


async def test_where_nobody_set_up_the_log_a_trace_shows_no_variables(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    structlog.reset_defaults()
    app = App("a")

    @app.queue("q")
    def fail(payload: Any) -> None:
        senha = "".join(["ab", "racadabra"])
        raise ValueError(len(senha))

    await stage.payload_for(app, "q")
    told = capsys.readouterr().out
    assert "ValueError: 11" in told
    assert "abracadabra" not in told


class Failing:
    """A handler's failures as a log tells them, at moments of our own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log = FailureLog()
        self._now = 0.0
        monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: self._now))

    def told(self, raising: Callable[[], None], after: float = 0.0) -> dict[str, Any]:
        self._now += after
        try:
            raising()
        except (ValueError, DoNotRetry, ExceptionGroup) as error:
            with structlog.testing.capture_logs() as lines:
                on_purpose = isinstance(error, DoNotRetry)
                self._log.log(WorkerLog(tarefa="t"), "h", error, describe(error), on_purpose=on_purpose)
        (line,) = lines
        assert (line["event"], line["log_level"], line["tarefa"]) == ("handler failed", "error", "t")
        return dict(line)


def refuse_one() -> None:
    raise ValueError("one")


def refuse_another() -> None:
    raise ValueError("another")


def refuse_for_good() -> None:
    raise DoNotRetry("no such video")


def test_the_trace_of_the_same_failure_is_written_once_a_minute_and_the_others_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = Failing(monkeypatch)
    first = failing.told(refuse_one)
    assert isinstance(first["exc_info"], ValueError)
    assert "times" not in first
    for _ in range(3):
        again = failing.told(refuse_one, after=15)
        assert "exc_info" not in again
        assert again["reason"] == "ValueError: one"
    later = failing.told(refuse_one, after=15)
    assert isinstance(later["exc_info"], ValueError)
    assert later["times"] == 4


def test_the_first_failure_of_each_kind_shows_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    for raising in (refuse_one, refuse_another, lambda: refuse_one()):
        assert isinstance(failing.told(raising)["exc_info"], ValueError)


def test_a_failure_that_was_raised_on_purpose_is_one_line_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Failing(monkeypatch).told(refuse_for_good)
    assert "exc_info" not in told
    assert told["reason"] == "DoNotRetry: no such video"


async def test_a_worker_writes_the_trace_of_a_failure_once_and_none_of_one_on_purpose(stage: Stage) -> None:
    app = App("a")

    @app.queue("q")
    async def fail(payload: Any) -> None:
        raise ValueError("x")

    @app.queue("p")
    async def refuse(payload: Any) -> None:
        raise DoNotRetry("y")

    for number in range(3):
        await stage.send("q", correlation_id=f"q{number}")
        await stage.send("p", correlation_id=f"p{number}")
    with structlog.testing.capture_logs() as lines:
        async with stage.worker(app):
            for _ in range(6):
                await stage.payload()
    told = [line for line in lines if line["event"] == "handler failed"]
    assert len(told) == 6
    assert sum("exc_info" in line for line in told) == 1
