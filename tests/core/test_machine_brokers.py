"""A broker is lost: what it took is sent again, under the same identity."""

import pytest

from oraculo.core import machine
from oraculo.core.events import BrokerLost, RunDue, Sent
from oraculo.core.history import Happened
from oraculo.core.machine import Verdict
from tests.core.building import START, Driver, fan_out


def sent_by(driver: Driver, name: str, via: str | None) -> None:
    task = driver.task(name)
    driver.apply(Sent(task.number, task.attempt, not task.is_open, via))


def three() -> Driver:
    driver = fan_out("escavador_a", "escavador_b", "escavador_c")
    for name, via in (("escavador_a", "rabbitmq"), ("escavador_b", "redis"), ("escavador_c", "rabbitmq")):
        sent_by(driver, name, via)
    driver.commands.clear()
    return driver


def test_only_what_the_lost_broker_took_and_nobody_answered_is_sent_again() -> None:
    driver = three()
    driver.ok("escavador_a")
    assert driver.apply(BrokerLost("rabbitmq")) is Verdict.APPLIED
    assert driver.commands == [(2, 1)], "the same attempt, so that a worker knows it for a repeat"
    assert [task.unsent for task in driver.run.tasks] == [False, False, True]
    said = driver.history[-1]
    assert (said.what, said.detail) == (Happened.BROKER_LOST, "rabbitmq: 1 of its messages is sent again")


def test_it_is_in_work_all_the_time() -> None:
    driver = three()
    driver.apply(BrokerLost("rabbitmq"))
    assert driver.task("escavador_a").status == "em_execucao"
    driver.ok("escavador_a")
    assert driver.task("escavador_a").status == "concluida", "an answer that came all the same is an answer"


def test_a_second_engine_that_sees_the_loss_finds_nothing_left_to_do() -> None:
    driver = three()
    driver.apply(BrokerLost("rabbitmq"))
    assert driver.apply(BrokerLost("rabbitmq")) is Verdict.NOTHING
    sent_by(driver, "escavador_a", "redis")
    sent_by(driver, "escavador_c", "redis")
    driver.commands.clear()
    assert driver.apply(BrokerLost("rabbitmq")) is Verdict.NOTHING
    assert driver.apply(BrokerLost("redis")) is Verdict.APPLIED


def test_what_was_sent_before_anybody_noted_by_whom_is_found_as_unknown() -> None:
    driver = fan_out("escavador_a").sent()
    driver.commands.clear()
    assert driver.apply(BrokerLost(None)) is Verdict.APPLIED
    assert driver.commands == [(0, 1)]
    assert driver.history[-1].detail == "unknown: 1 of its messages is sent again"


def test_a_task_that_waits_for_its_next_attempt_is_left_alone() -> None:
    driver = three()
    driver.fail("escavador_a")
    driver.apply(BrokerLost("rabbitmq"))
    assert driver.commands == [(2, 1)]


def test_dead_letters_are_sent_again_only_when_the_memory_was_lost() -> None:
    driver = three()
    driver.fail_for_good("escavador_a")
    sent_by(driver, "escavador_a", "rabbitmq")
    driver.dead_letters.clear()
    assert driver.apply(BrokerLost("rabbitmq")) is Verdict.APPLIED
    assert (driver.commands, driver.dead_letters) == ([(2, 1)], [])
    driver.commands.clear()
    sent_by(driver, "escavador_c", "rabbitmq")
    assert driver.apply(BrokerLost("rabbitmq", dead_letters=True)) is Verdict.APPLIED
    assert (driver.commands, driver.dead_letters) == ([], [(0, 1)]), "the command was sent anew a moment ago"


@pytest.mark.parametrize(
    ("sent", "verdict"),
    [(9.0, Verdict.APPLIED), (10.0, Verdict.APPLIED), (11.0, Verdict.NOTHING), (13.0, Verdict.APPLIED)],
)
def test_what_was_sent_since_the_memory_was_lost_is_left_alone(sent: float, verdict: Verdict) -> None:
    """A message with a time in the future was sent before the clock was set back."""
    driver = fan_out("escavador_a").at(12.0)
    driver.apply(Sent(0, 1, via="rabbitmq", at=START + sent))
    driver.commands.clear()
    assert driver.apply(BrokerLost("rabbitmq", before=START + 10.0)) is verdict


