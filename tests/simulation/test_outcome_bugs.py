"""The oracle can see: each bug, planted alone, is caught within a bounded number of seeds."""

import statistics

import pytest
from scripts.measure_planted_bugs import seeds_until_caught

from oraculo.testing.simulation.running import run_seed
from tests.simulation.outcome_bugs import BUGS

MOST_SEEDS = 40

# Where it was last seen: run first, so that the others need not be run before it.
SEEN_AT = {"an_answer_goes_by_the_first_broker": 44, "an_optional_step_fails_its_run": 17}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_outcome_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    assert any(not run_seed(seed).is_clean for seed in (SEEN_AT.get(name, 0), *range(MOST_SEEDS)))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_outcome_is_caught_soon_from_anywhere(name: str) -> None:
    assert statistics.median(seeds_until_caught(name, start) for start in range(1, 6)) <= MOST_SEEDS
