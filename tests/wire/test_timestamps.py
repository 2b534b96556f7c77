"""ISO 8601 outside, seconds inside."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oraculo.wire.timestamps import from_iso, in_words, to_iso


def test_a_moment_is_written_in_utc_with_milliseconds() -> None:
    assert to_iso(1_760_443_200.1234) == "2025-10-14T12:00:00.123Z"


@pytest.mark.parametrize(
    "text", ["2025-10-14T12:00:00Z", "2025-10-14T09:00:00-03:00", "2025-10-14T12:00:00.000+00:00", "20251014T120000Z"]
)
def test_any_offset_is_read(text: str) -> None:
    assert from_iso(text) == 1_760_443_200


@pytest.mark.parametrize("text", ["", "now", "2025-10-14", "2025-10-14T12:00:00", "2025-13-14T12:00:00Z", "1760443200"])
def test_what_has_no_offset_or_is_no_moment_is_none(text: str) -> None:
    assert from_iso(text) is None


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_the_ends_of_time_do_not_overflow(text: str) -> None:
    assert from_iso(text) is not None


def test_a_text_that_is_too_long_to_be_one_is_not_kept() -> None:
    """A text from outside may have any length, so the cache must not hold it."""
    long = "2025-10-14T12:00:00Z" + "x" * 1000
    held = sys.getrefcount(long)
    assert from_iso(long) is None
    assert sys.getrefcount(long) == held


@given(st.text(max_size=40))
def test_any_text_is_read_or_none(text: str) -> None:
    assert isinstance(from_iso(text), float | None)


@given(st.floats(0, 4e9))
def test_what_is_written_is_read_again_to_the_millisecond(seconds: float) -> None:
    assert abs((from_iso(to_iso(seconds)) or 0) - seconds) < 0.0011


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.04, "0 s"),
        (1.5, "1.5 s"),
        (2, "2 s"),
        (9.96, "10 s"),
        (10.4, "10 s"),
        (30, "30 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (3599.9, "1 h"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
    ],
)
def test_a_length_of_time_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
