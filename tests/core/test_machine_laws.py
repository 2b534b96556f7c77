"""The tables, illegal moves, size, and random runs: whatever comes in whatever order, the laws hold."""

import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oraculo.core import machine, transitions
from oraculo.core.aggregate import aggregate
from oraculo.core.events import (
    Answered,
    Cancelled,
    DeadLetterDiscarded,
    Delivered,
    DeliveryFailed,
    Event,
    Progressed,
    Redriven,
    Repeated,
    RunDue,
    Sent,
    TaskDue,
    Unsendable,
)
from oraculo.core.machine import Verdict
from oraculo.core.run import OPEN, Cause, Run, RunStatus, TaskStatus
from oraculo.core.transitions import RUN_TRANSITIONS, TASK_TRANSITIONS, RunTrigger, Trigger
from oraculo.errors import InvariantBroken
from oraculo.pipeline.definition import Kind

from .building import OK, START, Driver, check_laws, copied, fan_out, flow, pipeline, run_of

# -- the tables -------------------------------------------------------------------------------------------------


def test_every_status_has_its_row() -> None:
    assert set(TASK_TRANSITIONS) == set(TaskStatus)
    assert set(RUN_TRANSITIONS) == set(RunStatus)


def test_every_event_has_its_handler() -> None:
    assert set(machine._HANDLERS) == set(Event.__subclasses__())


def test_what_succeeded_is_final_and_the_rest_ends_but_by_three_doors() -> None:
    assert TASK_TRANSITIONS[TaskStatus.SUCCEEDED] == {}
    assert RUN_TRANSITIONS[RunStatus.SUCCEEDED] == {}
    for status, moves in TASK_TRANSITIONS.items():
        if status not in OPEN:
            assert set(moves) <= {Trigger.REOPEN, Trigger.AMEND}
    for run_status, run_moves in RUN_TRANSITIONS.items():
        if run_status is not RunStatus.RUNNING:
            assert set(run_moves) <= {RunTrigger.REOPEN, RunTrigger.AMEND}


@pytest.mark.parametrize("status", TaskStatus)
@pytest.mark.parametrize("trigger", Trigger)
def test_a_move_is_as_the_table_says_or_breaks_and_leaves_the_state(status: TaskStatus, trigger: Trigger) -> None:
    run = fan_out("a").run
    task = run.tasks[0]
    task.status = status
    before, head, open_tasks = copied(task), copied(run.head), run.open_tasks
    after = TASK_TRANSITIONS[status].get(trigger)
    if after is None:
        with pytest.raises(InvariantBroken, match=f"run abc123, task 0: {trigger.name} is not allowed in {status}"):
            transitions.move(run, task, trigger)
        assert (task, run.head, run.open_tasks) == (before, head, open_tasks)
    else:
        transitions.move(run, task, trigger)
        assert task.status is after


@pytest.mark.parametrize("status", RunStatus)
@pytest.mark.parametrize("trigger", RunTrigger)
@pytest.mark.parametrize("after", RunStatus)
def test_a_move_of_a_run_is_as_the_table_says_or_breaks(
    status: RunStatus, trigger: RunTrigger, after: RunStatus
) -> None:
    run = fan_out("a").run
    run.head.status = status
    if after in RUN_TRANSITIONS[status].get(trigger, ()):
        transitions.move_run(run, trigger, after)
        assert run.head.status is after
    else:
        with pytest.raises(InvariantBroken, match=f"{trigger.name} from {status} to {after}"):
            transitions.move_run(run, trigger, after)
        assert run.head.status is status


# -- size: ten thousand wide, ten thousand deep -----------------------------------------------------------------

MANY = 10_000


def seconds(act: Callable[[], object]) -> float:
    started = time.process_time()
    act()
    return time.process_time() - started


def wide(count: int) -> Driver:
    return Driver(run_of({"destinos": [{"fila": f"q{n % 7}", "id": f"t{n}"} for n in range(count)]}), checked=False)


def chain(count: int) -> Driver:
    steps = [f"s{n}<s{n - 1}" if n else "s0" for n in range(count)]
    return Driver(run_of({"pipeline": "p"}, pipeline(*steps)), checked=False)


