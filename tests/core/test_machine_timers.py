"""Deadlines: of a task, of the run; and what depends on what did not come."""

import pytest

from oraculo.core.events import Progressed, RunDue, Sent, TaskDue, Untaken
from oraculo.core.machine import Verdict
from oraculo.core.phase import QueueLook
from oraculo.core.run import Cause, TaskStatus

from .building import START, Driver, fan_out, flow

# -- the run's deadline -----------------------------------------------------------------------------------------


def test_at_the_runs_deadline_what_is_open_is_marked_and_the_run_ends() -> None:
    driver = fan_out("a", "b", "c", timeout=30).sent()
    driver.ok("a")
    assert driver.at(29.9).run_due() is Verdict.NOTHING
    assert driver.at(30).run_due() is Verdict.APPLIED
    assert driver.statuses == {"a": "concluida", "b": "timeout", "c": "timeout"}
    assert driver.status == "parcial"
    assert (driver.task("b").cause, driver.task("b").reason) == (Cause.RUN_DEADLINE, "no answer in 30 s")
    assert driver.head.due_at is None
    assert driver.recorded(last=3) == [
        ("tarefa_timeout", "b"),
        ("tarefa_timeout", "c"),
        ("orquestracao_encerrada", None),
    ]


def test_a_run_of_which_nothing_was_ever_confirmed_ends_too() -> None:
    driver = fan_out("a", timeout=30).at(31)
    driver.run_due()
    assert (driver.status, driver.task("a").unsent) == ("timeout", False)
    assert driver.task("a").reason == "not sent in 30 s"


@pytest.mark.parametrize("untaken", [{"a": "no room"}, {None: "no room"}, {"a": "no room", None: "away"}])
def test_it_says_why_nothing_was_confirmed_if_that_is_known(untaken: Untaken) -> None:
    driver = fan_out({"fila": "a", "timeout": 20}, "b", timeout=30)
    driver.at(21).apply(TaskDue(0, untaken))
    driver.at(31).apply(RunDue({**untaken, "b": "it is locked"}))
    assert driver.task("a").reason == "not sent in 20 s: the broker did not take the command (no room)"
    assert driver.task("b").reason == "not sent in 30 s: the broker did not take the command (it is locked)"


NOBODY, TWO_WAIT = QueueLook(START, 2, 0, 0), QueueLook(START, 2, 1, 1)


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (NOBODY, "; nobody listened on queue a"),
        (QueueLook(START, 2, None, 0), "; nobody listened on queue a"),
        (QueueLook(START, 0, 1, 0), ""),  # a plain worker of Redis is not seen while it works
        (TWO_WAIT, "; 2 messages waited in queue a, where 1 listened"),
        (QueueLook(START, 1, 0, None), "; 1 message waited in queue a, and nobody seemed to take it"),
        (QueueLook(START, 2, 0, None), "; 2 messages waited in queue a, and nobody seemed to take them"),
        (QueueLook(START, 2, 0, None, delayed=2), "; 2 messages waited in queue a"),
        (QueueLook(START, 2, None, None), "; 2 messages waited in queue a"),
        (QueueLook(START, 0, 1, 1), ""),
        (QueueLook(START - 1, 1, 0, 0), ""),  # before the command was sent
    ],
)
def test_it_says_what_was_seen_of_the_queue(look: QueueLook, why: str) -> None:
    driver = fan_out("a", timeout=30).sent().at(30)
    driver.apply(RunDue(looks={("a", None): look}))
    assert driver.task("a").reason == f"no answer in 30 s{why}"


def test_of_several_brokers_the_one_that_took_the_command_was_looked_at() -> None:
    driver = fan_out("a", timeout=30)
    driver.apply(Sent(0, 1, via="redis"))
    driver.at(30).apply(RunDue(looks={("a", "redis"): NOBODY, ("a", "nats"): TWO_WAIT}))
    assert driver.task("a").reason == "no answer in 30 s; nobody listened on queue a at broker redis"


def test_who_had_it_in_work_did_not_leave_it_in_the_queue() -> None:
    driver = fan_out("a", timeout=30).sent()
    driver.apply(Progressed(0, 10.0))
    driver.at(30).apply(RunDue(looks={("a", None): TWO_WAIT}))
    assert driver.task("a").reason == "no answer in 30 s"


def test_the_deadline_that_came_is_the_one_that_is_reported() -> None:
    driver = fan_out({"fila": "a", "timeout": 60}, timeout=30).sent().at(30)
    driver.run_due()
    assert driver.task("a").reason == "no answer in 30 s"


