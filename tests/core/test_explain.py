"""One sentence: why a run is not finished, what it waits for, until when, what happens then."""

import pytest

from oraculo.core.events import Cancelled, Delivered, DeliveryFailed, Event, Progressed, Redriven, Sent, TaskDue
from oraculo.core.explain import Audience, explain
from oraculo.pipeline.bridges import ForeignQueue
from oraculo.wire.timestamps import to_iso

from .building import START, Driver, fan_out, flow


def why(driver: Driver, **audiences: Audience) -> str:
    sentence = explain(driver.run, driver.now, audiences)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_a_run_that_waits_for_an_answer() -> None:
    driver = fan_out("a", "b", timeout=30).sent()
    driver.ok("b")
    assert why(driver.at(10)) == (
        "Run abc123 has 1 of 2 tasks open and waits for 'a' (attempt 1 of 3, sent 10 s ago); it waits until "
        "2025-10-14T12:00:30.000Z (20 s from now), when what has not answered is marked timeout and the run ends as "
        "parcial with what it has."
    )


def test_a_fan_out_that_has_nothing_yet() -> None:
    assert "the run ends as timeout unless an answer comes." in why(fan_out("a").sent())


def test_that_nobody_listens_is_reported_when_it_is_known() -> None:
    driver = fan_out("a").sent()
    assert "sent 0 s ago, and nobody listens on queue a);" in why(driver, a=Audience(0, 0))
    assert "nobody" not in why(driver, a=Audience(1, 0))
    assert "nobody" not in why(driver, a=Audience(None, 0))
    assert "nobody" not in why(driver)


def test_somebody_who_took_a_message_and_was_not_heard_of_since_may_be_at_work() -> None:
    sentence = why(fan_out("a").sent(), a=Audience(0, 2))
    assert "nobody listens on queue a now, but somebody took 2 messages of it and is at work, or gone);" in sentence
    assert "nobody" not in why(fan_out("a").sent(), a=Audience(None, 2))


def test_of_several_brokers_it_is_the_one_with_the_command_where_nobody_listens() -> None:
    here, nobody, unknown = Audience(1, 0), Audience(0, 0), Audience(None, 0)
    driver = fan_out("a")
    driver.apply(Sent(0, 1, via="redis"))
    elsewhere = why(driver, a=Audience(1, 3, at={"redis": nobody, "rabbitmq": Audience(1, 3)}))
    assert "sent 0 s ago, and nobody listens on queue a at broker redis);" in elsewhere
    assert "nobody listens on queue a at broker redis);" in why(
        driver, a=Audience(0, 0, at={"redis": nobody, "nats": unknown})
    )
    assert "nobody listens on queue a);" in why(driver, a=Audience(0, 0, at={"redis": nobody, "rabbitmq": nobody}))
    took = Audience(1, 1, at={"redis": Audience(0, 1), "rabbitmq": here})
    assert "nobody listens on queue a at broker redis now, but somebody took 1 message of it" in why(driver, a=took)
    assert "nobody" not in why(driver, a=Audience(1, 0, at={"redis": here, "rabbitmq": nobody}))
    assert "nobody" not in why(driver, a=Audience(0, 0, at={"rabbitmq": nobody})), "redis is away, and not asked"


def test_that_a_command_is_no_longer_in_its_queue_is_reported_after_a_while() -> None:
    driver, taken = fan_out("a", timeout=30).sent(), ", and no longer in queue a: whoever took it is at work, or gone, "
    assert taken not in why(driver.at(9), a=Audience(1, 0))
    assert f"sent 10 s ago{taken}or the queue was emptied);" in why(driver.at(10), a=Audience(1, 0))
    assert taken in why(driver, a=Audience(None, 0))
    assert taken not in why(driver, a=Audience(1, 0, ready=1)), "it may be that one"
    assert taken not in why(driver), "nothing is known of the queue"
    assert taken not in why(driver, a=Audience(1, 0, at={"redis": Audience(1, 0)})), "nor of its broker"
    assert taken not in why(driver, a=Audience(1, 0, 0, 2, {0: "delivered too often"})), "it is known where it is"
    driver.apply(Progressed(0, None, "baixando"))
    assert taken not in why(driver, a=Audience(1, 0)), "somebody is at work"
    bridged, audience = fan_out("celery://t").sent().at(10), Audience(1, 0, is_bridged=True)
    assert "no longer" not in explain(bridged.run, bridged.now, {"ponte-celery": audience}), "it was handed on"


