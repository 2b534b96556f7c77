"""A log that fails costs its own line, and never an answer."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.typing import WrappedLogger

from oraculo.errors import BrokerUnavailable
from oraculo.worker import App

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