def answer_all(driver: Driver) -> None:
    for number in range(driver.head.total):
        driver.apply(Sent(number, 1))
        driver.apply(Answered(number, 1, OK))


def test_a_wide_run() -> None:
    driver = wide(MANY)
    answer_all(driver)
    assert driver.status == "concluida"
    check_laws(driver.run)
    assert len(aggregate(driver.run)["resultados"]) == MANY


def test_an_answer_on_a_wide_run_touches_one_task() -> None:
    driver = wide(MANY)
    driver.apply(Answered(5, 1, OK))
    assert len(driver.changes.tasks) == 1


def test_a_deep_run() -> None:
    driver = chain(MANY)
    answer_all(driver)
    assert driver.status == "concluida"
    check_laws(driver.run)


def test_a_deep_run_whose_first_step_fails_skips_the_rest_and_comes_back() -> None:
    driver = chain(MANY)
    driver.apply(Answered(0, 1, b"{}", True, False, "boom"))
    assert (driver.status, driver.head.skipped) == ("erro", MANY - 1)
    driver.apply(Redriven(0))
    assert driver.run.open_tasks == MANY
    check_laws(driver.run)
    driver.at(1000).apply(RunDue())
    assert (driver.status, driver.head.skipped, driver.head.timed_out) == ("timeout", MANY - 1, 1)


def test_a_deep_run_of_workers_that_name_no_task() -> None:
    driver = chain(MANY)
    for _ in range(MANY):
        driver.answer({"status": "ok"}, "resultado_execucao")
    assert driver.status == "concluida"


def test_many_that_meet_in_one_are_redriven_in_linear_time() -> None:
    count = 4_000
    middle = [f"m{n}<a" for n in range(count)]
    last = {"type": "z", "dependsOn": [f"m{n}" for n in range(count)]}
    driver = Driver(run_of({"pipeline": "p"}, pipeline("a", *middle, last)), checked=False)
    driver.apply(Answered(0, 1, b"{}", True, False, "boom"))
    took = seconds(lambda: driver.apply(Redriven(0)))
    assert driver.run.open_tasks == count + 2
    assert took < 1


@pytest.mark.parametrize("shape", [wide, chain])
def test_the_cost_is_linear(shape: Callable[[int], Driver]) -> None:
    def cost(count: int) -> float:
        return min(seconds(lambda: answer_all(shape(count))) for _ in range(2)) / count

    small, large = cost(500), cost(MANY)
    assert large < small * 5, "a run of twenty times the tasks may not cost a hundred times as much"


# -- random runs ------------------------------------------------------------------------------------------------

QUEUES = ("escavador_a", "escavador_b", "executador_c")


def random_driver(chance: Random) -> Driver:
    count = chance.randint(1, 6)
    if chance.random() < 0.3:
        destinations = [{"fila": chance.choice(QUEUES), "id": f"s{n}"} for n in range(count)]
        request = {"destinos": destinations, "timeout": 60, "webhook": "http://h"}
        return Driver(run_of(request | ({"quorum": chance.randint(1, count)} if chance.random() < 0.3 else {})))
    steps = []
    for number in range(count):
        before = [f"s{n}" for n in range(number) if chance.random() < 0.4]
        step: dict[str, Any] = {"type": chance.choice(QUEUES), "id": f"s{number}", "dependsOn": before}
        step |= {"retry": {"maxAttempts": chance.randint(1, 3), "backoff": chance.choice([0, 1, 30])}}
        step |= {"optional": True} if chance.random() < 0.3 else {}
        step |= {"timeout": chance.randint(1, 40)} if chance.random() < 0.3 else {}
        steps.append(step)
    options: dict[str, object] = {"onLate": chance.choice(["record", "amend"])}
    if chance.random() < 0.3:
        options["quorum"] = chance.randint(1, count)
    return flow(*steps, timeout=60, request={"webhook": "http://h", "responder_em": "q"}, **options)


