"""The phase of an open task: in its queue, at work, or waiting for its next attempt."""

from typing import Any

import pytest

from oraculo.core.events import Progressed, Sent
from oraculo.core.phase import Phase, QueueLook, phase_of
from tests.core.building import START, Driver, fan_out


def sent() -> Driver:
    return fan_out("a").at(1).sent()


def phase(driver: Driver, **queue: Any) -> Phase | None:
    look = QueueLook(**({"at": START + 2, "ready": 0, "held": 0} | queue)) if queue else None
    return phase_of(driver.task("a"), "a", look)


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        ({"ready": 0, "held": 1}, Phase.AT_WORK),
        ({"ready": 0, "held": None}, Phase.AT_WORK),
        ({"ready": 3, "held": 0}, Phase.IN_QUEUE),
        ({"ready": 3, "held": None, "consumers": 0}, Phase.IN_QUEUE),
        ({"ready": 3, "held": None, "consumers": 2}, None),
        ({"ready": 3, "held": 2}, None),
        ({"ready": 3, "held": 2, "taken": {("a", 1)}}, Phase.AT_WORK),
        ({"ready": 3, "held": 2, "taken": {("b", 1)}}, Phase.IN_QUEUE),
        ({"ready": 3, "held": 2, "taken": {("a", 2)}}, Phase.IN_QUEUE),
        ({"ready": 0, "held": 0, "is_bridged": True}, None),
        ({"ready": 1, "held": 0, "is_bridged": True}, Phase.IN_QUEUE),
        ({"ready": 0, "held": 1, "at": START + 0.5}, None),
    ],
)
def test_a_sent_task_is_where_its_queue_says(queue: dict[str, Any], expected: Phase | None) -> None:
    assert phase(sent(), **queue) is expected


def test_without_a_look_nobody_says_where_a_sent_task_is() -> None:
    assert phase(sent()) is None


@pytest.mark.parametrize("report", [Progressed(0, 40.0, None), Progressed(0, None, "lendo"), Progressed(0, None, None)])
def test_a_worker_that_reports_is_at_work_whatever_its_queue_says(report: Progressed) -> None:
    driver = sent()
    driver.apply(report)
    assert phase(driver, ready=3, held=0) is Phase.AT_WORK


def test_a_failed_attempt_waits_for_the_next_and_is_at_work_no_more() -> None:
    driver = sent()
    driver.apply(Progressed(0, 40.0, None))
    driver.fail("a", jitter=0.5)
    assert phase(driver, ready=0, held=1) is Phase.AWAITS_RETRY
    driver.at(5).due("a")
    assert phase(driver, ready=0, held=1) is None, "the next attempt is not sent yet"
    driver.apply(Sent(0, 2))
    assert phase(driver, ready=3, held=0, at=START + 6) is Phase.IN_QUEUE


def test_what_is_not_open_has_no_phase() -> None:
    driver = sent()
    driver.ok("a")
    assert phase(driver, ready=0, held=1) is None
