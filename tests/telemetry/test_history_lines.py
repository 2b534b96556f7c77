"""What the log says of a run while it goes on."""

import io
from typing import Any

import pytest

from oraculo.core.history import Happened
from oraculo.engine.deliver.webhooks import NotPosted
from oraculo.ports.telemetry import DeadLettered, HistoryAdded, RunFinished, RunsPruned
from oraculo.settings import EngineSettings, RunSettings, Settings, WebhookSettings
from oraculo.telemetry import history_lines
from oraculo.telemetry.history_lines import LINES_A_SECOND
from oraculo.telemetry.hub import Hub
from oraculo.telemetry.logs import LogSubscriber
from oraculo.testing.harness import Harness
from oraculo.worker import App
from tests.core.building import Driver, fan_out
from tests.engine.workers import failing_app
from tests.telemetry.stage import configured, lines
from tests.waiting import until

QUICK = Settings(
    engine=EngineSettings(poll=0.02, note_linger=0.005),
    runs=RunSettings(max_attempts=2, backoff=0.01),
    webhook=WebhookSettings(backoff=0.01),
)
IN_EACH = {"@timestamp", "log.level", "log.logger", "ecs.version", "message"}


def said(stream: io.StringIO, message: str) -> list[dict[str, Any]]:
    """The lines with this message, without the fields that each line has."""
    found = [line for line in lines(stream) if line["message"] == message]
    return [{name: value for name, value in line.items() if name not in IN_EACH} for line in found]


def history(driver: Driver) -> HistoryAdded:
    run = driver.run
    return HistoryAdded(run.id, run.head.name, driver.history[1:], run.plan.steps, run.tasks)


def test_every_kind_of_entry_has_a_line_or_is_known_to_have_none() -> None:
    assert set(history_lines.LINES) == set(Happened)


async def test_a_run_leaves_a_trace_from_its_start_to_its_repetition() -> None:
    async def post(url: str, *_: Any) -> int:
        if not posted:
            posted.append(url)
            raise NotPosted("503")
        return 200

    stream, posted = configured("info"), list[str]()
    app = failing_app("executador_x", failures=None)
    async with Harness(app, settings=QUICK, telemetry=Hub(LogSubscriber()), post=post) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"], "webhook": "https://example.com/h"})
        first, whole = {"correlation_id": run_id}, {"correlation_id": run_id, "fila": "executador_x"}
        task = whole | {"tarefa": "executador_x"}
        await oraculo.ended(run_id)
        assert said(stream, "run accepted") == [first | {"name": "", "tasks": 1}]
        [retry] = said(stream, "attempt failed")
        assert retry.pop("proxima_tentativa_em").endswith("Z")
        assert retry.pop("reason").startswith("RuntimeError: broken at attempt 1")
        assert retry == task | {"tentativa": 1}
        [failed] = said(stream, "task failed")
        assert failed == task | {"tentativa": 2, "reason": "RuntimeError: broken at attempt 2"}
        assert said(stream, "run finished")[0]["status"] == "erro"
        await until(lambda: said(stream, "dead-lettered"), saying="the dead letter")
        [letter] = said(stream, "dead-lettered")
        assert letter.pop("reason").startswith("failed for good at attempt 2")
        assert letter == task | {"tentativa": 2}
        await until(lambda: len(said(stream, "delivery attempted")) == 2, saying="the delivery")
        tries = said(stream, "delivery attempted")
        assert [(one["correlation_id"], one["outcome"]) for one in tries] == [(run_id, "failed"), (run_id, "delivered")]

        await oraculo.operations.repeat(run_id)
        assert said(stream, "run repeated") == [first]
        assert said(stream, "task repeated") == [task | {"tentativa": 2}]
        await until(lambda: len(said(stream, "run finished")) == 2, saying="the second end")
        await until(lambda: len(said(stream, "dead-lettered")) == 2, saying="the second dead letter")
        app.broken = False  # type: ignore[attr-defined]
        await oraculo.operations.redrive("executador_x")
        assert said(stream, "run redriven") == [first]
        assert said(stream, "task redriven") == [task | {"tentativa": 4}]
        await until(lambda: len(said(stream, "run finished")) == 3, saying="the third end")
    assert not said(stream, "command sent"), "that is for debug"
    assert not said(stream, "task answered")