def test_that_a_command_is_gone_from_a_queue_where_nobody_listens_is_reported_after_a_while() -> None:
    driver = fan_out("a", timeout=30).sent()
    both = ", and nobody listens on queue a, and it is no longer there: whoever took it is at work, or gone, or the "
    assert "no longer" not in why(driver.at(9), a=Audience(0, 0))
    assert f"sent 10 s ago{both}queue was emptied);" in why(driver.at(10), a=Audience(0, 0))
    assert f"{both}queue was emptied; if nobody is at work on it, it may be in a.dlq" in why(
        driver, a=Audience(0, 0, dead_letters=1)
    )
    assert "no longer" not in why(driver, a=Audience(0, 0, ready=1)), "it may be that one"
    assert "no longer" not in why(driver, a=Audience(0, 1)), "somebody took one"
    assert "no longer" not in why(driver, a=Audience(0, 0, is_bridged=True)), "it was handed on"
    assert "no longer" not in why(driver, a=Audience(0, 0, 0, 1, {0: "delivered too often"})), "it is known where it is"


def test_how_many_messages_wait_in_the_queue_is_reported_after_a_while() -> None:
    driver = fan_out("a", timeout=30).sent()
    assert "wait in" not in why(driver.at(9), a=Audience(2, 0, ready=27))
    assert "sent 10 s ago, and 27 messages wait in queue a, where 2 listen);" in why(
        driver.at(10), a=Audience(2, 0, ready=27)
    )
    assert "sent 10 s ago, and 1 message waits in queue a, where 1 listens);" in why(driver, a=Audience(1, 1, ready=1))
    assert "took 2 messages of it and is at work, or gone, and 3 messages wait in queue a);" in why(
        driver, a=Audience(0, 2, ready=3)
    )
    assert "nobody listens on queue a);" in why(driver, a=Audience(0, 0, ready=3)), "that says enough"
    driver.apply(Progressed(0, None, "baixando"))
    assert "wait in" not in why(driver, a=Audience(2, 0, ready=27)), "somebody is at work"


def test_where_it_is_not_known_who_listens_nobody_seems_to_take_what_only_waits() -> None:
    driver = fan_out("a", timeout=30).sent().at(10)
    assert "sent 10 s ago, and 27 messages wait in queue a, and nobody seems to take them);" in why(
        driver, a=Audience(None, 0, ready=27)
    )
    assert "1 message waits in queue a, and nobody seems to take it);" in why(driver, a=Audience(None, 0, ready=1))
    assert "27 messages wait in queue a);" in why(driver, a=Audience(None, None, ready=27)), "somebody may hold some"
    assert "27 messages wait in queue a);" in why(driver, a=Audience(None, 1, ready=27)), "somebody is at work"
    assert "2 messages wait in queue a);" in why(driver, a=Audience(None, 0, ready=2, delayed=2)), "nobody may yet"


def test_where_a_bridge_hands_it_on_and_how_it_is_there_is_told() -> None:
    def told_behind(seconds: float, foreign: ForeignQueue | None, *news: Event) -> str:
        driver = fan_out("celery://loja.cobrar?queue=alta", timeout=30).sent().at(seconds)
        for event in news:
            driver.apply(event)
        there = {} if foreign is None else {"celery://loja.cobrar?queue=alta": foreign}
        audiences = {"ponte-celery": Audience(1, 0, is_bridged=True, foreign=there)}
        return explain(driver.run, driver.now, audiences)

    sent, queue = "sent 10 s ago to celery://loja.cobrar?queue=alta", "Celery's queue alta"
    assert f"{sent});" in told_behind(10, None)
    assert f"{sent}, and 2 messages wait in {queue}, where 1 listens);" in told_behind(
        10, ForeignQueue(queue, 2, listening=1)
    )
    assert f"{sent}, and 1 message waits in {queue}, and nobody seems to take it);" in told_behind(
        10, ForeignQueue(queue, 1, held=0)
    )
    assert f"{sent}, and 2 messages wait in {queue});" in told_behind(10, ForeignQueue(queue, 2, held=1)), (
        "in work, perhaps"
    )
    assert f"{sent}, and 2 messages wait in {queue});" in told_behind(10, ForeignQueue(queue, 2)), "it is not known"
    assert f"{sent});" in told_behind(10, ForeignQueue(queue, 0, held=0))
    assert "wait in" not in told_behind(9, ForeignQueue(queue, 2, listening=1)), "it may just be taken"
    assert f"alta, and nobody listens on {queue});" in told_behind(0, ForeignQueue(queue, 2, listening=0))
    assert f"alta, and {queue} is paused);" in told_behind(0, ForeignQueue(queue, 2, held=0, is_paused=True))
    begun = Progressed(0, 40, None)
    assert f"{sent}, 40 % done);" in told_behind(10, ForeignQueue(queue, 5, held=1), begun), "somebody has taken it"
    assert f"{sent}, 40 % done);" in told_behind(10, ForeignQueue(queue, 5, is_paused=True), begun)
    lost = ForeignQueue(queue, 5, held=0, is_paused=True)
    assert f"40 % done, and {queue} is paused);" in told_behind(10, lost, begun), "nobody is at work on any now"
    assert f"40 % done, and nobody listens on {queue});" in told_behind(10, ForeignQueue(queue, 5, listening=0), begun)