@pytest.mark.parametrize(
    ("ended", "verdict"), [(9.0, Verdict.APPLIED), (10.9, Verdict.APPLIED), (12.0, Verdict.NOTHING)]
)
@pytest.mark.parametrize("is_noted", [True, False])
def test_a_dead_letter_of_a_task_that_ended_since_is_left_alone(
    ended: float, verdict: Verdict, *, is_noted: bool
) -> None:
    """The sending of its command need not be noted yet. The clocks of two engines may differ by a second."""
    driver = fan_out("escavador_a")
    if is_noted:
        driver.apply(Sent(0, 1, via="rabbitmq", at=START + 1.0))
    driver.at(ended).fail_for_good("escavador_a")
    driver.at(16.0).apply(Sent(0, 1, dead_letter=True, via="rabbitmq", at=START + ended + 0.1))
    assert driver.apply(BrokerLost("rabbitmq", dead_letters=True, before=START + 10.0)) is verdict


def test_a_dead_letter_is_sent_again_once_whoever_hears_of_the_loss() -> None:
    lost = BrokerLost("rabbitmq", dead_letters=True, before=START + 10.0)
    driver = fan_out("escavador_a")
    driver.apply(Sent(0, 1, via="rabbitmq", at=START + 1.0))
    driver.at(2.0).fail_for_good("escavador_a")
    driver.apply(Sent(0, 1, dead_letter=True, via="rabbitmq", at=START + 3.0))
    assert driver.task("escavador_a").sent_at == START + 1.0
    assert driver.at(12.0).apply(lost) is Verdict.APPLIED
    driver.at(13.0).apply(Sent(0, 1, dead_letter=True, via="rabbitmq", at=START + 12.5))
    assert driver.at(14.0).apply(lost) is Verdict.NOTHING
    again = BrokerLost("rabbitmq", dead_letters=True, before=START + 15.0)
    assert driver.at(16.0).apply(again) is Verdict.APPLIED


def test_all_that_is_sent_again_is_written_and_counted_in_the_history() -> None:
    driver = three()
    driver.apply(BrokerLost("rabbitmq"))
    assert set(driver.changes.tasks) == {0, 2}
    assert driver.history[-1].detail == "rabbitmq: 2 of its messages are sent again"
    other = three()
    other.fail_for_good("escavador_a")
    sent_by(other, "escavador_a", "rabbitmq")
    other.apply(BrokerLost("rabbitmq", dead_letters=True))
    assert set(other.changes.tasks) == {0}
    assert other.task("escavador_a").unsent
    assert other.history[-1].detail == "rabbitmq: 1 of its messages is sent again"


def test_what_was_decided_before_in_the_same_batch_is_kept() -> None:
    driver = three()
    driver.fail_for_good("escavador_a")
    sent_by(driver, "escavador_a", "rabbitmq")
    driver.fail_for_good("escavador_b")
    changes = driver.changes
    changes.commands.append((1, 2))
    machine.apply(driver.run, BrokerLost("rabbitmq", dead_letters=True), driver.now, changes)
    machine.apply(driver.run, BrokerLost("rabbitmq"), driver.now, changes)
    assert (changes.commands, changes.dead_letters) == ([(1, 2), (2, 1)], [(1, 1), (0, 1)])


def test_what_was_sent_and_lost_is_not_reported_as_never_sent() -> None:
    driver = three().at(299)
    driver.apply(BrokerLost("rabbitmq"))
    driver.at(300).run_due()
    assert driver.task("escavador_b").reason == "no answer in 5 min"
    lost = "no answer in 5 min; the broker that had the command was lost, and it was not sent again"
    assert driver.task("escavador_a").reason == lost


def test_why_what_was_lost_was_not_sent_again_is_reported() -> None:
    driver = three().at(299)
    driver.apply(BrokerLost("rabbitmq"))
    driver.at(300).apply(RunDue({"escavador_a": "it is full"}))
    said = "the broker that had the command was lost, and it was not sent again (it is full)"
    assert driver.task("escavador_a").reason == f"no answer in 5 min; {said}"
    assert driver.task("escavador_b").reason == "no answer in 5 min"
