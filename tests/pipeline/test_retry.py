"""Exponential backoff with full jitter, capped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oraculo.pipeline.retry import DEFAULT_RETRY, RetryPolicy

POLICY = RetryPolicy(max_attempts=10, backoff=2.0, max_backoff=60.0)


@pytest.mark.parametrize(("attempt", "ceiling"), [(1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (7, 60), (100_000, 60)])
def test_the_wait_doubles_up_to_its_cap(attempt: int, ceiling: float) -> None:
    assert POLICY.delay(attempt, 1.0) == ceiling


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_the_jitter_is_full(attempt: int, jitter: float) -> None:
    assert POLICY.delay(attempt, jitter) == POLICY.delay(attempt, 1.0) * jitter
    assert 0 <= POLICY.delay(attempt, jitter) <= 60


def test_no_backoff_means_no_wait() -> None:
    assert RetryPolicy(backoff=0.0).delay(5, 0.9) == 0


def test_what_holds_unless_set() -> None:
    assert (DEFAULT_RETRY.max_attempts, DEFAULT_RETRY.backoff, DEFAULT_RETRY.max_backoff) == (3, 1.0, 60.0)
