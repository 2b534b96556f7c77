"""The state of a run: what is counted again on load, and the list of what changed."""

from oraculo.core.history import Happened
from oraculo.core.run import Changes, Run, Task, TaskStatus

from .building import START, fan_out, flow, run_of


def reloaded(run: Run, tasks: list[Task]) -> Run:
    return Run(run.head, run.plan, run.definition, run.payload, tasks)


def test_a_loaded_run_counts_what_is_open_awaited_and_missing() -> None:
    run = flow("escavador_a", "escavador_b", "c<escavador_a,escavador_b", "d").run
    tasks = [
        Task(0, TaskStatus.SUCCEEDED, attempt=1),
        Task(1, TaskStatus.RUNNING, attempt=2),
        Task(2),
        Task(3, TaskStatus.PENDING, attempt=1, unsent=True),
    ]
    loaded = reloaded(run, tasks)
    assert loaded.open_tasks == 3
    assert loaded.awaited == {True: {1}, False: {3}}
    assert loaded.awaited_on == {"escavador_b": {1}, "d": {3}}
    assert [task.missing for task in tasks] == [0, 0, 1, 0]


def test_a_run_that_has_not_begun_awaits_nothing() -> None:
    run = run_of({"destinos": ["escavador_a", "b"]})
    assert (run.open_tasks, run.awaited, run.awaited_on) == (2, {True: set(), False: set()}, {})


def test_the_tasks_of_one_queue_are_awaited_together() -> None:
    driver = fan_out({"fila": "q", "id": "1"}, {"fila": "q", "id": "2"})
    assert driver.run.awaited_on == {"q": {0, 1}}
    driver.ok("1")
    assert driver.run.awaited_on == {"q": {1}}


def test_a_task_awaits_its_retry_between_a_failure_and_the_next_attempt() -> None:
    driver = flow("a", "b<a").sent()
    assert not driver.task("a").awaits_retry
    assert not driver.task("b").awaits_retry
    driver.fail("a", jitter=0.0)
    assert driver.task("a").awaits_retry
    driver.due("a")
    assert not driver.task("a").awaits_retry


def test_changes_begin_empty_on_the_version_they_were_decided_on() -> None:
    run = run_of({"destinos": ["a"]})
    run.head.version = 7
    changes = Changes(run)
    assert (changes.based_on, changes.dirty, changes.ended, changes.deliver) == (7, False, False, ())
    assert (changes.tasks, changes.history, changes.commands, changes.dead_letters) == ({}, [], [], [])


def test_changes_keep_a_task_once_and_number_what_they_show() -> None:
    run = run_of({"destinos": ["a"]})
    changes = Changes(run)
    changes.touch(run.tasks[0])
    changes.touch(run.tasks[0])
    assert changes.dirty
    assert changes.tasks.keys() == {0}
    assert changes.tasks[0] is run.tasks[0]
    changes.record(START, Happened.STARTED)
    Changes(run).record(START + 1, Happened.SENT, 0, 1, "x")
    assert (changes.history[0].seq, run.head.entries) == (1, 2)
