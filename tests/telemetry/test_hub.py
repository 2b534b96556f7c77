import logging

import pytest

from oraculo.ports.telemetry import Record, RunsPruned, Telemetry
from oraculo.telemetry.hub import Hub


def broken(_record: Record) -> None:
    raise RuntimeError("no disk")


def test_every_subscriber_hears_every_record_in_order() -> None:
    first: list[Record] = []
    second: list[Record] = []
    hub: Telemetry = Hub(first.append, second.append)
    records = [RunsPruned(1), RunsPruned(2)]
    for record in records:
        hub.emit(record)
    assert first == second == records


def test_a_failing_subscriber_hurts_nobody_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Record] = []
    hub = Hub(broken, heard.append)
    with caplog.at_level(logging.ERROR):
        hub.emit(RunsPruned(1))
        hub.emit(RunsPruned(2))
    assert heard == [RunsPruned(1), RunsPruned(2)]
    (said,) = caplog.records
    assert "RunsPruned" in said.getMessage()
    assert said.exc_info is not None
    assert str(said.exc_info[1]) == "no disk"


def test_each_failing_subscriber_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub(broken, broken)
    hub.emit(RunsPruned(1))
    assert len(caplog.records) == 2


def test_without_subscribers_it_is_silent() -> None:
    Hub().emit(RunsPruned(1))