def test_of_several_brokers_it_is_the_one_with_the_command_where_messages_wait() -> None:
    driver = fan_out("a", timeout=30)
    driver.apply(Sent(0, 1, via="redis"))
    at = {"redis": Audience(1, 0, ready=2), "rabbitmq": Audience(1, 0, ready=5)}
    assert ", and 2 messages wait in queue a at broker redis, where 1 listens);" in why(
        driver.at(10), a=Audience(1, 0, ready=7, at=at)
    )


def test_a_command_that_is_a_dead_letter_is_reported_with_its_reason() -> None:
    quarantined = Audience(1, 0, 5, 2, {0: "delivered too\noften"})
    sentence = why(fan_out("a", "b").sent(), a=quarantined, b=quarantined)
    assert (
        "'a' (attempt 1 of 3, sent 0 s ago, and its command is in a.dlq: delivered too often; look at it with "
        "`oraculo dlq list a`, and redrive or discard it) and 'b' (attempt 1 of 3, sent 0 s ago);"
    ) in sentence


def test_that_the_command_of_an_ended_task_is_a_dead_letter_is_reported_where_nobody_answered_it() -> None:
    driver = fan_out("a", "b", "c", timeout=30).sent("a", "b")
    driver.fail_for_good("b")
    driver.at(30).run_due()
    found, counted = Audience(1, 0, 0, 2, {0: "delivered too often", 1: "failed for good"}), Audience(1, 0, 0, 2)
    sentence = why(driver, a=found, b=found, c=counted)
    assert (
        "'a' timeout: no answer in 30 s, and its command is in a.dlq: delivered too often; look at it with "
        "`oraculo dlq list a`, and redrive or discard it; 'b' erro: "
    ) in sentence
    assert "b.dlq" not in sentence, "that is where each goes that failed"
    assert "c.dlq" not in sentence, "it was never sent"
    assert "; if nobody is at work on it, it may be in a.dlq, which has 2" in why(driver, a=counted)
    assert "dlq" not in why(driver, a=counted._replace(is_bridged=True))


def test_dead_letters_are_counted_where_it_is_not_known_whose_they_are() -> None:
    driver = fan_out("a").sent().at(10)
    assert (
        "; if nobody is at work on it, it may be in a.dlq, which has 2 dead letters: `oraculo dlq list a` shows it);"
    ) in why(driver, a=Audience(1, 0, 0, 2))
    assert "may be in a.dlq, which has 1 dead letter:" in why(driver, a=Audience(0, 0, 0, 1))
    assert "dlq" not in why(driver, a=Audience(1, 0))
    assert "dlq" not in why(driver, a=Audience(1, 0, 1, 2)), "its command may be the one that waits"
    assert "dlq" not in why(driver, a=Audience(1, 1, 0, 2)), "its command may be in work"
    assert "dlq" not in why(driver, a=Audience(1, 0, 0, 2, is_bridged=True)), "all steps behind a bridge share it"


def test_no_command_is_suspected_to_be_a_dead_letter_while_somebody_may_just_be_at_work_on_it() -> None:
    driver, others = fan_out("a").sent(), Audience(1, 0, 0, 2)
    assert "dlq" not in why(driver.at(9), a=others)
    assert "dlq" in why(driver.at(10), a=others)
    driver.apply(Progressed(0, 42.0))
    assert "42 % done);" in why(driver, a=others)
    driver.apply(Progressed(0, None, "baixando"))
    assert "dlq" not in why(driver, a=others)
    assert "it may be in a.dlq" in why(driver, a=Audience(0, 0, 0, 2)), "its worker has ended since"


