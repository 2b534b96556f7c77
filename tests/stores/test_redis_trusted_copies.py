"""Which copies of runs are believed once the connection to Redis was lost. What comes of it is in
`test_redis_faults`."""

import gc

import pytest

from oraculo.core.run import RunHead
from oraculo.stores.redis.trusted_copies import TrustedCopies


def copy() -> RunHead:
    """Of the same run, each time; it is this very copy that is believed, not its like."""
    return RunHead("run", "", "", 0.0, 1.0, 1.0, 1)


def test_over_the_first_connection_every_copy_is_believed() -> None:
    """None can be of another server; and a start from nothing has read none of them."""
    assert TrustedCopies().holds(copy(), 1)


def test_after_it_only_what_the_present_one_brought_is() -> None:
    belief, before, now = TrustedCopies(), copy(), copy()
    belief.note([before], 1)
    belief.note([now], 2)
    assert belief.holds(now, 2)
    assert not belief.holds(before, 2)
    assert not belief.holds(copy(), 2)


def test_nothing_of_it_is_believed_when_it_was_lost_too() -> None:
    belief, before, now = TrustedCopies(), copy(), copy()
    belief.note([before], 2)
    assert not belief.holds(before, 3), "before anything came over the third"
    belief.note([now], 3)
    assert not belief.holds(before, 3)
    assert belief.holds(now, 3)


def test_copies_that_come_one_after_the_other_are_all_believed() -> None:
    belief, copies = TrustedCopies(), [copy() for _ in range(3)]
    belief.note(copies[:1], 2)
    belief.note(copies[1:], 2)
    assert all(belief.holds(one, 2) for one in copies)


@pytest.mark.parametrize("late", [1, 2])
def test_what_comes_late_over_a_lost_connection_is_not_believed_and_takes_nothing_away(late: int) -> None:
    """A read that began before the loss may end after others over the new connection."""
    belief, before, now = TrustedCopies(), copy(), copy()
    belief.note([now], 3)
    belief.note([before], late)
    assert not belief.holds(before, 3)
    assert not belief.holds(before, 2)
    assert belief.holds(now, 3)


def test_who_asks_for_a_lost_connection_learns_nothing_of_the_present_one() -> None:
    belief, now = TrustedCopies(), copy()
    belief.note([now], 3)
    assert not belief.holds(now, 2)


def test_a_copy_in_the_place_of_one_that_is_gone_is_not_taken_for_it() -> None:
    """Nor are copies kept for it."""
    belief = TrustedCopies()
    gone = [copy() for _ in range(100)]
    belief.note(gone, 2)
    del gone
    gc.collect()
    assert not any(belief.holds(copy(), 2) for _ in range(100))
    assert not belief._copies
