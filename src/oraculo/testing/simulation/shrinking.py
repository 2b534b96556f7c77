"""Finding the shortest story that still breaks the law: faults, actions and processes are taken away one by one."""

from collections.abc import Callable, Iterator

import msgspec

from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.running import SeedOutcome, run_seed
from oraculo.testing.simulation.scenario import Scenario

Run = Callable[[int, Faults, Scenario], SeedOutcome]


def shrink(outcome: SeedOutcome, run: Run = run_seed, tries: int = 200) -> SeedOutcome:
    """The smallest outcome found that breaks the same law with the same seed. Spends at most `tries` runs."""
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
    """One thing less: first whole kinds of fault, then halves of the actions, then single ones, then processes."""
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
    if not scenario.tells_losses:
        yield faults, msgspec.structs.replace(scenario, tells_losses=True)


def _brokers(scenario: Scenario) -> str:
    kept = "kept" if scenario.durable else "lost"
    repeats = ", repeats known" if scenario.drops_repeats else ""
    losses = "" if scenario.tells_losses else ", losses not told"
    return f"brokers: {scenario.brokers}, their messages {kept} when an engine dies{repeats}{losses}"


def story(outcome: SeedOutcome) -> str:
    """What a person needs to see: the law, the seed, what was asked, what went wrong, what happened."""
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
        *(f"  {line}" for line in outcome.told[-80:]),
        f"replay: make simulate SEED={outcome.seed}",
    ]
    return "\n".join(lines)
