"""Queues in trouble are shown with their reason, until they work again or time has passed."""

from oraculo.core.queue_health import QueueHealth


def test_a_queue_in_trouble_is_shown_for_a_while_unless_it_works() -> None:
    queues = QueueHealth(10)
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
    queues = QueueHealth(10)
    queues.note((f"q{number}" for number in range(1050)), "down", 0)
    queues.note(["q60"], "down again", 0)
    assert [*queues.reasons(1)] == [*(f"q{number}" for number in range(50, 1050) if number != 60), "q60"]


def test_consumers_that_are_lost_one_after_the_other_mean_trouble() -> None:
    queues = QueueHealth(10)
    news = [queues.note_unread("q", "not permitted", now, was_read=True) for now in range(100, 120, 4)]
    assert news == [False, True, False, False, False]
    assert queues.reasons(125) == {"q": "not permitted"}
    assert queues.note_unread("q", "no such queue", 125, was_read=True)
    assert queues.reasons(126) == {"q": "no such queue"}
    assert queues.reasons(136) == {}, "the last one lasts"


def test_consumers_that_last_or_bring_messages_may_be_lost() -> None:
    queues = QueueHealth(10)
    for now in (100, 120):
        assert not queues.note_unread("q", "cut", now, was_read=True)
    queues.works(["q"])
    assert not queues.note_unread("q", "cut", 121, was_read=True)
    assert queues.reasons(121) == {}


def test_a_consumer_that_cannot_be_made_means_trouble_at_once_unless_its_broker_is_away() -> None:
    queues = QueueHealth(10)
    assert queues.note_unread("q", "refused", 100, was_read=False)
    assert queues.reasons(101) == {"q": "refused"}
    queues.clear()
    assert queues.reasons(101) == {}
    assert not queues.note_unread("q", "cut", 102, was_read=True)
