"""The traceback of a failed attempt is kept in the run's history, bounded, and nowhere else."""

import msgspec
import pytest

from oraculo.core.aggregate import aggregate
from oraculo.core.events import Answered
from oraculo.core.machine import answers
from oraculo.core.views import entry_view, run_view
from oraculo.wire.tracebacks import MAX_TRACEBACK, bounded_traceback, split_traceback
from tests.core.building import Driver, fan_out

TRACE = 'Traceback (most recent call last):\n  File "loja.py", line 3, in cobrar\nValueError: não há saldo\n'


def kept(driver: Driver) -> list[str]:
    return [trace for entry in driver.history if (trace := split_traceback(entry.detail)[1]) is not None]


def fails(driver: Driver, traceback: object, **fields: object) -> None:
    payload = {"status": "erro", "erros": ["no"], "rastreamento": traceback}
    driver.answer(payload, tarefa="a", **fields)


@pytest.mark.parametrize(("sent", "expected"), [(TRACE, [TRACE]), (None, []), ("", []), (7, []), (["x"], [])])
def test_a_text_is_kept_and_anything_else_is_not(sent: object, expected: list[str]) -> None:
    driver = fan_out("a", "b").sent()
    fails(driver, sent)
    assert kept(driver) == expected
    assert driver.recorded(last=1) == [("tentativa_falhou", "a")]


def test_it_is_shown_in_the_history_and_nowhere_else() -> None:
    driver = fan_out("a").sent()
    driver.run.tasks[0].last_attempt = 1
    fails(driver, TRACE)
    [failed] = [entry for entry in driver.history if entry.what == "tarefa_erro"]
    view = entry_view(driver.run.plan, failed)
    assert (view["detalhe"], view["rastreamento"]) == ("no", TRACE)
    assert b"Traceback" not in msgspec.json.encode([aggregate(driver.run), run_view(driver.run)])


def test_of_a_long_one_the_end_is_kept() -> None:
    trace = bounded_traceback("é" * MAX_TRACEBACK + TRACE)
    assert trace.startswith("…é")
    assert trace.endswith(TRACE)
    assert MAX_TRACEBACK - 4 <= len(trace.encode()) <= MAX_TRACEBACK


def test_what_parts_it_from_the_reason_may_be_in_it() -> None:
    driver = fan_out("a").sent()
    fails(driver, "a\x1eb")
    assert kept(driver) == ["a\ufffdb"]


def test_a_run_keeps_no_more_of_them_than_its_history_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TRACED_ENTRIES", 1)
    driver = fan_out("a").sent()
    driver.apply(Answered(0, None, b"{}", failed=True, reason="no", traceback=TRACE))
    assert kept(driver) == []
