"""The oracle can see: each bug, planted alone, is caught within a bounded number of seeds."""

import statistics

import pytest
from scripts.measure_planted_bugs import seeds_until_caught

from oraculo.testing.simulation.running import run_seed
from tests.simulation.outcome_bugs import BUGS

MOST_SEEDS = 40

# The first seed that catches it, where that is not 0: run first, so that the others need not be run before it.
SEEN_AT: dict[str, int] = {}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_outcome_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    seeds = sorted(range(MOST_SEEDS), key=lambda seed: seed != SEEN_AT.get(name))
    assert any(not run_seed(seed).is_clean for seed in seeds)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_outcome_is_caught_soon_from_anywhere(name: str) -> None:
    assert statistics.median(seeds_until_caught(name, start) for start in range(1, 6)) <= MOST_SEEDS
