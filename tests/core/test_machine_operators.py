"""Requests of operators: cancel, repeat, redrive, discard."""

import pytest

from oraculo.core import machine
from oraculo.core.aggregate import aggregate
from oraculo.core.events import Cancelled, DeadLetterDiscarded, Progressed, Redriven, Repeated, Sent
from oraculo.core.history import Happened
from oraculo.core.machine import Verdict
from oraculo.core.run import Cause, TaskStatus

from .building import START, Driver, entries, fan_out, flow

# -- cancel -----------------------------------------------------------------------------------------------------


def test_cancel_closes_what_is_open_and_keeps_what_ended() -> None:
    driver = flow("a", "b", "c<b").sent()
    driver.ok("a")
    assert driver.at(4).apply(Cancelled("enough")) is Verdict.APPLIED
    assert driver.statuses == {"a": "concluida", "b": "cancelada", "c": "cancelada"}
    assert (driver.status, driver.head.cancelled, driver.head.ended_at) == ("cancelada", True, START + 4)
    assert (driver.task("b").cause, driver.task("b").reason) == (Cause.REQUEST, "enough")
    assert driver.recorded(last=3) == [
        ("tarefa_cancelada", "b"),
        ("tarefa_cancelada", "c"),
        ("orquestracao_encerrada", None),
    ]


def test_what_has_ended_cannot_be_cancelled() -> None:
    driver = fan_out("a").sent()
    driver.ok("a")
    assert driver.apply(Cancelled()) is Verdict.REFUSED
    assert driver.status == "concluida"


def test_an_answer_after_the_cancel_is_late() -> None:
    driver = fan_out("a").sent()
    driver.apply(Cancelled())
    assert driver.ok("a") is Verdict.LATE
    assert driver.fail("a") is Verdict.LATE
    assert driver.status == "cancelada"


# -- repeat -----------------------------------------------------------------------------------------------------


def failed_flow() -> Driver:
    """a succeeded, b failed at its second attempt, c behind b was skipped, d timed out."""
    retry = {"maxAttempts": 2, "backoff": 0}
    driver = flow("a", {"type": "b", "retry": retry}, "c<b", "d", timeout=30).sent()
    driver.ok("a", b'{"n": 1}')
    driver.apply(Progressed(1, 40.0, "meio"))
    driver.fail("b", attempt=1)
    driver.due("b")
    driver.apply(Progressed(1, 70.0, "quase"))
    driver.fail("b", attempt=2)
    driver.at(30).run_due()
    assert driver.statuses == {"a": "concluida", "b": "erro", "c": "ignorada", "d": "timeout"}
    return driver


def test_repeat_runs_again_only_what_failed_and_keeps_what_succeeded() -> None:
    driver = failed_flow().at(100)
    assert driver.apply(Repeated()) is Verdict.APPLIED
    assert driver.statuses == {"a": "concluida", "b": "pendente", "c": "pendente", "d": "pendente"}
    assert driver.changes.commands == [(1, 3), (3, 2)], "attempts go on counting"
    assert (driver.status, driver.head.ended_at, driver.head.deadline) == ("em_execucao", None, START + 130)
    assert driver.task("a").result == b'{"n": 1}'
    assert driver.changes.ended is False
    assert driver.recorded(last=4) == [
        ("orquestracao_reaberta", None),
        ("tarefa_reaberta", "b"),
        ("tarefa_reaberta", "c"),
        ("tarefa_reaberta", "d"),
    ]


def test_a_repeated_run_ends_anew() -> None:
    driver = failed_flow().at(100)
    driver.apply(Repeated())
    driver.sent().ok("b")
    driver.sent().ok("c")
    driver.ok("d")
    assert (driver.status, driver.head.edition, driver.head.ended_at) == ("concluida", 2, START + 100)


def test_a_repeated_task_begins_as_new_but_for_its_attempts() -> None:
    driver = failed_flow()
    driver.sent()
    driver.at(100).apply(Repeated())
    task = driver.task("b")
    assert (task.attempt, task.last_attempt) == (3, 4), "it has all its attempts again"
    assert (task.cause, task.reason, task.ended_at, task.dead_letter) == (None, None, None, False)
    assert (task.percent, task.note) == (None, None)
    driver.fail("b", attempt=3)
    assert task.awaits_retry
    driver.due("b")
    driver.fail("b", attempt=4)
    assert task.status is TaskStatus.FAILED
    assert driver.statuses["c"] == "ignorada"