def test_brokers_that_cannot_be_used_are_reported_while_the_run_is_open() -> None:
    driver = fan_out("a").sent()
    troubles = {"broker rabbitmq": "cannot reach RabbitMQ:\nrefused", "queue resultados": "no majority"}
    assert (
        "sent 0 s ago); broker rabbitmq cannot be used (cannot reach RabbitMQ: refused); queue resultados cannot be "
        "used (no majority); it waits until"
    ) in explain(driver.run, driver.now, {}, troubles)
    driver.ok("a")
    assert "rabbitmq" not in explain(driver.run, driver.now, {}, troubles)


def test_a_queue_that_does_not_take_a_command_is_not_called_useless() -> None:
    driver = fan_out("a")
    sentence = explain(driver.run, driver.now, {}, {}, {"a": "2 MB are too much"})
    assert "; queue a does not take the command (2 MB are too much); it waits until" in sentence


def test_a_command_that_the_broker_did_not_take() -> None:
    assert "'a' (attempt 1 of 3, not yet confirmed by the broker on queue a)" in why(fan_out("a"))


def test_a_retry_that_is_awaited() -> None:
    driver = flow({"type": "a", "retry": {"backoff": 8}}).sent()
    driver.fail("a", "boom", jitter=0.5)
    assert "'a' (attempt 1 of 3 failed: boom; the next is due in 3 s)" in why(driver.at(1))


def test_what_is_overdue_is_due_now_and_the_end_is_not_promised_for_a_moment() -> None:
    driver = flow({"type": "a", "retry": {"backoff": 8}}, {"type": "b", "timeout": 20}, timeout=30).sent()
    driver.fail("a", "boom", jitter=0.5)
    sentence = why(driver.at(100))
    assert "(attempt 1 of 3 failed: boom; the next is due in 0 s)" in sentence
    assert "(attempt 1 of 3, sent 1 min 40 s ago, its own deadline in 0 s)" in sentence
    assert (
        "; it was to wait until 2025-10-14T12:00:30.000Z (1 min 10 s ago), and as soon as an engine takes that up what "
        "has not answered is marked timeout and the run ends as erro."
    ) in sentence


def test_why_nothing_is_decided_is_reported_while_the_run_is_open() -> None:
    driver = fan_out("a").sent()
    why = "no engine is alive:\nstart one"
    sentence = explain(driver.run, driver.now, {}, standstill=why)
    assert "sent 0 s ago); nothing is decided now (no engine is alive: start one); it waits until" in sentence
    driver.ok("a")
    assert "engine" not in explain(driver.run, driver.now, {}, standstill=why)


def test_whatever_others_wrote_it_stays_one_plain_sentence() -> None:
    driver = fan_out("a").sent()
    driver.fail("a", "disk\n\tfull \x1b[31mred\x07\x85\x9b0m", jitter=0.5)
    assert "failed: disk full [31mred 0m; the next" in why(driver)
    driver = fan_out("a", webhook="http://h").sent()
    driver.fail_for_good("a", "no\r\nroom\0")
    driver.apply(DeliveryFailed(0, 1, "bad\ngateway\x1b", START + 5))
    assert "('a' erro: no room)" in why(driver)
    assert "after 1 attempt (bad gateway)" in why(driver)


def test_what_lets_one_in_at_a_webhook_is_not_reported() -> None:
    driver = fan_out("a", webhook="https://user:p%40ss@h:8443/in?to=b@c&token=t").sent()
    driver.ok("a")
    assert "its aggregate for webhook https://***@h:8443/in?*** is" in why(driver)
    driver.apply(DeliveryFailed(0, 1, "no answer from https://user:pass@h/?token=t, ask me@h", START + 5))
    assert "(no answer from https://***@h/?***, ask me@h)" in why(driver)


def test_progress_and_a_deadline_of_its_own() -> None:
    driver = fan_out({"fila": "a", "timeout": 20}).sent()
    driver.apply(Progressed(0, 12.5))
    assert "(attempt 1 of 3, sent 5 s ago, 12.5 % done, its own deadline in 15 s)" in why(driver.at(5))


def test_what_is_blocked_behind_it() -> None:
    one = why(flow("a", "b<a").sent())
    assert "; 1 task behind it cannot start before; it waits until" in one
    assert one.endswith("the run ends as timeout, and what depends on them is ignorada.")
    assert "2 tasks behind them cannot start before" in why(flow("a", "b", "c<a", "d<a,b").sent())


