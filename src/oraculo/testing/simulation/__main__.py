"""The command behind `make simulate SEEDS=n`, and `make simulate SEED=s` to replay one."""

import argparse
import sys

from oraculo.testing.simulation.campaign import run_seeds, silence_logs
from oraculo.testing.simulation.running import run_seed
from oraculo.testing.simulation.shrinking import shrink, story

_MOST_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m oraculo.testing.simulation")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one and print its story")
    arguments = parser.parse_args()
    silence_logs()
    if arguments.seed is not None:
        return _replay(arguments.seed)
    return _campaign(arguments.first, arguments.seeds)


def _replay(seed: int) -> int:
    outcome = run_seed(seed)
    if outcome.is_clean:
        print("\n".join(outcome.story))
        print(f"seed {seed}: no law was broken; runs ended: {dict(outcome.statuses)}")
        return 0
    print(story(shrink(outcome)))
    return 1


def _campaign(first: int, count: int) -> int:
    tally = None
    printed: set[int] = set()
    for tally in run_seeds(first, count):
        for seed in sorted(tally.broken.keys() - printed)[: _MOST_SHOWN - len(printed)]:
            print(f"seed {seed}: {tally.broken[seed]}", flush=True)
            printed.add(seed)
        end = "\n" if tally.seeds == count else "\r"
        print(
            f"{tally.seeds} of {count} seeds, {tally.rate:.0f}/s, {len(tally.broken)} broke a law", end=end, flush=True
        )
    if tally is None:
        return 0
    print(f"runs ended: {dict(tally.statuses)}")
    print(f"faults: {dict(tally.troubles)}")
    if tally.broken:
        print(story(shrink(run_seed(min(tally.broken)))))
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
