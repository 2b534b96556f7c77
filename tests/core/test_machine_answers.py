"""Reports of workers and brokers: sent, succeeded, failed, repeated, late, progress."""

import pytest

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.core.history import Happened
from oraculo.core.machine import Verdict
from oraculo.core.machine.answers import MAX_ENTRIES, MAX_ENTRIES_PER_TASK, MAX_STRAY_ENTRIES
from oraculo.core.run import Cause, TaskStatus

from .building import OK, START, Driver, entries, fan_out, flow, run_of

RETRY = {"maxAttempts": 3, "backoff": 2, "maxBackoff": 3}


def one_step(**step: object) -> Driver:
    return flow({"type": "a", "retry": RETRY, **step}).sent()


# -- the start --------------------------------------------------------------------------------------------------


def test_at_the_start_all_that_depends_on_nothing_is_sent() -> None:
    driver = flow("a", "b<a", "c", timeout=60)
    assert driver.commands == [(0, 1), (2, 1)]
    assert driver.statuses == {"a": "pendente", "b": "pendente", "c": "pendente"}
    assert set(driver.changes.tasks) == {0, 1, 2}
    assert driver.head.due_at == driver.head.deadline == START + 60
    assert driver.recorded() == [("orquestracao_iniciada", None)]


def test_a_sent_task_is_in_execution() -> None:
    driver = fan_out("a").at(2)
    assert driver.apply(Sent(0, 1)) is Verdict.APPLIED
    assert driver.statuses == {"a": "em_execucao"}
    assert (driver.task("a").sent_at, driver.task("a").unsent) == (START + 2, False)
    assert driver.recorded(last=1) == [("tarefa_enviada", "a")]


@pytest.mark.parametrize("event", [Sent(0, 2), Sent(0, 1, dead_letter=True)])
def test_a_note_of_what_was_not_asked_changes_nothing(event: Sent) -> None:
    assert fan_out("a").apply(event) is Verdict.NOTHING


def test_a_second_confirm_changes_nothing() -> None:
    assert fan_out("a").sent().apply(Sent(0, 1)) is Verdict.NOTHING


# -- success ----------------------------------------------------------------------------------------------------


def test_a_success_closes_the_task_and_the_last_one_the_run() -> None:
    driver = fan_out("a", "b").sent().at(5)
    assert driver.ok("a", b'{"n": 1}') is Verdict.APPLIED
    assert (driver.status, driver.task("a").result, driver.task("a").ended_at) == (
        "em_execucao",
        b'{"n": 1}',
        START + 5,
    )
    assert set(driver.changes.tasks) == {0}, "only what changed is written"
    assert driver.at(6).ok("b") is Verdict.APPLIED
    assert (driver.status, driver.head.ended_at, driver.head.edition) == ("concluida", START + 6, 1)
    assert driver.changes.ended
    assert driver.recorded(last=2) == [("tarefa_concluida", "b"), ("orquestracao_encerrada", None)]
    assert driver.history[-1].detail == "concluida, versao 1"


def test_an_answer_may_overtake_the_brokers_confirm() -> None:
    driver = fan_out("a", "b")
    assert driver.ok("a") is Verdict.APPLIED
    assert driver.statuses["a"] == "concluida"
    assert driver.apply(Sent(0, 1)) is Verdict.NOTHING


def test_a_failure_may_overtake_the_brokers_confirm() -> None:
    driver = flow({"type": "a", "retry": RETRY})
    assert driver.fail("a") is Verdict.APPLIED
    assert driver.apply(Sent(0, 1)) is Verdict.NOTHING
    assert driver.task("a").awaits_retry


def test_what_waited_for_all_of_them_is_sent_when_the_last_succeeds() -> None:
    driver = flow("a", "b", "c<a,b", "d<c").sent()
    driver.ok("a")
    assert driver.commands_of("c") == []
    driver.ok("b")
    assert driver.commands_of("c") == [1]
    assert driver.commands_of("d") == []
    driver.sent().ok("c")
    driver.sent().ok("d")
    assert driver.status == "concluida"