def test_the_deadline_of_an_ended_run_is_nothing() -> None:
    driver = fan_out("a").sent()
    driver.ok("a")
    assert driver.at(1000).run_due() is Verdict.NOTHING


def test_a_pipeline_cut_by_its_deadline_skips_what_had_not_begun() -> None:
    driver = flow("a", "b<a", "c<b", "d<c,a", timeout=30).sent()
    driver.ok("a")
    driver.sent().at(30).run_due()
    assert driver.statuses == {"a": "concluida", "b": "timeout", "c": "ignorada", "d": "ignorada"}
    assert driver.status == "timeout"
    assert driver.task("c").reason == "'b' ended as timeout"
    assert driver.task("d").reason == "'c' ended as ignorada"


@pytest.mark.parametrize(
    ("own", "cause", "waited"), [(None, Cause.RUN_DEADLINE, "30 s"), (20, Cause.TASK_DEADLINE, "20 s")]
)
def test_a_failure_that_comes_before_the_timer_and_after_the_deadline_is_the_deadlines(
    own: int | None, cause: Cause, waited: str
) -> None:
    """Workers refuse what is overdue, and may be quicker than the engine's timer."""
    driver = fan_out({"fila": "a", "timeout": own} if own else "a", timeout=30).sent().at(own or 30)
    driver.fail("a", "deadline passed before it was started")
    assert (driver.status, driver.statuses, driver.task("a").cause) == ("timeout", {"a": "timeout"}, cause)
    reason = f"no success in {waited}; attempt 1 failed: deadline passed before it was started"
    assert driver.task("a").reason == reason
    assert not driver.task("a").dead_letter
    said = [("tentativa_falhou", "a"), ("tarefa_timeout", "a"), ("orquestracao_encerrada", None)]
    assert driver.recorded(last=3) == said


def test_such_a_failure_that_is_delivered_again_is_a_duplicate() -> None:
    driver = fan_out("a", timeout=30).sent().at(30)
    driver.fail("a", mark=7)
    assert driver.fail("a", mark=7, redelivered=True) is Verdict.DUPLICATE
    assert driver.fail("a", mark=9, redelivered=True) is Verdict.LATE


def test_a_failure_just_before_the_deadline_is_a_failure() -> None:
    driver = fan_out("a", timeout=30).sent().at(29.9)
    driver.fail("a", "boom")
    assert (driver.status, driver.task("a").cause) == ("erro", Cause.ANSWER)


@pytest.mark.parametrize(("run", "own"), [(30, 60), (60, 30)])
def test_a_retry_that_the_earlier_deadline_leaves_no_time_for_is_not_waited_for(run: int, own: int) -> None:
    step = {"type": "a", "timeout": own, "retry": {"maxAttempts": 2, "backoff": 40}}
    driver = flow(step, timeout=run).sent()
    driver.fail("a", "boom", jitter=0.9)
    reason = "boom (no time left for another attempt before the deadline)"
    assert (driver.statuses, driver.task("a").reason) == ({"a": "erro"}, reason)


def test_a_retry_that_waits_at_the_deadline_shows_what_failed() -> None:
    driver = flow({"type": "a", "retry": {"maxAttempts": 2, "backoff": 50}}, timeout=60).sent()
    driver.fail("a", "boom", jitter=0.9)
    driver.at(60).run_due()
    assert driver.task("a").reason == "no success in 1 min; attempt 1 failed: boom"
    assert driver.statuses == {"a": "timeout"}


# -- a task's own deadline --------------------------------------------------------------------------------------


def test_a_tasks_own_deadline_counts_from_when_it_was_decided_to_send_it() -> None:
    driver = flow("a", {"type": "b", "dependsOn": ["a"], "timeout": 5}, "c").sent()
    assert driver.task("b").due_at is None
    driver.at(100).ok("a")
    assert driver.task("b").due_at == driver.task("b").deadline == START + 105
    driver.sent()
    assert driver.at(104.9).due("b") is Verdict.NOTHING
    assert driver.at(105).due("b") is Verdict.APPLIED
    assert (driver.task("b").status, driver.task("b").cause) == (TaskStatus.TIMED_OUT, Cause.TASK_DEADLINE)
    assert driver.task("b").reason == "no answer in 5 s"
    assert driver.status == "em_execucao"


def test_the_reason_of_the_attempt_before_is_not_lost_to_a_silent_one() -> None:
    driver = flow({"type": "a", "timeout": 9}).sent()
    driver.fail("a", "disk full")
    driver.at(5).due("a")
    driver.sent().at(9).due("a")
    assert driver.task("a").reason == "no answer to attempt 2 in 9 s; attempt 1 failed: disk full"