async def test_a_timeout_and_a_cancellation_leave_a_trace() -> None:
    stream = configured("info")
    async with Harness(settings=QUICK, telemetry=Hub(LogSubscriber())) as oraculo:
        late = await oraculo.submit({"destinos": ["executador_x"], "timeout": 0.05})
        await oraculo.ended(late)
        [line] = said(stream, "task timed out")
        assert (line["correlation_id"], line["tarefa"], line["fila"]) == (late, "executador_x", "executador_x")
        assert line["reason"].startswith("n")
        unwanted = await oraculo.submit({"destinos": ["executador_x"]})
        await oraculo.operations.cancel(unwanted)
        [line] = said(stream, "task cancelled")
        assert (line["correlation_id"], line["tarefa"]) == (unwanted, "executador_x")
        assert said(stream, "run finished")[-1]["status"] == "cancelada"


async def test_each_sending_and_answer_is_there_for_debug() -> None:
    stream, app = configured("debug"), App("a")
    app.queue("a")(lambda payload: 1)
    async with Harness(app, settings=QUICK, telemetry=Hub(LogSubscriber())) as oraculo:
        run_id = (await oraculo.run({"destinos": ["a"]}))["correlation_id"]
    line = {"correlation_id": run_id, "tarefa": "a", "tentativa": 1, "fila": "a"}
    assert said(stream, "task answered") == [line]
    assert said(stream, "command sent") in ([line], []), "an answer may be there before its sending is noted"


@pytest.mark.parametrize("width", [LINES_A_SECOND, 10_000])
def test_a_wide_run_writes_some_lines_a_second_and_says_how_many_it_left_out(width: int) -> None:
    driver = fan_out(*({"id": f"t{n}", "fila": "x"} for n in range(width)), checked=False)
    for number in range(width):
        driver.fail(f"t{number}", jitter=0.5)
    stream, now = configured("info"), 100.0
    subscriber = LogSubscriber(lambda: now)
    subscriber(history(driver))
    subscriber(DeadLettered("x", "why", driver.run.id, "t0", 1))
    assert len(said(stream, "attempt failed")) == LINES_A_SECOND
    other = fan_out("a")
    other.fail("a", jitter=0.5)
    subscriber(HistoryAdded("other", "", other.history, other.run.plan.steps, other.run.tasks))
    assert said(stream, "attempt failed")[-1]["correlation_id"] == "other", "its neighbours have their own"
    assert not said(stream, "lines about tasks were left out")
    now = 101.5
    subscriber(RunsPruned(1))
    left_out = {"attempt failed": width - LINES_A_SECOND, "dead-lettered": 1}
    assert said(stream, "lines about tasks were left out") == [
        {"correlation_id": driver.run.id, "left_out": {what: count for what, count in left_out.items() if count}}
    ]
    subscriber(history(driver))
    assert len(said(stream, "attempt failed")) == 2 * LINES_A_SECOND + 1


def test_lines_that_were_left_out_are_named_when_their_run_ends() -> None:
    driver = fan_out(*({"id": f"t{n}", "fila": "x"} for n in range(LINES_A_SECOND + 3)), checked=False)
    for task in driver.run.tasks:
        driver.fail(f"t{task.number}", jitter=0.5)
    stream, subscriber = configured("info"), LogSubscriber(lambda: 100.0)
    subscriber(history(driver))
    subscriber(RunFinished(driver.run.id, "", "erro", 1, 23, 1.0))
    subscriber(RunsPruned(1))
    [line] = said(stream, "lines about tasks were left out")
    assert line == {"correlation_id": driver.run.id, "left_out": {"attempt failed": 3}}


@pytest.mark.parametrize("layout", ["json", "console"])
def test_both_formats_say_the_same(layout: Any) -> None:
    stream, driver = configured("info", layout), fan_out("a")
    driver.fail("a", "não deu", jitter=0.5)
    LogSubscriber()(history(driver))
    for part in ("attempt failed", driver.run.id, "tarefa", "next attempt in 0.5 s"):
        assert part in stream.getvalue()