def test_a_success_of_an_older_attempt_is_a_success() -> None:
    driver = one_step()
    driver.fail("a", attempt=1)
    driver.at(2).due("a")
    assert driver.ok("a", attempt=1) is Verdict.APPLIED
    assert driver.status == "concluida"


def test_a_success_while_the_retry_is_awaited_is_a_success() -> None:
    driver = one_step()
    driver.fail("a")
    assert driver.ok("a") is Verdict.APPLIED
    assert driver.status == "concluida"
    assert driver.task("a").reason is None, "a task that succeeded has no reason for failing"


# -- failure and retry ------------------------------------------------------------------------------------------


def test_a_failure_is_tried_again_after_a_pause_with_full_jitter() -> None:
    driver = one_step().at(10)
    driver.apply(Progressed(0, 40.0, "half"))
    assert driver.fail("a", "no luck", jitter=0.25) is Verdict.APPLIED
    task = driver.task("a")
    assert (task.status, task.attempt, task.due_at, task.reason) == (TaskStatus.PENDING, 1, START + 10.5, "no luck")
    assert task.awaits_retry
    assert (task.percent, task.note, task.unsent) == (None, None, False)
    (entry,) = entries(driver, Happened.ATTEMPT_FAILED)
    assert (entry.attempt, entry.detail) == (1, "no luck; next attempt in 0.5 s")
    assert driver.at(10.4).due("a") is Verdict.NOTHING
    assert driver.at(10.5).due("a") is Verdict.APPLIED
    assert (driver.commands_of("a"), task.attempt, task.unsent, task.due_at) == ([1, 2], 2, True, None)


def test_the_pause_grows_and_is_capped() -> None:
    driver = flow({"type": "a", "retry": {"maxAttempts": 5, "backoff": 2, "maxBackoff": 3}}).sent()
    pauses = []
    for attempt in range(1, 5):
        driver.fail("a", attempt=attempt, jitter=0.5)
        pauses.append((driver.task("a").due_at or 0) - driver.now)
        driver.now = driver.task("a").due_at or 0
        driver.due("a")
    assert pauses == [1, 1.5, 1.5, 1.5]


def test_the_last_attempts_failure_is_final_and_goes_to_the_dead_letters() -> None:
    driver = one_step()
    for attempt in (1, 2):
        driver.fail("a", attempt=attempt, jitter=0.0)
        driver.due("a")
        driver.sent()
    driver.at(9).fail("a", "for good", attempt=3)
    task = driver.task("a")
    assert (task.status, task.cause, task.reason, task.ended_at) == (
        TaskStatus.FAILED,
        Cause.ANSWER,
        "for good",
        driver.now,
    )
    assert (task.dead_letter, task.unsent, driver.dead_letters) == (True, True, [(0, 3)])
    assert driver.recorded(last=2) == [("tarefa_erro", "a"), ("orquestracao_encerrada", None)]
    assert driver.apply(Sent(0, 3)) is Verdict.NOTHING
    assert driver.apply(Sent(0, 3, dead_letter=True)) is Verdict.APPLIED
    assert (task.dead_letter, task.unsent) == (True, False)


def test_a_failure_that_is_not_to_be_retried_is_final() -> None:
    driver = one_step()
    driver.fail_for_good("a", "bad input")
    assert (driver.status, driver.task("a").attempt, driver.task("a").reason) == ("erro", 1, "bad input")


@pytest.mark.parametrize("step", [{"timeout": 11}, {}])
def test_no_time_left_for_another_attempt_makes_the_failure_final(step: dict[str, object]) -> None:
    driver = flow({"type": "a", "retry": RETRY, **step}, timeout=11 if not step else 300).sent().at(10)
    driver.fail("a", "boom", jitter=0.5)  # due at 11, which is the deadline
    assert driver.statuses == {"a": "erro"}
    assert driver.task("a").reason == "boom (no time left for another attempt before the deadline)"