def test_an_answer_of_before_the_repeat_is_known() -> None:
    driver = failed_flow().at(100)
    driver.apply(Repeated())
    assert driver.fail("b", attempt=2) is Verdict.DUPLICATE
    assert driver.ok("d", attempt=1) is Verdict.APPLIED, "its late success saves the new attempt"


def test_a_task_gets_a_new_deadline_when_it_is_repeated() -> None:
    driver = fan_out({"fila": "a", "timeout": 5}).sent().at(5)
    driver.due("a")
    driver.at(50).apply(Repeated())
    assert driver.task("a").due_at == START + 55


def test_a_cancelled_run_may_be_repeated() -> None:
    driver = flow("a", "b<a").sent()
    driver.apply(Cancelled())
    assert driver.apply(Repeated()) is Verdict.APPLIED
    assert (driver.head.cancelled, driver.commands_of("b")) == (False, [])
    driver.ok("a")
    driver.ok("b")
    assert driver.status == "concluida"


def test_what_is_open_or_has_nothing_that_failed_cannot_be_repeated() -> None:
    driver = fan_out("a", "b").sent()
    driver.fail_for_good("a")
    assert driver.apply(Repeated()) is Verdict.REFUSED
    whole = fan_out("a").sent()
    whole.ok("a")
    assert whole.apply(Repeated()) is Verdict.REFUSED


def test_a_run_whose_quorum_is_met_cannot_be_repeated() -> None:
    driver = fan_out("a", "b", quorum=1).sent()
    driver.ok("a")
    assert driver.apply(Repeated()) is Verdict.REFUSED
    assert driver.statuses == {"a": "concluida", "b": "cancelada"}


def test_an_end_and_a_repeat_in_one_batch_leave_nothing_to_deliver() -> None:
    driver = fan_out("a", webhook="http://h").sent()
    driver.fail_for_good("a")
    changes = driver.changes
    machine.apply(driver.run, Repeated(), driver.now, changes)
    assert (changes.ended, changes.deliver) == (False, ())


# -- redrive ----------------------------------------------------------------------------------------------------


def test_redrive_reopens_the_task_and_what_was_skipped_because_of_it_alone() -> None:
    driver = flow("a", "b", "c<a", "d<c", "e<c,b", "f").sent()
    driver.ok("f")
    driver.fail_for_good("a")
    driver.fail_for_good("b")
    assert driver.status == "erro"
    driver.sent()
    assert driver.at(50).apply(Redriven(0)) is Verdict.APPLIED
    assert driver.statuses == {
        "a": "pendente",
        "b": "erro",
        "c": "pendente",
        "d": "pendente",
        "e": "ignorada",
        "f": "concluida",
    }
    assert (driver.status, driver.head.deadline) == ("em_execucao", START + 350)
    assert driver.commands_of("a") == [1, 2]
    assert not driver.task("a").dead_letter
    assert driver.task("b").dead_letter, "the other's letter rests where it is"
    driver.ok("a")
    driver.ok("c")
    driver.ok("d")
    assert (driver.status, driver.head.edition) == ("erro", 2)
    driver.apply(Redriven(1))
    driver.ok("b")
    driver.ok("e")
    assert (driver.status, driver.head.edition) == ("concluida", 3)


def test_what_stays_skipped_after_a_redrive_names_a_task_that_still_stands_in_its_way() -> None:
    driver = flow("a", "b", "c<a,b", "d<a,c").sent()
    driver.fail_for_good("a")
    driver.fail_for_good("b")
    assert [driver.task(name).reason for name in "cd"] == ["'a' ended as erro"] * 2
    driver.apply(Redriven(0))
    assert driver.statuses == {"a": "pendente", "b": "erro", "c": "ignorada", "d": "ignorada"}
    assert [driver.task(name).reason for name in "cd"] == ["'b' ended as erro", "'c' ended as ignorada"]
    assert {driver.number("c"), driver.number("d")} <= set(driver.changes.tasks), "it is written"
    driver.ok("a")
    assert list(aggregate(driver.run)["resultados"]) == ["a"]
    driver.apply(Redriven(1))
    assert [driver.task(name).reason for name in "cd"] == [None, None]


def test_redrive_reopens_what_meets_again_further_down() -> None:
    driver = flow("a", "b<a", "c<a", "d<b,c", "e<d,a").sent()
    driver.fail_for_good("a")
    driver.apply(Redriven(0))
    assert set(driver.statuses.values()) == {"pendente"}
    assert [task.missing for task in driver.run.tasks] == [0, 1, 1, 2, 2]