def test_three_are_all_reported() -> None:
    assert why(fan_out(*"abc").sent()).startswith(
        "Run abc123 has 3 of 3 tasks open and waits for 'a' (attempt 1 of 3, sent 0 s ago), "
        "'b' (attempt 1 of 3, sent 0 s ago) and 'c' (attempt 1 of 3, sent 0 s ago); it waits until"
    )


def test_many_are_reported_in_part() -> None:
    sentence = why(fan_out(*"abcdef").sent())
    assert "6 of 6 tasks open" in sentence
    assert "'c' (attempt 1 of 3, sent 0 s ago) and 3 more;" in sentence
    assert "'d'" not in sentence


def test_a_quorum() -> None:
    driver = fan_out("a", "b", "c", quorum=2).sent()
    assert "it ends at once with 2 more successes (quorum 2), else it waits until" in why(driver)
    driver.ok("a")
    assert "it ends at once with 1 more success (quorum 2)" in why(driver)


def test_a_run_that_was_opened_again_although_its_quorum_is_met_needs_no_more_successes() -> None:
    driver = fan_out("a", "b", quorum=1).sent()
    driver.ok("a")
    driver.apply(Redriven(1))
    assert "quorum" not in why(driver), "it was met before; what was redriven is waited for"


@pytest.mark.parametrize(
    ("driver", "failing", "status"),
    [
        (flow("a", "b"), "a", "erro"),
        (flow("a", {"type": "b", "optional": True}), None, "parcial"),
        (flow("a", {"type": "b", "optional": True}, "c<a"), None, "timeout"),
        (flow("a", {"type": "b", "timeout": 5}), None, "erro"),
        (flow("a", {"type": "b", "timeout": 500}), None, "timeout"),
        (flow("a", "b", quorum=1), None, "parcial"),
        (fan_out("a", "b"), "a", "erro"),
        (fan_out("a", "b"), None, "parcial"),
    ],
)
def test_the_end_that_is_predicted_is_the_end_that_comes(driver: Driver, failing: str | None, status: str) -> None:
    driver.sent()
    if failing:
        driver.fail_for_good(failing)
    else:
        driver.ok("a")
    if driver.run.is_open:
        assert f"and the run ends as {status}" in why(driver)
    for task in driver.sent().run.tasks:
        if task.due_at is not None and task.due_at < driver.head.deadline:
            driver.at(task.due_at - START).apply(TaskDue(task.number))
    driver.at(300).run_due()
    assert driver.status == status


def test_the_run_ends_at_the_last_of_the_deadlines_of_their_own() -> None:
    alone = flow({"type": "a", "timeout": 3}, timeout=8).sent().at(1)
    assert why(alone).endswith(
        "; it waits until 2025-10-14T12:00:03.000Z (2 s from now), when what has not answered is marked timeout and "
        "the run ends as erro."
    )
    two = flow({"type": "a", "timeout": 3}, {"type": "b", "timeout": 5}, timeout=8).sent().at(1)
    assert why(two).endswith(
        "; what does not answer by its own deadline, the nearest 2025-10-14T12:00:03.000Z (2 s from now), is marked "
        "timeout; it waits until 2025-10-14T12:00:05.000Z (4 s from now), when what has not answered is marked timeout "
        "and the run ends as erro."
    )
    nearest = "the nearest 2025-10-14T12:00:03.000Z (1 s ago), is marked timeout; it waits until"
    assert nearest in why(two.at(4)), "whoever decides it may be late"


def test_the_run_s_own_deadline_is_the_last_of_all() -> None:
    mixed = fan_out({"fila": "a", "timeout": 3}, "b", {"fila": "c", "timeout": 90}, timeout=8).sent()
    assert why(mixed).endswith(
        "; what does not answer by its own deadline, the nearest 2025-10-14T12:00:03.000Z (3 s from now), is marked "
        "timeout; it waits until 2025-10-14T12:00:08.000Z (8 s from now), when what has not answered is marked timeout "
        "and the run ends as timeout unless an answer comes."
    )


def test_what_waits_behind_a_deadline_may_still_be_sent_until_the_run_s_own() -> None:
    driver = flow({"type": "a", "timeout": 3}, "b<a", timeout=8).sent()
    assert why(driver).endswith(
        "; it waits until 2025-10-14T12:00:03.000Z (3 s from now), when what has not answered is marked timeout and "
        "the run ends as erro, and what depends on them is ignorada; should an answer let more be sent, it ends at "
        "2025-10-14T12:00:08.000Z (8 s from now) at the latest."
    )