def test_a_moment_less_and_there_is_time_for_it() -> None:
    driver = one_step(timeout=11).at(10)
    driver.fail("a", jitter=0.49)
    assert driver.task("a").awaits_retry


# -- repeats ----------------------------------------------------------------------------------------------------


def test_a_second_success_is_counted_and_reported_and_changes_nothing() -> None:
    driver = fan_out("a", "b").sent()
    driver.ok("a", b'{"n": 1}')
    assert driver.ok("a", b'{"n": 2}') is Verdict.DUPLICATE
    assert driver.fail("a", attempt=1) is Verdict.DUPLICATE
    assert (driver.task("a").result, driver.head.duplicates, driver.head.late) == (b'{"n": 1}', 2, 0)
    assert driver.recorded(last=1) == [("resposta_repetida", "a")]


def test_a_success_after_the_final_failure_is_a_repeat_too() -> None:
    driver = one_step()
    driver.fail_for_good("a")
    assert driver.ok("a") is Verdict.DUPLICATE
    assert driver.statuses == {"a": "erro"}


def test_a_failure_of_an_older_attempt_is_not_counted_again() -> None:
    driver = one_step()
    driver.fail("a", attempt=1, jitter=0.0)
    driver.due("a")
    assert driver.fail("a", attempt=1) is Verdict.DUPLICATE
    assert (driver.task("a").attempt, driver.head.duplicates) == (2, 1)
    assert driver.fail("a", attempt=2) is Verdict.APPLIED


@pytest.mark.parametrize("attempt", [None, 1])
def test_a_failure_while_the_retry_is_awaited_is_a_repeat(attempt: int | None) -> None:
    driver = one_step()
    driver.fail("a", attempt=attempt, mark=7)
    due = driver.task("a").due_at
    assert driver.at(0.5).fail("a", attempt=attempt, mark=9) is Verdict.DUPLICATE
    assert driver.task("a").due_at == due


def test_a_repeated_failure_without_its_attempt_is_known_by_its_mark() -> None:
    driver = one_step()
    driver.fail("a", mark=7, jitter=0.0)
    driver.due("a")
    assert driver.fail("a", mark=7, redelivered=True) is Verdict.DUPLICATE
    assert driver.fail("a", mark=9, redelivered=True) is Verdict.APPLIED
    assert entries(driver, Happened.ATTEMPT_FAILED)[-1].attempt == 2


def test_a_worker_that_fails_the_same_way_twice_has_failed_twice() -> None:
    """Its clock may be coarse: only what the broker delivers again can be a repeat."""
    driver = one_step()
    driver.fail("a", mark=7, jitter=0.0)
    driver.due("a")
    assert driver.fail("a", mark=7) is Verdict.APPLIED


def test_strays_are_reported_up_to_a_limit_and_counted_for_ever() -> None:
    driver = fan_out("a", "b").sent()
    driver.ok("a")
    for _ in range(MAX_STRAY_ENTRIES + 5):
        driver.ok("a")
    assert driver.head.duplicates == MAX_STRAY_ENTRIES + 5
    assert len(entries(driver, Happened.DUPLICATE)) == MAX_STRAY_ENTRIES
    assert driver.changes.dirty, "the count is written"


# -- late and unknown -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [True, False])
def test_an_answer_after_the_timeout_is_late(failed: bool) -> None:
    driver = fan_out("a", "b", timeout=30).sent()
    driver.ok("b")
    driver.at(30).run_due()
    assert (driver.fail("a") if failed else driver.ok("a")) is Verdict.LATE
    assert (driver.status, driver.statuses["a"], driver.head.late, driver.head.edition) == ("parcial", "timeout", 1, 1)
    assert driver.recorded(last=1) == [("resposta_tardia", "a")]


