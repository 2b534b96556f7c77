"""Quorum, and answers that come after the end: recorded, or an amendment."""

import pytest

from oraculo.core.events import Cancelled, Redriven, Repeated
from oraculo.core.history import Happened
from oraculo.core.machine import Verdict
from oraculo.core.run import Cause

from .building import Driver, entries, fan_out, flow

# -- quorum -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "needed"), [(2, 2), ("50%", 2), ("51%", 3), ("25%", 1), ("100%", 4), ("all", 4), (4, 4)]
)
def test_a_quorum_ends_the_run_when_enough_have_succeeded(quorum: int | str, needed: int) -> None:
    driver = fan_out("a", "b", "c", "d", quorum=quorum).sent()
    for count, name in enumerate("abcd", start=1):
        driver.ok(name)
        assert driver.run.is_open is (count < needed)
        if count == needed:
            break
    assert driver.status == ("concluida" if needed == 4 else "parcial")
    assert (driver.head.succeeded, driver.head.task_cancelled) == (needed, 4 - needed)


def test_the_rest_of_a_quorum_is_cancelled_with_its_reason() -> None:
    driver = fan_out("a", "b", "c", quorum=1).sent("a", "b")
    driver.ok("a")
    assert driver.statuses == {"a": "concluida", "b": "cancelada", "c": "cancelada"}
    assert (driver.task("b").cause, driver.task("b").reason) == (Cause.QUORUM, "the quorum of 1 was met without it")
    assert not driver.task("c").unsent, "what is cancelled is not sent any more"
    assert driver.recorded(last=3) == [
        ("tarefa_cancelada", "b"),
        ("tarefa_cancelada", "c"),
        ("orquestracao_encerrada", None),
    ]


def test_failures_do_not_count_for_the_quorum() -> None:
    driver = fan_out("a", "b", "c", quorum=2).sent()
    driver.fail_for_good("a")
    driver.ok("b")
    assert driver.run.is_open
    driver.fail_for_good("c")
    assert driver.status == "parcial"


def test_a_quorum_that_is_never_met_ends_with_the_deadline() -> None:
    driver = fan_out("a", "b", quorum=1).sent().at(300)
    driver.run_due()
    assert driver.status == "timeout"


def test_a_pipelines_quorum_met_is_partial_even_when_a_required_step_failed() -> None:
    driver = flow("a", "b", "c<b", quorum=1).sent()
    driver.fail_for_good("a")
    driver.ok("b")
    assert (driver.status, driver.statuses["c"]) == ("parcial", "cancelada")
    assert driver.commands_of("c") == [1], "it was decided and called back in the same change"
    assert not driver.task("c").unsent


def test_what_is_redriven_into_a_run_whose_quorum_was_met_has_all_its_attempts() -> None:
    driver = fan_out("a", "b", quorum=1).sent()
    driver.fail_for_good("b")
    driver.ok("a")
    driver.apply(Redriven(1))
    driver.sent().fail("b", "busy")
    assert driver.statuses == {"a": "concluida", "b": "pendente"}
    driver.at(5).due("b")
    driver.sent().ok("b")
    assert driver.status == "concluida"


def test_of_two_that_are_redriven_after_the_quorum_was_met_both_count() -> None:
    driver = fan_out("a", "b", "c", quorum=1).sent()
    driver.fail_for_good("b")
    driver.fail_for_good("c")
    driver.ok("a")
    driver.apply(Redriven(1))
    driver.apply(Redriven(2))
    driver.sent().ok("b")
    assert driver.statuses["c"] == "em_execucao"
    driver.ok("c")
    assert driver.status == "concluida"


def test_what_is_behind_a_redriven_step_runs_though_the_quorum_was_met() -> None:
    driver = flow("a", "b", "c<b", quorum=1).sent()
    driver.fail_for_good("b")
    driver.ok("a")
    driver.apply(Redriven(1))
    driver.sent().ok("b")
    driver.sent().ok("c")
    assert driver.status == "concluida"


def test_a_quorum_that_a_redriven_task_meets_cancels_the_others() -> None:
    driver = fan_out("a", "b", "c", quorum=2).sent()
    for name in "bc":
        driver.fail_for_good(name)
    driver.ok("a")
    driver.apply(Redriven(1))
    driver.apply(Redriven(2))
    driver.sent().ok("b")
    assert driver.statuses == {"a": "concluida", "b": "concluida", "c": "cancelada"}


def test_an_answer_to_what_the_quorum_cancelled_is_late() -> None:
    driver = fan_out("a", "b", quorum=1).sent()
    driver.ok("a")
    assert driver.ok("b") is Verdict.LATE
    assert driver.statuses["b"] == "cancelada"