def test_a_tasks_timeout_is_over_all_its_attempts_and_is_not_retried() -> None:
    driver = flow({"type": "a", "timeout": 5, "retry": {"maxAttempts": 3, "backoff": 2}}).sent()
    driver.at(3).fail("a", jitter=0.5)
    driver.at(4).due("a")
    assert driver.task("a").deadline == driver.task("a").due_at == START + 5
    driver.sent().at(5).due("a")
    assert (driver.statuses, driver.task("a").attempt, driver.dead_letters) == ({"a": "timeout"}, 2, [])


def test_a_retry_that_is_rung_after_the_deadline_is_the_timeout() -> None:
    driver = flow({"type": "a", "timeout": 5, "retry": {"maxAttempts": 3, "backoff": 2}}).sent()
    driver.at(3).fail("a", "boom", jitter=0.5)
    driver.at(5).due("a")
    assert driver.statuses == {"a": "timeout"}
    assert driver.task("a").reason == "no success in 5 s; attempt 1 failed: boom"


def test_a_destination_may_have_its_own_timeout() -> None:
    driver = fan_out({"fila": "a", "timeout": 2}, "b").sent().at(2)
    assert driver.due("a") is Verdict.APPLIED
    assert driver.statuses == {"a": "timeout", "b": "em_execucao"}


def test_the_timer_of_an_ended_task_or_of_one_without_any_is_nothing() -> None:
    driver = fan_out({"fila": "a", "timeout": 2}, "b").sent()
    assert driver.at(1000).due("b") is Verdict.NOTHING
    driver.ok("a")
    assert driver.due("a") is Verdict.NOTHING


def test_the_timer_of_a_blocked_task_is_nothing() -> None:
    driver = flow("a", {"type": "b", "dependsOn": ["a"], "timeout": 1})
    assert driver.at(100).apply(TaskDue(1)) is Verdict.NOTHING


# -- the end status ---------------------------------------------------------------------------------------------


def ended(driver: Driver, **outcomes: str) -> Driver:
    """End the run with these outcomes: ok, erro, tarde (the task's deadline) or prazo (the run's)."""
    driver.sent()
    for name, outcome in outcomes.items():
        driver.sent()
        if outcome == "ok":
            driver.ok(name)
        elif outcome == "erro":
            driver.fail_for_good(name)
        elif outcome == "tarde":
            driver.at(10).due(name)
    driver.at(300).run_due()
    return driver


def _own_deadline(outcomes: dict[str, str], name: str) -> dict[str, float]:
    """Return the timeout of a step, or none for one that the run's deadline shall end."""
    return {} if outcomes.get(name) == "prazo" else {"timeout": 10}


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ({"a": "ok", "b": "ok"}, "concluida"),
        ({"a": "ok", "b": "erro"}, "parcial"),
        ({"a": "ok", "b": "prazo"}, "parcial"),
        ({"a": "ok", "b": "tarde"}, "parcial"),
        ({"a": "erro", "b": "erro"}, "erro"),
        ({"a": "prazo", "b": "prazo"}, "timeout"),
        ({"a": "tarde", "b": "tarde"}, "timeout"),
        ({"a": "erro", "b": "prazo"}, "erro"),
    ],
)
def test_the_end_of_a_fan_out(outcomes: dict[str, str], status: str) -> None:
    driver = fan_out(*({"fila": name} | _own_deadline(outcomes, name) for name in ("a", "b")), timeout=300)
    assert ended(driver, **outcomes).status == status


PIPELINE_ENDS = [
    ({"a": "ok", "b": "ok", "c": "ok"}, "concluida"),
    ({"a": "ok", "b": "erro", "c": "ok"}, "erro"),
    ({"a": "ok", "b": "tarde", "c": "ok"}, "erro"),
    ({"a": "ok", "b": "prazo", "c": "ok"}, "timeout"),
    ({"a": "ok", "b": "ok", "c": "erro"}, "parcial"),
    ({"a": "ok", "b": "ok", "c": "tarde"}, "parcial"),
    ({"a": "ok", "b": "ok", "c": "prazo"}, "parcial"),
    ({"a": "ok", "b": "prazo", "c": "erro"}, "timeout"),
    ({"a": "ok", "b": "erro", "c": "prazo"}, "erro"),
    # nothing succeeded: the same rules
    ({"a": "erro", "c": "erro"}, "erro"),
    ({"a": "tarde", "c": "prazo"}, "erro"),
    ({"a": "prazo", "c": "prazo"}, "timeout"),
    ({"a": "prazo", "c": "erro"}, "timeout"),
    ({"a": "tarde", "c": "tarde"}, "erro"),
]


