"""The delivery of the aggregate: to a webhook, to a queue, again, given up."""

from oraculo.core.events import Delivered, DeliveryFailed, DeliveryMoved, Repeated
from oraculo.core.machine import Verdict
from oraculo.core.machine.delivery import DELIVERY_LEASE
from oraculo.core.run import DeliveryStatus

from .building import START, Driver, fan_out

LEASE = START + DELIVERY_LEASE


def ended(**request: object) -> Driver:
    driver = fan_out("a", **({"webhook": "http://h/x", "responder_em": "q"} | request)).sent()
    driver.ok("a")
    return driver


def test_an_ended_run_is_delivered_by_whoever_ended_it_and_found_again_if_not() -> None:
    driver = ended()
    assert list(driver.changes.deliver) == [0, 1]
    assert [(one.status, one.edition, one.due_at) for one in driver.head.deliveries] == [
        (DeliveryStatus.PENDING, 1, LEASE),
        (DeliveryStatus.PENDING, 1, LEASE),
    ]
    assert driver.head.due_at == LEASE


def test_a_run_that_nobody_waits_for_is_not_delivered() -> None:
    driver = fan_out("a").sent()
    driver.ok("a")
    assert driver.changes.ended
    assert not driver.changes.deliver
    assert driver.head.due_at is None


def test_delivered() -> None:
    driver = ended()
    assert driver.apply(Delivered(0, 1)) is Verdict.APPLIED
    webhook, queue = driver.head.deliveries
    assert (webhook.status, webhook.attempts, webhook.due_at, webhook.error) == ("entregue", 1, None, None)
    assert (queue.status, driver.head.due_at) == ("pendente", LEASE)
    assert (driver.history[-1].what, driver.history[-1].detail) == ("entrega_concluida", "webhook http://h/x, versao 1")
    driver.apply(Delivered(1, 1))
    assert driver.head.due_at is None


def test_a_delivery_that_is_reported_twice_changes_nothing() -> None:
    driver = ended()
    driver.apply(Delivered(0, 1))
    assert driver.apply(Delivered(0, 1)) is Verdict.NOTHING
    assert driver.apply(DeliveryFailed(0, 1, "x", START + 9)) is Verdict.NOTHING


def test_a_failed_delivery_is_tried_again_when_it_is_due() -> None:
    driver = ended()
    assert driver.apply(DeliveryFailed(0, 1, "answered 500", START + 4)) is Verdict.APPLIED
    webhook = driver.head.deliveries[0]
    assert (webhook.status, webhook.attempts, webhook.error) == ("pendente", 1, "answered 500")
    assert driver.head.due_at == START + 4
    assert driver.history[-1].detail == "webhook http://h/x: answered 500"
    assert driver.at(3).run_due() is Verdict.NOTHING
    assert driver.at(4).run_due() is Verdict.APPLIED
    assert driver.changes.deliver == (0,), "the other's time has not come"
    assert not driver.changes.ended
    assert webhook.due_at == START + 4 + DELIVERY_LEASE
    assert driver.head.due_at == LEASE, "the other's is next"
    driver.apply(Delivered(0, 1))
    assert (webhook.status, webhook.attempts, webhook.error) == ("entregue", 2, None)


def test_a_delivery_is_given_up() -> None:
    driver = ended(responder_em=None)
    driver.apply(DeliveryFailed(0, 1, "gone", None))
    webhook = driver.head.deliveries[0]
    assert (webhook.status, webhook.error, driver.head.due_at) == ("nao_entregue", "gone", None)
    assert driver.recorded(last=1) == [("entrega_abandonada", None)]
    assert driver.apply(Delivered(0, 1)) is Verdict.NOTHING
    assert driver.at(1000).run_due() is Verdict.NOTHING


def test_a_new_edition_is_delivered_anew_and_news_of_the_old_one_is_nothing() -> None:
    driver = fan_out("a", webhook="http://h").sent()
    driver.fail_for_good("a")
    driver.apply(DeliveryFailed(0, 1, "gone", None))
    driver.at(50).apply(Repeated())
    assert driver.head.due_at == driver.head.deadline
    driver.ok("a")
    webhook = driver.head.deliveries[0]
    assert (webhook.status, webhook.edition, webhook.attempts, webhook.error) == ("pendente", 2, 0, None)
    assert driver.changes.deliver
    assert driver.apply(Delivered(0, 1)) is Verdict.NOTHING
    assert driver.apply(DeliveryFailed(0, 1, "x", None)) is Verdict.NOTHING
    assert driver.apply(Delivered(0, 2)) is Verdict.APPLIED


def test_news_of_a_delivery_does_not_move_the_deadline_of_a_reopened_run() -> None:
    driver = fan_out("a", webhook="http://h").sent()
    driver.fail_for_good("a")
    driver.at(50).apply(Repeated())
    assert driver.apply(DeliveryFailed(0, 1, "x", START + 60)) is Verdict.APPLIED
    assert driver.head.due_at == START + 350


def test_whoever_has_a_delivery_may_keep_it_for_longer() -> None:
    driver = ended()
    entries = len(driver.history)
    assert driver.apply(DeliveryMoved(0, 1, LEASE, START + 70)) is Verdict.APPLIED
    webhook, queue = driver.head.deliveries
    assert (webhook.due_at, queue.due_at, driver.head.due_at) == (START + 70, LEASE, LEASE)
    assert (webhook.status, webhook.attempts, len(driver.history)) == ("pendente", 0, entries)
    driver.apply(Delivered(1, 1))
    assert driver.head.due_at == START + 70
    assert driver.at(69).run_due() is Verdict.NOTHING


def test_a_delivery_that_another_engine_has_taken_over_or_made_is_nobody_elses_to_keep() -> None:
    driver = ended(responder_em=None)
    driver.at(15).run_due()
    assert driver.apply(DeliveryMoved(0, 1, LEASE, START + 70)) is Verdict.NOTHING
    assert driver.head.due_at == LEASE + DELIVERY_LEASE
    assert driver.apply(DeliveryMoved(0, 2, LEASE + DELIVERY_LEASE, START + 70)) is Verdict.NOTHING
    driver.apply(Delivered(0, 1))
    assert driver.apply(DeliveryMoved(0, 1, None, START + 70)) is Verdict.NOTHING
    assert driver.head.due_at is None
