"""Seeds that once broke a law, each with what it found. They are kept so that it stays mended."""

import random

import msgspec
import pytest

from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.running import run_seed
from oraculo.testing.simulation.scenario import full_scenario, random_scenario

# Which were not there, nor more than one broker, nor one that drops repeats: with them a seed is another story.
FAULTS = Faults.usual().without("not_taken").without("away")
FOUND = {
    714: "hot runs decided in a batch whose cold runs could not be loaded kept their uncommitted changes",
    1053: "the same: the next commit wrote a head that counted a task which was not written",
    2383: "the same: a run ended with a task open",
    5081: "with the clock set back, commands that another engine had left unsent waited for as long as that",
    100417: "the law was wrong: an answer told as late in the batch that reopened its task counted as without effect",
    100638: "the same, with a repeated failure",
    104321: "the account of faults was wrong: one that came while a publish hung made the hang count as over",
}
# Seeds of today's scenarios, under the faults that they were found with.
BROKERS_AND_CLOCKS = Faults(away=0.05, clock_jump=0.03, lose_memory=0.01)
FOUND_LATER = {
    3000147: (BROKERS_AND_CLOCKS, "what was sent before the clock was set back was not sent again by a broker's loss"),
    3000543: (BROKERS_AND_CLOCKS, "the same, with the clock set back after the loss and before anybody noticed"),
    11: (
        Faults(away=0.05, lose_memory=0.05),
        "the law was wrong: a redrive that waits for a broker reopens what failed meanwhile",
    ),
}


# Found by the oracle, with the scenarios that it found them in.
FOUND_BY_THE_ORACLE = {
    42: "a request that was sent twice, the second time while a commit failed, sent commands with its own deadline",
    52: "the same",
}
# And in scenarios with more of what the contract speaks of.
FOUND_IN_FULLER_SCENARIOS = {
    901: (1, "the oracle was wrong: an attempt began in the commit in which the quorum was met and cancelled its task"),
    1674: (1, "the same"),
    211: (3, "the oracle was wrong: a broker that hung for long took messages for which it was chosen before that"),
    786: (3, "the oracle was wrong: a request came by two brokers, and the one that had made the run was frozen"),
    475: (4, "the oracle was wrong: a broker that was still frozen after 15 s counted as one that works"),
    3187: (4, "what waited for a broker that hung went by the last one, though a better one had come back meanwhile"),
}


@pytest.mark.parametrize("seed", FOUND_BY_THE_ORACLE)
def test_a_seed_in_which_the_oracle_found_something_is_clean(seed: int) -> None:
    outcome = run_seed(seed, scenario=random_scenario(random.Random(f"scenario {seed}")))
    assert outcome.is_clean, f"{FOUND_BY_THE_ORACLE[seed]}: {outcome.violations}"


@pytest.mark.parametrize("seed", FOUND_IN_FULLER_SCENARIOS)
def test_a_seed_in_which_the_oracle_found_something_later_is_clean(seed: int) -> None:
    additions, found = FOUND_IN_FULLER_SCENARIOS[seed]
    outcome = run_seed(seed, scenario=full_scenario(seed, additions))
    assert outcome.is_clean, f"{found}: {outcome.violations}"


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_something_is_clean(seed: int) -> None:
    scenario = msgspec.structs.replace(
        random_scenario(random.Random(f"scenario {seed}")), brokers=1, drops_repeats=False
    )
    outcome = run_seed(seed, FAULTS, scenario)
    assert outcome.is_clean, f"{FOUND[seed]}: {outcome.violations}"


@pytest.mark.parametrize("seed", FOUND_LATER)
def test_a_seed_that_found_something_later_is_clean(seed: int) -> None:
    faults, found = FOUND_LATER[seed]
    outcome = run_seed(seed, faults, random_scenario(random.Random(f"scenario {seed}")))
    assert outcome.is_clean, f"{found}: {outcome.violations}"
