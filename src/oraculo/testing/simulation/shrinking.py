"""Shrinking: the shortest story that still breaks the law. Faults, actions and processes are removed one by one."""

from collections.abc import Callable, Iterator

import msgspec

from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.running import SeedOutcome, run_seed
from oraculo.testing.simulation.scenario import Scenario

Run = Callable[[int, Faults, Scenario], SeedOutcome]


def shrink(outcome: SeedOutcome, run: Run = run_seed, tries: int = 200) -> SeedOutcome:
    """Return the smallest outcome that breaks the same law with the same seed, after at most `tries` runs."""
    law = outcome.violations[0].law
    best = outcome
    smaller = _smaller(best)
    for _ in range(tries):
        candidate = next(smaller, None)
        if candidate is None:
            break
        found = run(best.seed, *candidate)
        if found.violations and found.violations[0].law == law:
            best, smaller = found, _smaller(found)
    return best


def _smaller(outcome: SeedOutcome) -> Iterator[tuple[Faults, Scenario]]:
    """Yield smaller stories: without a kind of fault, half the actions, an action, or a process."""
    faults, scenario = outcome.faults, outcome.scenario
    for kind in faults.kinds():
        yield faults.without(kind), scenario
    actions = scenario.actions
    size = max(1, len(actions) // 2)
    while size and len(actions) > 1:
        for start in range(0, len(actions), size):
            fewer = actions[:start] + actions[start + size :]
            if fewer:
                yield faults, msgspec.structs.replace(scenario, actions=fewer)
        size //= 2
    if scenario.engines > 1:
        yield faults, msgspec.structs.replace(scenario, engines=scenario.engines - 1)
    if scenario.workers > 1:
        yield faults, msgspec.structs.replace(scenario, workers=scenario.workers - 1)
    if scenario.brokers > 1:
        yield faults, msgspec.structs.replace(scenario, brokers=scenario.brokers - 1)
    if scenario.drops_repeats:
        yield faults, msgspec.structs.replace(scenario, drops_repeats=False)


def _brokers(scenario: Scenario) -> str:
    kept = "kept" if scenario.durable else "lost"
    repeats = ", repeats known" if scenario.drops_repeats else ""
    return f"brokers: {scenario.brokers}, their messages {kept} when an engine dies{repeats}"


def story(outcome: SeedOutcome) -> str:
    """Return a report: the law, the seed, the requests, the faults, and the events."""
    violation = outcome.violations[0]
    faults = ", ".join(f"{kind}={getattr(outcome.faults, kind):g}" for kind in outcome.faults.kinds()) or "none"
    scenario = outcome.scenario
    lines = [
        f"seed {outcome.seed} broke law {violation.law} ({violation.says}) after {violation.at:.2f} s:",
        f"  {violation.how}",
        f"faults: {faults}",
        f"{scenario.engines} engines, {scenario.workers} workers, {_brokers(scenario)}",
        *(f"pipeline {name}: {msgspec.json.encode(body).decode()}" for name, body in scenario.pipelines.items()),
        "asked:",
        *(f"  {action}" for action in scenario.actions),
        "happened:",
        *(f"  {line}" for line in outcome.story[-80:]),
        f"replay: make simulate SEED={outcome.seed}",
    ]
    return "\n".join(lines)