def test_redrive_reopens_what_was_skipped_beside_what_was_cancelled() -> None:
    driver = flow("x", "a", "b<a", "c<a,x").sent()
    driver.fail_for_good("x")
    driver.apply(Cancelled())
    driver.apply(Redriven(0))
    driver.ok("x")
    assert driver.statuses == {"x": "concluida", "a": "cancelada", "b": "cancelada", "c": "ignorada"}
    driver.apply(Redriven(1))
    assert driver.statuses == {"x": "concluida", "a": "pendente", "b": "cancelada", "c": "pendente"}


def test_redrive_in_an_open_run_leaves_it_open() -> None:
    driver = flow("a", "b<a", "c").sent()
    driver.fail_for_good("a")
    assert driver.at(10).apply(Redriven(0)) is Verdict.APPLIED
    assert driver.head.edition == 0
    assert entries(driver, Happened.RUN_REOPENED) == []
    driver.ok("a")
    driver.ok("b")
    driver.ok("c")
    assert driver.status == "concluida"


def test_redrive_in_an_open_run_leaves_it_its_deadline() -> None:
    driver = fan_out("a", "b", timeout=30).sent()
    driver.fail_for_good("a")
    driver.at(29).apply(Redriven(0))
    assert driver.head.deadline == driver.head.due_at == START + 30, "workers have it as the prazo of their commands"


def test_after_a_redrive_there_are_as_many_attempts_as_at_first() -> None:
    driver = fan_out("a", "b").sent()
    driver.fail_for_good("a")
    driver.apply(Redriven(0))
    assert (driver.task("a").attempt, driver.task("a").last_attempt) == (2, 4)


def test_redrive_reopens_what_another_open_task_also_leads_to() -> None:
    driver = flow("a", "b", "c<a,b").sent()
    driver.fail_for_good("a")
    assert driver.statuses["c"] == "ignorada"
    driver.apply(Redriven(0))
    assert driver.statuses["c"] == "pendente"


def test_a_failure_that_was_counted_before_a_redrive_is_a_repeat_after_it() -> None:
    driver = fan_out("a", "b").sent()
    driver.fail("a", retryable=False, mark=7)
    driver.apply(Redriven(0))
    assert driver.sent().fail("a", mark=7, redelivered=True) is Verdict.DUPLICATE


@pytest.mark.parametrize("name", ["ok", "open", "skipped"])
def test_what_is_open_succeeded_or_was_never_sent_cannot_be_redriven(name: str) -> None:
    driver = flow("ok", "open", "bad", "skipped<bad").sent()
    driver.ok("ok")
    driver.fail_for_good("bad")
    assert driver.apply(Redriven(driver.number(name))) is Verdict.REFUSED


def test_a_task_that_was_cancelled_before_it_was_sent_cannot_be_redriven_alone() -> None:
    driver = flow("a", "b<a").sent()
    driver.apply(Cancelled())
    assert driver.apply(Redriven(1)) is Verdict.REFUSED
    assert driver.apply(Redriven(0)) is Verdict.APPLIED
    driver.ok("a")
    assert driver.run.is_open is False, "b stays as the cancel left it"


# -- discard ----------------------------------------------------------------------------------------------------


def test_a_discarded_dead_letter_is_reported_and_not_sent_any_more() -> None:
    driver = fan_out("a").sent()
    driver.fail_for_good("a")
    assert driver.apply(DeadLetterDiscarded(0)) is Verdict.APPLIED
    assert (driver.task("a").dead_letter, driver.task("a").unsent, driver.status) == (False, False, "erro")
    assert driver.recorded(last=1) == [("carta_morta_descartada", "a")]
    assert driver.apply(DeadLetterDiscarded(0)) is Verdict.NOTHING
    assert driver.apply(Sent(0, 1, dead_letter=True)) is Verdict.NOTHING


def test_there_is_nothing_to_discard_of_a_task_without_a_dead_letter() -> None:
    assert fan_out("a").apply(DeadLetterDiscarded(0)) is Verdict.NOTHING


def test_a_reopened_task_that_was_never_sent_has_no_attempt() -> None:
    driver = flow("a", "b<a").sent()
    driver.fail_for_good("a")
    driver.apply(Repeated())
    assert driver.history[-1].attempt is None
