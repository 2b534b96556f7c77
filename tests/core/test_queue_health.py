"""Queues in trouble are shown with their reason, until they work again or time has passed."""

from oraculo.core.queue_health import TroubledQueues, UnreadQueues


def test_a_troubled_queue_is_shown_for_a_while_unless_it_works() -> None:
    queues = TroubledQueues(10)
    assert not queues
    queues.note(["a", "b"], "down", 100)
    queues.note(["a"], "full", 105)
    assert queues.reasons(106) == {"b": "down", "a": "full"}
    assert (queues.has("b", 109), queues.has("b", 110), queues.has("a", 110)) == (True, False, True)
    assert queues.reasons(112) == {"a": "full"}
    queues.works(["a", "c"])
    assert queues.reasons(106) == {"b": "down"}
    queues.clear()
    assert not queues


def test_only_the_latest_thousand_queues_are_shown() -> None:
    queues = TroubledQueues(10)
    queues.note((f"q{number}" for number in range(1050)), "down", 0)
    queues.note(["q60"], "down again", 0)
    assert [*queues.reasons(1)] == [*(f"q{number}" for number in range(50, 1050) if number != 60), "q60"]


def on_trial() -> UnreadQueues:
    """Return a queue whose consumer is on trial since 110, after two that failed within 3 s."""
    queues = UnreadQueues()
    for made in (100, 105):
        queues.made("q", made)
        queues.failed("q", "not permitted", made + 3)
    queues.made("q", 110)
    return queues


def test_a_consumer_that_fails_as_soon_as_the_one_before_proves_nothing() -> None:
    queues = UnreadQueues()
    queues.made("q", 90)
    assert not queues.failed("q", "not permitted", 93)
    news = []
    for made in range(100, 200, 10):
        queues.made("q", made)
        news.append(queues.failed("q", "not permitted", made + 3))
        assert (
            queues.reasons(made + 3) == queues.reasons(made + 9) == queues.reasons(made + 12) == {"q": "not permitted"}
        )
    assert news == [True] + [False] * 9
    assert queues.failed("q", "no such queue", 201)
    assert queues.reasons(201) == {"q": "no such queue"}


def test_a_consumer_that_lasts_longer_than_the_one_before_may_have_been_cut_off() -> None:
    queues = UnreadQueues()
    for made in (100, 120, 140):
        queues.made("q", made)
        assert queues.reasons(made) == {}
        assert not queues.failed("q", "cut", made + 5)
        assert queues.reasons(made + 5) == {}
        queues.made("q", made + 6)
        assert queues.reasons(made + 7) == {}
        assert not queues.failed("q", "cut", made + 17)  # it lasted for longer than the one before


def test_a_consumer_that_waits_longer_is_proven_without_a_message() -> None:
    queues = on_trial()
    assert queues.reasons(114) == {"q": "not permitted"}
    assert queues.reasons(115) == {}
    assert not queues.failed("q", "not permitted", 116)
    queues.made("q", 117)
    assert queues.failed("q", "not permitted", 118)  # which is news again


def test_a_consumer_that_brings_a_message_is_proven_and_may_be_lost_later() -> None:
    queues = on_trial()
    assert queues.reasons(110) == {"q": "not permitted"}
    queues.brought("q")
    assert queues.reasons(111) == {}
    assert not queues.failed("q", "cut", 112)
    assert queues.reasons(112) == {}


def test_a_proven_consumer_that_is_lost_counts_only_when_no_other_can_be_made() -> None:
    queues = UnreadQueues()
    queues.made("q", 100)
    assert not queues.failed("q", "cut", 200)
    assert queues.reasons(200) == {}
    assert queues.failed("q", "refused", 201)
    assert queues.reasons(999) == {"q": "refused"}
    queues.made("q", 1000)
    assert queues.reasons(1000) == {}


def test_failures_with_another_cause_are_forgiven() -> None:
    queues = UnreadQueues()
    assert queues.failed("q", "away", 101)
    queues.forgive()
    assert queues.reasons(101) == {}