def random_event(chance: Random, run: Run) -> Event:
    number = chance.randrange(len(run.tasks))
    task = run.tasks[number]
    attempt = chance.choice([None, task.attempt, max(1, task.attempt - 1)])
    reason, mark = "boom", chance.randint(1, 4)
    events: list[Event] = [
        Sent(number, task.attempt, dead_letter=chance.random() < 0.3),
        Answered(number, attempt, OK),
        Answered(number, attempt, b"{}", True, chance.random() < 0.7, reason, mark, chance.random()),
        Unsendable(number, task.attempt, "too large"),
        Progressed(number, chance.random() * 100, None, attempt),
        TaskDue(number),
        TaskDue(number),
    ]
    if chance.random() < 0.2:
        edition = max(1, run.head.edition - chance.randint(0, 1))
        channel = chance.randrange(len(run.head.deliveries))
        events = [
            RunDue(),
            Cancelled(),
            Repeated(),
            Redriven(number),
            DeadLetterDiscarded(number),
            Delivered(channel, edition),
            DeliveryFailed(channel, edition, "x", chance.choice([None, run.head.deadline])),
        ]
    return chance.choice(events)


def expected_end(run: Run) -> RunStatus:
    """The rules of how a run ends, said once more and another way."""
    statuses = [task.status for task in run.tasks]
    good = statuses.count(TaskStatus.SUCCEEDED)
    if good == len(statuses):
        return RunStatus.SUCCEEDED
    if run.head.cancelled:
        return RunStatus.CANCELLED
    met = run.plan.needed is not None and good >= run.plan.needed
    if run.plan.kind is Kind.PIPELINE and not met:
        required = [task for task in run.tasks if not run.plan.steps[task.number].optional]
        causes = {task.cause for task in required}
        if causes & {Cause.ANSWER, Cause.UNSENDABLE, Cause.TASK_DEADLINE}:
            return RunStatus.FAILED
        if Cause.RUN_DEADLINE in causes:
            return RunStatus.TIMED_OUT
    if good:
        return RunStatus.PARTIAL
    for task_status, status in ((TaskStatus.FAILED, RunStatus.FAILED), (TaskStatus.TIMED_OUT, RunStatus.TIMED_OUT)):
        if task_status in statuses:
            return status
    return RunStatus.CANCELLED


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**64))
def test_whatever_comes_the_laws_hold_and_the_run_ends(seed: int) -> None:
    chance = Random(seed)
    driver = random_driver(chance)
    for _ in range(chance.randint(1, 60)):
        driver.now += chance.choice([0, 0, 0.5, 5])
        driver.apply(random_event(chance, driver.run))
        if not driver.run.is_open:
            assert driver.head.status is expected_end(driver.run)
    driver.now = max(driver.now, driver.head.deadline)
    driver.run_due()
    assert not driver.run.is_open, "every run ends at its deadline"
    assert driver.head.status is expected_end(driver.run)
    aggregate(driver.run)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64))
def test_the_end_does_not_depend_on_the_order_of_the_answers(seed: int) -> None:
    chance = Random(seed)
    count = chance.randint(2, 6)
    good = [chance.random() < 0.6 for _ in range(count)]
    ends = set()
    for _ in range(4):
        driver = fan_out(*[f"t{n}" for n in range(count)])
        for number in chance.sample(range(count), count):
            driver.apply(Answered(number, 1, OK, not good[number], False, "boom"))
        ends.add((driver.status, tuple(driver.statuses.values())))
    assert len(ends) == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64))
def test_the_same_events_give_the_same_changes(seed: int) -> None:
    def play() -> tuple[object, ...]:
        chance = Random(seed)
        driver = random_driver(chance)
        verdicts = [driver.apply(random_event(chance, driver.run)) for _ in range(30)]
        return verdicts, driver.history, driver.commands, driver.run.tasks, driver.head

    assert play() == play()


def test_a_terminal_run_takes_no_timer_and_no_answer() -> None:
    driver = fan_out("a", "b").sent()
    driver.ok("a")
    driver.fail_for_good("b")
    driver.sent().at(1000)
    for event in (Sent(0, 1), Sent(1, 1), TaskDue(0), TaskDue(1), RunDue(), Answered(0, 1, OK), Answered(1, 1, OK)):
        assert driver.apply(event) is not Verdict.APPLIED
    assert (driver.status, driver.head.ended_at) == ("parcial", START)
