"""Texts with webhook URLs are shown without secrets."""

import pytest

from oraculo.core.masking import masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/in", "https://h/in"),
        ("https://h/in?", "https://h/in?"),
        ("https://h/in?t=s3cret", "https://h/in?***"),
        ("https://ana:s3cret@h/in?t=s3cret", "https://ana:***@h/in?***"),
        ("see (https://h/x?t=s3cret).", "see (https://h/x?***)."),
        (
            "no answer from 'https://h/?t=s3cret', and http://h/?s3cret: why?",
            "no answer from 'https://h/?***', and http://h/?***: why?",
        ),
        ("https://h/in?.", "https://h/in?***"),
        ("what? no URL", "what? no URL"),
    ],
)
def test_neither_password_nor_query_is_shown(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_a_long_text_takes_no_longer_than_its_length_asks_for() -> None:
    """A receiver's own words may be in it. With the square of the time it would not end within a test's."""
    assert masked("://" * 300_000) == "://" * 300_000
