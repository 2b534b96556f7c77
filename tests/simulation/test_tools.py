"""The tools around the simulation: shrinking, campaigns, rehearsals and their faults."""

from collections import Counter

import pytest

from oraculo.engine.send.sweep import Sweep
from oraculo.errors import InvalidInput
from oraculo.pipeline.definition import parse_pipeline
from oraculo.testing.simulation import campaign, rehearsal
from oraculo.testing.simulation.campaign import run_seeds
from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.rehearsal import longest_path, rehearse
from oraculo.testing.simulation.running import SeedOutcome, run_seed
from oraculo.testing.simulation.scenario import Scenario, StandIn
from oraculo.testing.simulation.shrinking import shrink, story
from tests.simulation.test_planted_bugs import delivered_under_two_versions, no_resend

USUAL = StandIn(1.0, 0.0)
PIPELINE = parse_pipeline(
    {
        "name": "ensaio",
        "timeout": 60,
        "steps": [
            {"type": "a", "queue": "fila-a"},
            {"type": "b", "queue": "fila-b", "timeout": 1},
            {"type": "c", "queue": "fila-c", "dependsOn": ["a", "b"]},
        ],
    }
)


def test_a_broken_law_is_shrunk_and_still_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered_under_two_versions(monkeypatch)
    first = next(outcome for seed in range(26, 76) if not (outcome := run_seed(seed)).is_clean)
    smallest = shrink(first, tries=60)
    assert smallest.violations[0].law == first.violations[0].law
    assert len(smallest.scenario.actions) <= len(first.scenario.actions)
    assert len(smallest.faults.kinds()) < len(first.faults.kinds())
    told = story(smallest)
    assert f"seed {first.seed} broke law {first.violations[0].law}" in told
    assert f"make simulate SEED={first.seed}" in told
    assert run_seed(first.seed, smallest.faults, smallest.scenario).violations == smallest.violations


def test_a_campaign_counts_over_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_CHUNK", 5)
    *tallies, tally = run_seeds(100, 14)
    assert len(tallies) == 2
    assert tally.seeds == 14
    assert not tally.broken
    assert sum(tally.statuses.values()) > 14
    assert tally.troubles["engine_crash"] > 0


def test_a_rehearsal_tells_how_a_pipeline_ends_and_what_is_tight() -> None:
    found = rehearse(PIPELINE, {"b": StandIn(0.8, 0.0)}, USUAL, Faults(), range(40))
    assert not found.violations
    assert sum(found.statuses.values()) == 40
    assert set(found.statuses) == {"concluida", "erro"}
    assert [deadline.of for deadline in found.tight] == ["step b"]
    assert found.percentile(50) < found.percentile(95) < 60
    assert not found.troubles


def test_a_rehearsal_without_faults_always_succeeds_when_there_is_time() -> None:
    found = rehearse(PIPELINE, {"b": StandIn(0.01, 0.0)}, USUAL, Faults(), range(20))
    assert found.statuses == Counter(concluida=20)


def test_a_deadline_is_judged_by_the_schedules_that_lost_no_message() -> None:
    definition = parse_pipeline({"name": "p", "timeout": 40, "steps": [{"type": "a"}, {"type": "b", "timeout": 30}]})
    found = rehearse(definition, {}, USUAL, Faults(drop=0.1), range(20))
    assert 0 < found.judged < 20
    assert found.statuses["timeout"] + found.statuses["erro"] > 0
    assert not found.tight
    assert all(deadline.met == 0 and deadline.p95 is not None for deadline in found.deadlines)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[SeedOutcome]:
    """Of the seeds of the rehearsals to come."""
    seen: list[SeedOutcome] = []

    def noting(seed: int, faults: Faults, scenario: Scenario) -> SeedOutcome:
        seen.append(run_seed(seed, faults, scenario))
        return seen[-1]

    monkeypatch.setattr(rehearsal, "run_seed", noting)
    return seen


def test_each_destination_beyond_a_bridge_has_a_stand_in_of_its_own(outcomes: list[SeedOutcome]) -> None:
    places = ["celery://a", "celery://b?queue=high", "bullmq://a", "celery://a?send=payload", "fila"]
    steps = [{"id": str(number), "queue": place} for number, place in enumerate(places)]
    found = rehearse(parse_pipeline({"name": "p", "steps": steps}), {}, USUAL, Faults(), [0])
    assert found.statuses == Counter(concluida=1)
    scenario = outcomes[0].scenario
    first, second, third, again, plain = (step["queue"] for step in scenario.pipelines["p"]["steps"])
    assert (first, plain) == (again, "fila")
    assert len({first, second, third, plain}) == 4
    assert set(scenario.queues) == {first, second, third, plain}


def test_a_rehearsal_reports_a_broken_law(monkeypatch: pytest.MonkeyPatch) -> None:
    no_resend(monkeypatch)
    found = rehearse(PIPELINE, {}, USUAL, Faults(engine_crash=0.02), range(20))
    assert found.violations
    assert all(how.startswith("law ") for how in found.violations.values())
    assert Sweep.look.__name__ == "look"


def test_the_longest_path_is_told_by_the_stand_ins() -> None:
    path, seconds = longest_path(PIPELINE, {"a": StandIn(5.0, 0.0)}, USUAL)
    assert (path, seconds) == (["a", "c"], 6.0)


def test_faults_are_read_from_text() -> None:
    assert Faults.parse(["drop=0.05", "hang=1"]) == Faults(drop=0.05, hang=1.0)


@pytest.mark.parametrize(
    ("text", "told"), [("drp=0.1", "known: drop"), ("drop=2", "from 0 to 1"), ("drop", "from 0 to 1")]
)
def test_bad_faults_are_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        Faults.parse([text])