@pytest.mark.parametrize(
    "driver",
    [
        flow({"type": "a", "timeout": 3}, timeout=8),
        flow({"type": "a", "timeout": 3}, {"type": "b", "timeout": 5}, "c<a,b", timeout=8),
        flow({"type": "a", "timeout": 3}, "b", timeout=8),
        fan_out({"fila": "a", "timeout": 3}, {"fila": "b", "timeout": 3}, timeout=8),
        fan_out("a", timeout=8),
    ],
)
def test_the_moment_that_is_predicted_is_the_moment_of_the_end(driver: Driver) -> None:
    sentence = why(driver.sent())
    moments = sorted({task.due_at for task in driver.run.tasks if task.due_at is not None} | {driver.head.deadline})
    for moment in moments:
        driver.at(moment - START)
        for task in driver.run.tasks:
            driver.apply(TaskDue(task.number))
        driver.run_due()
        if not driver.run.is_open:
            break
    assert f"it waits until {to_iso(driver.head.ended_at or 0)} (" in sentence


def test_what_depends_on_nothing_open_is_not_named() -> None:
    driver = flow("a", "b<a", "c").sent()
    assert "what depends on them" in why(driver)
    driver.ok("a")
    driver.sent().ok("b")
    assert "depends" not in why(driver)


def test_a_quorum_that_cannot_be_met_any_more_is_not_promised() -> None:
    driver = fan_out(*"abcd", quorum=3).sent()
    driver.ok("a")
    driver.fail_for_good("b")
    assert "it ends at once with 2 more successes (quorum 3), else" in why(driver)
    driver.fail_for_good("c")
    assert "quorum" not in why(driver), "one task is open, and two would be needed"


def test_a_late_answer_that_amends_counts_for_the_quorum() -> None:
    driver = flow({"type": "a", "timeout": 3}, "b", onLate="amend", quorum=2).sent().at(3)
    driver.due("a")
    assert "it ends at once with 2 more successes (quorum 2), else" in why(driver)


def test_an_ended_run_waits_for_nothing() -> None:
    driver = fan_out("a", "b").sent().at(3)
    driver.ok("a")
    driver.fail_for_good("b", "boom")
    assert why(driver) == (
        "Run abc123 ended as parcial at 2025-10-14T12:00:03.000Z with 1 success, 1 error of 2 tasks "
        "('b' erro: boom); it waits for nothing."
    )


def test_an_ended_run_without_a_fault() -> None:
    driver = fan_out("a").sent()
    driver.ok("a")
    assert why(driver).endswith("with 1 success of 1 task; it waits for nothing.")


def test_what_was_skipped_is_counted_but_its_cause_is_reported() -> None:
    driver = flow("a", "b<a").sent()
    driver.fail_for_good("a", "boom")
    assert "1 error, 1 skipped of 2 tasks ('a' erro: boom);" in why(driver)


def test_three_failures_are_all_reported() -> None:
    driver = fan_out(*"abc").sent()
    driver.apply(Cancelled("enough"))
    assert "of 3 tasks ('a' cancelada: enough; 'b' cancelada: enough; 'c' cancelada: enough);" in why(driver)


def test_many_failures_are_reported_in_part() -> None:
    driver = fan_out(*"abcde").sent()
    driver.apply(Cancelled("enough"))
    assert "'c' cancelada: enough; 2 more)" in why(driver)


def test_the_deliveries_of_an_ended_run() -> None:
    driver = fan_out("a", webhook="http://h", responder_em="q").sent()
    driver.ok("a")
    first = "the first attempt is under way, or waits for its turn behind others for the same receiver"
    assert why(driver).endswith(
        f"of 1 task; its aggregate for webhook http://h is not delivered yet: {first}; "
        f"its aggregate for fila q is not delivered yet: {first}; it waits for nothing else."
    )
    driver.apply(DeliveryFailed(0, 1, "answered 500", START + 5))
    next_one = "and the next is under way or due within 5 s"
    assert f"is not delivered yet after 1 attempt (answered 500), {next_one};" in why(driver)
    driver.apply(DeliveryFailed(0, 1, "gone", None))
    assert "its aggregate for webhook http://h is given up after 2 attempts (gone)" in why(driver)
    driver.apply(DeliveryFailed(1, 1, "connection refused", START + 15))
    pending = (
        "its aggregate for fila q is not delivered yet (connection refused), and is tried again now or within 15 s"
    )
    assert pending in why(driver), "how often it was tried is not known: one absence of the broker is noted once"
    driver.apply(Delivered(1, 1))
    assert why(driver).endswith("its aggregate for fila q was delivered; it waits for nothing.")