@pytest.mark.parametrize(("outcomes", "status"), PIPELINE_ENDS)
def test_the_end_of_a_pipeline(outcomes: dict[str, str], status: str) -> None:
    driver = flow(
        {"type": "a"} | _own_deadline(outcomes, "a"),
        {"type": "b", "dependsOn": ["a"]} | _own_deadline(outcomes, "b"),
        {"type": "c", "optional": True} | _own_deadline(outcomes, "c"),
    )
    assert ended(driver, **outcomes).status == status


@pytest.mark.parametrize("own", [299.0, 300.0])
@pytest.mark.parametrize("rings_first", ["task", "run"])
def test_which_deadline_came_first_does_not_depend_on_which_timer_rang_first(own: float, rings_first: str) -> None:
    driver = flow({"type": "a", "timeout": own}).sent().at(300)
    if rings_first == "task":
        driver.due("a")
    driver.run_due()
    assert (driver.status, driver.task("a").cause) == ("erro", Cause.TASK_DEADLINE)


@pytest.mark.parametrize("rings_first", ["task", "run"])
def test_a_deadline_of_its_own_behind_that_of_the_run_is_not_the_one_that_passed(rings_first: str) -> None:
    driver = flow("a", {"type": "b", "dependsOn": ["a"], "timeout": 200}).sent()
    driver.at(250).ok("a")
    driver.sent().at(500)
    if rings_first == "task":
        driver.due("b")
    driver.run_due()
    assert (driver.status, driver.task("b").cause) == ("timeout", Cause.RUN_DEADLINE)


def test_a_retry_whose_moment_comes_with_the_deadline_is_not_begun() -> None:
    driver = flow("a").sent()
    driver.fail("a", "disk full")
    driver.at(300).due("a")
    assert (driver.task("a").attempt, driver.status) == (1, "timeout")
    assert driver.task("a").reason == "no success in 5 min; attempt 1 failed: disk full"


def test_a_retry_that_was_not_sent_keeps_the_reason_of_the_attempt_before() -> None:
    driver = flow("a").sent()
    driver.fail("a", "disk full")
    driver.at(5).due("a")
    driver.at(300).run_due()
    assert driver.task("a").reason == "attempt 2 not sent in 5 min; attempt 1 failed: disk full"


@pytest.mark.parametrize(("outcome", "status"), [("ok", "concluida"), ("erro", "erro"), ("tarde", "timeout")])
def test_the_end_of_a_pipeline_of_optional_steps_alone(outcome: str, status: str) -> None:
    driver = flow({"type": "a", "timeout": 10, "optional": True})
    assert ended(driver, a=outcome).status == status


def test_other_branches_go_on_when_one_fails() -> None:
    driver = flow("a", "b<a", "c", "d<c").sent()
    driver.fail_for_good("a")
    assert driver.statuses == {"a": "erro", "b": "ignorada", "c": "em_execucao", "d": "pendente"}
    assert driver.status == "em_execucao"
    driver.ok("c")
    driver.sent().ok("d")
    assert driver.status == "erro"


def test_what_depends_on_a_failed_optional_step_is_skipped_and_the_run_is_partial() -> None:
    driver = flow({"type": "a", "optional": True}, "b<a", "c<b", "d").sent()
    driver.fail_for_good("a")
    assert driver.statuses == {"a": "erro", "b": "ignorada", "c": "ignorada", "d": "em_execucao"}
    driver.ok("d")
    assert driver.status == "parcial"


def test_a_failure_skips_all_behind_it_though_some_were_skipped_before() -> None:
    driver = flow("a", "b", "c<a,b", "d<b").sent()
    driver.fail_for_good("a")
    driver.fail_for_good("b")
    assert driver.statuses == {"a": "erro", "b": "erro", "c": "ignorada", "d": "ignorada"}
    assert driver.status == "erro"


def test_a_step_behind_two_failures_is_skipped_once() -> None:
    driver = flow("a", "b", "c<a,b", "d<c").sent()
    driver.fail_for_good("a")
    assert driver.task("c").reason == "'a' ended as erro"
    assert driver.task("c").cause is Cause.DEPENDENCY
    driver.fail_for_good("b")
    assert driver.head.skipped == 2
    assert [what for what, _ in driver.recorded()].count("tarefa_ignorada") == 2
