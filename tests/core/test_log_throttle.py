from oraculo.core.log_throttle import LogThrottle


def test_the_same_is_logged_once_a_minute_with_how_often_it_was_met() -> None:
    repeats = LogThrottle()
    assert [repeats.times("away", second) for second in range(130)] == [1, *[0] * 59, 60, *[0] * 59, 60, *[0] * 9]


def test_something_else_is_logged_at_once_and_what_comes_in_turns_is_not_logged_at_every_turn() -> None:
    repeats = LogThrottle()
    assert [repeats.times(what, 0) for what in ("away", "full", "away", "full")] == [1, 1, 0, 0]
    for second in range(10, 60, 10):
        assert [repeats.times(what, second) for what in ("away", "full")] == [0, 0]
    assert [repeats.times(what, 60) for what in ("away", "full")] == [7, 7]


def test_after_a_while_without_it_it_is_logged_at_once_and_as_one() -> None:
    repeats = LogThrottle()
    assert [repeats.times("away", second) for second in (0, 1, 2, 63, 64, 90_000)] == [1, 0, 0, 1, 0, 1]


def test_a_trouble_that_takes_long_to_fail_is_logged_once_a_minute_too() -> None:
    """An attempt at a frozen server waits 15 s for an answer, and the next one comes after a pause."""
    repeats = LogThrottle()
    assert [repeats.times("away", second) for second in range(0, 200, 20)] == [1, 0, 0, 3, 0, 0, 3, 0, 0, 3]


def test_so_many_are_remembered_and_the_one_met_longest_ago_is_forgotten() -> None:
    repeats = LogThrottle()
    for number in range(1000):
        repeats.times(number, 0)
    assert repeats.times(0, 1) == 0
    assert repeats.times("one too many", 1) == 1
    assert [repeats.times(number, 1) for number in (0, 2, 1)] == [0, 0, 1]
