from oraculo.core.unread_queues import UnreadQueues


def on_trial() -> UnreadQueues:
    """Since 110, after two that failed within 3 s."""
    queues = UnreadQueues()
    for made in (100, 105):
        queues.made("q", made)
        queues.failed("q", "not permitted", made + 3)
    queues.made("q", 110)
    return queues


def test_a_consumer_that_fails_as_the_one_before_did_is_never_believed() -> None:
    queues = UnreadQueues()
    queues.made("q", 90)
    assert not queues.failed("q", "not permitted", 93)
    news = []
    for made in range(100, 200, 10):
        queues.made("q", made)
        news.append(queues.failed("q", "not permitted", made + 3))
        assert queues.told(made + 3) == queues.told(made + 9) == queues.told(made + 12) == {"q": "not permitted"}
    assert news == [True] + [False] * 9
    assert queues.failed("q", "no such queue", 201)
    assert queues.told(201) == {"q": "no such queue"}


def test_one_that_fails_once_may_have_been_cut_off() -> None:
    queues = UnreadQueues()
    for made in (100, 120, 140):
        queues.made("q", made)
        assert queues.told(made) == {}
        assert not queues.failed("q", "cut", made + 5)
        assert queues.told(made + 5) == {}
        queues.made("q", made + 6)
        assert queues.told(made + 7) == {}
        assert not queues.failed("q", "cut", made + 17)  # it lasted for longer than the one before


def test_one_that_waits_for_longer_is_believed_though_nothing_comes() -> None:
    queues = on_trial()
    assert queues.told(114) == {"q": "not permitted"}
    assert queues.told(115) == {}
    assert not queues.failed("q", "not permitted", 116)
    queues.made("q", 117)
    assert queues.failed("q", "not permitted", 118)  # which is news again


def test_one_that_brings_something_is_believed_at_once_and_may_be_lost_later() -> None:
    queues = on_trial()
    assert queues.told(110) == {"q": "not permitted"}
    queues.brought("q")
    assert queues.told(111) == {}
    assert not queues.failed("q", "cut", 112)
    assert queues.told(112) == {}


def test_one_that_waited_long_and_is_lost_is_told_only_when_no_other_can_be_made() -> None:
    queues = UnreadQueues()
    queues.made("q", 100)
    assert not queues.failed("q", "cut", 200)
    assert queues.told(200) == {}
    assert queues.failed("q", "refused", 201)
    assert queues.told(999) == {"q": "refused"}
    queues.made("q", 1000)
    assert queues.told(1000) == {}


def test_what_had_another_cause_is_forgiven() -> None:
    queues = UnreadQueues()
    assert queues.failed("q", "away", 101)
    queues.forgive()
    assert queues.told(101) == {}