# -- onLate: amend ----------------------------------------------------------------------------------------------


def amending(*steps: dict[str, object] | str, **options: object) -> Driver:
    request = {"webhook": "http://h/x"}
    return flow(*steps, onLate="amend", request=request, timeout=30, **options).sent()


def test_a_late_success_gives_the_aggregate_again_as_versao_2() -> None:
    driver = amending("a", "b")
    driver.ok("a")
    driver.at(30).run_due()
    assert (driver.status, driver.head.edition) == ("timeout", 1)
    assert driver.at(40).ok("b", b'{"n": 2}') is Verdict.APPLIED
    assert (driver.status, driver.head.edition, driver.task("b").result) == ("concluida", 2, b'{"n": 2}')
    assert (driver.head.late, driver.head.duplicates) == (0, 0)
    assert driver.changes.ended
    assert driver.changes.deliver, "it is delivered again"
    assert driver.head.ended_at == driver.head.created_at + 30, "the run ended when it ended"
    assert driver.recorded(last=2) == [("resposta_tardia_aceita", "b"), ("orquestracao_encerrada", None)]
    assert driver.ok("b") is Verdict.DUPLICATE


def test_each_amendment_has_its_own_edition() -> None:
    driver = amending("a", "b", "c")
    driver.at(30).run_due()
    for edition, name in enumerate("abc", start=2):
        driver.ok(name)
        assert driver.head.edition == edition
    assert driver.status == "concluida"


def test_a_late_failure_amends_nothing() -> None:
    driver = amending("a")
    driver.at(30).run_due()
    assert driver.fail("a") is Verdict.LATE
    assert (driver.status, driver.head.edition) == ("timeout", 1)


def test_what_depended_on_it_stays_skipped() -> None:
    driver = amending("a", "b<a")
    driver.at(30).run_due()
    driver.ok("a")
    assert driver.statuses == {"a": "concluida", "b": "ignorada"}
    assert driver.status == "parcial"


def test_an_amendment_while_the_run_goes_on_does_not_end_it() -> None:
    driver = amending({"type": "a", "timeout": 5}, "b", "c<a")
    driver.at(5).due("a")
    assert driver.at(6).ok("a") is Verdict.APPLIED
    assert (driver.status, driver.head.edition) == ("em_execucao", 0)
    assert not driver.changes.ended
    driver.ok("b")
    assert (driver.status, driver.statuses["c"], driver.head.edition) == ("parcial", "ignorada", 1)


def test_an_amendment_may_meet_the_quorum() -> None:
    driver = amending({"type": "a", "timeout": 5}, "b", quorum=1)
    driver.at(5).due("a")
    driver.ok("a")
    assert (driver.status, driver.statuses["b"]) == ("parcial", "cancelada")


def test_what_the_quorum_cancelled_may_be_amended() -> None:
    driver = amending("a", "b", quorum=1)
    driver.ok("a")
    assert driver.ok("b") is Verdict.APPLIED
    assert (driver.status, driver.head.edition) == ("concluida", 2)


def test_what_failed_or_was_cancelled_on_request_is_not_amended() -> None:
    driver = amending("a", "b")
    driver.fail_for_good("a")
    driver.apply(Cancelled())
    assert driver.ok("a") is Verdict.DUPLICATE
    assert driver.ok("b") is Verdict.LATE
    assert (driver.status, driver.head.edition) == ("cancelada", 1)


def test_a_cancelled_run_is_not_amended_even_by_what_had_timed_out_before() -> None:
    driver = amending({"type": "a", "timeout": 5}, "b")
    driver.at(5).due("a")
    driver.apply(Cancelled())
    assert driver.ok("a") is Verdict.LATE
    assert (driver.status, driver.statuses["a"], driver.head.edition) == ("cancelada", "timeout", 1)


def test_what_was_skipped_behind_an_amended_task_may_be_repeated() -> None:
    driver = amending("a", "b<a")
    driver.at(30).run_due()
    driver.ok("a")
    assert driver.apply(Repeated()) is Verdict.APPLIED
    assert driver.commands_of("b") == [1]
    driver.sent().ok("b")
    assert (driver.status, driver.head.edition) == ("concluida", 3)


def test_record_is_the_rule_unless_amend_is_asked_for() -> None:
    driver = flow("a", timeout=30).sent().at(30)
    driver.run_due()
    assert driver.ok("a") is Verdict.LATE
    assert entries(driver, Happened.AMENDED) == []


def test_an_amended_task_cannot_be_redriven() -> None:
    driver = amending("a", "b")
    driver.at(30).run_due()
    driver.ok("a")
    assert driver.apply(Redriven(0)) is Verdict.REFUSED
