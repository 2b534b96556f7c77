"""One action on many runs."""

import pytest

from oraculo.cli.bulk import bulk


def test_a_bulk_that_is_interrupted_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    def call(run_id: str) -> None:
        if run_id == "c":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bulk("cancelling", ["a", "b", "c", "d"], call)
    assert capsys.readouterr().err == "cancelling: 2 of 4 done; the others are as they were\n"