def test_what_stays_skipped_after_an_amendment_names_a_task_that_still_stands_in_its_way() -> None:
    driver = flow("a", "b", "c<a,b", "d<a", timeout=30, onLate="amend").sent()
    driver.at(30).run_due()
    assert [driver.task(name).reason for name in "cd"] == ["'a' ended as timeout"] * 2
    assert driver.ok("a") is Verdict.APPLIED
    assert driver.statuses == {"a": "concluida", "b": "timeout", "c": "ignorada", "d": "ignorada"}
    assert driver.task("c").reason == "'b' ended as timeout"
    assert driver.task("d").reason == "'a' succeeded too late for it", "nothing else was in its way"


def test_an_answer_to_a_task_that_was_never_sent_is_unknown() -> None:
    driver = flow("a", "b<a", "c").sent()
    assert driver.ok("b") is Verdict.UNKNOWN
    assert driver.fail("b") is Verdict.UNKNOWN
    assert driver.apply(Progressed(1, 5.0)) is Verdict.UNKNOWN
    driver.fail_for_good("a")
    assert driver.statuses["b"] == "ignorada"
    assert driver.ok("b") is Verdict.UNKNOWN


def test_an_answer_to_a_task_that_was_cancelled_before_it_was_sent_is_unknown() -> None:
    driver = flow("a", "b<a", "c", quorum=1, onLate="amend").sent()
    driver.ok("c")
    assert driver.statuses["b"] == "cancelada"
    assert driver.ok("b") is Verdict.UNKNOWN


# -- progress ---------------------------------------------------------------------------------------------------


def test_progress_is_kept_and_reported() -> None:
    driver = fan_out("a").sent()
    assert driver.apply(Progressed(0, 12.5, "lendo")) is Verdict.APPLIED
    assert (driver.task("a").percent, driver.task("a").note) == (12.5, "lendo")
    driver.apply(Progressed(0, None, None))
    assert (driver.task("a").percent, driver.task("a").note) == (12.5, None)
    assert [entry.detail for entry in driver.history[-2:]] == ["12.5 % lendo", None]
    driver.ok("a")
    assert driver.task("a").percent == 100
    quiet = fan_out("a").sent()
    quiet.ok("a")
    assert quiet.task("a").percent is None, "a worker that reports no progress has made none that could be shown"
    assert driver.apply(Progressed(0, 50.0)) is Verdict.LATE


def test_progress_of_an_attempt_that_failed_is_not_taken_for_that_of_the_next() -> None:
    driver = flow({"type": "a", "retry": {"maxAttempts": 3}}).sent()
    driver.fail("a", attempt=1)
    assert driver.apply(Progressed(0, 90.0, "quase", 1)) is Verdict.LATE, "the next is not due yet"
    driver.at(60).due("a")
    driver.sent()
    entries = driver.head.entries
    assert driver.apply(Progressed(0, 90.0, "quase", 1)) is Verdict.LATE
    assert (driver.task("a").percent, driver.task("a").note) == (None, None)
    assert (driver.changes.dirty, driver.head.entries, driver.head.late) == (False, entries, 0), "it is no answer"
    assert driver.apply(Progressed(0, 10.0, "lendo", 2)) is Verdict.APPLIED
    assert driver.apply(Progressed(0, 20.0)) is Verdict.APPLIED, "it may be of either"
    assert driver.task("a").percent == 20.0


def test_a_worker_gone_mad_cannot_fill_the_history() -> None:
    driver = Driver(run_of({"destinos": ["a", "b"]}), checked=False)
    limit = MAX_ENTRIES + 2 * MAX_ENTRIES_PER_TASK
    for number in range(limit + 50):
        assert driver.apply(Progressed(0, number % 100 / 1.0)) is Verdict.APPLIED
    assert driver.head.entries == limit
    assert driver.task("a").percent == (limit + 49) % 100
    driver.apply(Answered(0, 1, OK))
    driver.apply(Answered(1, 1, OK))
    assert driver.recorded(last=1) == [("orquestracao_encerrada", None)], "the end is recorded all the same"
