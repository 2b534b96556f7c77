"""A command that no broker will ever take: its task fails at once, and says why."""

import pytest

from oraculo.core.events import BrokerLost, Repeated, Sent, Unsendable
from oraculo.core.history import Happened
from oraculo.core.machine import Verdict
from oraculo.core.run import Cause
from tests.core.building import Driver, fan_out, flow

TOO_LARGE = "9 bytes are too many"


def refused(driver: Driver, name: str, attempt: int = 1) -> Verdict:
    return driver.apply(Unsendable(driver.number(name), attempt, TOO_LARGE))


def test_it_fails_at_once_for_good_and_leaves_no_dead_letter() -> None:
    driver = flow({"type": "a", "retry": {"maxAttempts": 3}}, {"type": "b", "dependsOn": ["a"]})
    assert refused(driver, "a") is Verdict.APPLIED
    task = driver.task("a")
    assert (task.status, task.cause, task.reason, task.attempt) == ("erro", Cause.UNSENDABLE, TOO_LARGE, 1)
    assert not task.unsent
    assert not task.dead_letter
    assert driver.dead_letters == []
    assert driver.statuses["b"] == "ignorada"
    assert driver.status == "erro"
    assert [(entry.what, entry.detail) for entry in driver.history if entry.task == 0] == [(Happened.FAILED, TOO_LARGE)]


def test_the_others_go_on_and_an_optional_one_spoils_nothing() -> None:
    driver = flow({"type": "a", "optional": True}, "b")
    refused(driver, "a")
    assert driver.status == "em_execucao"
    driver.ok("b")
    assert driver.status == "parcial"


def test_a_quorum_can_be_met_without_it() -> None:
    driver = fan_out("escavador_a", "escavador_b", "escavador_c", quorum=1)
    refused(driver, "escavador_a")
    driver.ok("escavador_b")
    assert list(driver.statuses.values()) == ["erro", "concluida", "cancelada"]


def test_it_is_sent_again_when_the_run_is_repeated() -> None:
    driver = fan_out("escavador_a")
    refused(driver, "escavador_a")
    assert driver.apply(Repeated()) is Verdict.APPLIED
    assert driver.commands_of("escavador_a") == [1, 2]
    assert refused(driver, "escavador_a") is Verdict.NOTHING, "it speaks of the attempt before"
    driver.sent("escavador_a").ok("escavador_a")
    assert driver.status == "concluida"


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_broker_took_once_may_be_answered_yet(is_lost: bool) -> None:
    driver = fan_out("escavador_a")
    driver.apply(Sent(0, 1, via="rabbitmq"))
    if is_lost:
        driver.commands.clear()
        driver.apply(BrokerLost("rabbitmq"))
    assert refused(driver, "escavador_a") is Verdict.NOTHING
    driver.ok("escavador_a")
    assert driver.status == "concluida"


def test_after_the_deadline_it_is_late_like_any_other() -> None:
    driver = fan_out("escavador_a", timeout=30).at(30)
    assert refused(driver, "escavador_a") is Verdict.NOTHING
    driver.run_due()
    assert driver.statuses == {"escavador_a": "timeout"}
