"""The number of steps that a quorum needs, and quorums that are refused."""

import pytest

from oraculo.pipeline.definition import quorum_fault, quorum_needed


@pytest.mark.parametrize(
    ("quorum", "total", "needed"),
    [
        (None, 5, None),
        ("all", 5, None),
        (2, 5, 2),
        ("60%", 5, 3),
        ("50%", 5, 3),
        ("1%", 5, 1),
        ("0.001%", 5, 1),
        ("100%", 5, 5),
        ("33.4%", 3, 2),
        ("86.4%", 375, 324),
        ("33.333333%", 3, 1),
        ("099.5%", 1000, 995),
        (".5%", 1000, 5),
        ("5.%", 100, 5),
    ],
)
def test_how_many_a_quorum_needs(quorum: int | str | None, total: int, needed: int | None) -> None:
    assert quorum_fault(quorum, total) is None
    assert quorum_needed(quorum, total) == needed


@pytest.mark.parametrize(
    "quorum",
    [
        0,
        6,
        -1,
        True,
        1.5,
        "0%",
        "101%",
        "-5%",
        "x%",
        "%",
        "60",
        "",
        "1e1%",
        "1/2%",
        "٣%",
        "0050%",
        "50.1234567%",
        "50%\n",
        ".%",
        pytest.param("0" * 5000 + "50%", id="many digits"),
        pytest.param("50." + "0" * 5000 + "%", id="many decimals"),
        [],
        pytest.param(2**20_000, id="long"),
    ],
)
def test_what_is_no_quorum_is_reported_with_what_would_be_right(quorum: object) -> None:
    assert str(quorum_fault(quorum, 5)).startswith('must be "all", a whole number from 1 to 5, or a percentage')


def test_what_is_no_quorum_is_shown() -> None:
    assert str(quorum_fault("most", 5)).endswith("; got 'most'")
    assert str(quorum_fault(6, 5)).endswith("; got 6")
