"""How many seeds it takes to catch each planted bug: a table of medians over many starting points.

PYTHONPATH=. .venv/bin/python scripts/measure_planted_bugs.py [starts]
"""

import statistics
import sys

import pytest
from tests.simulation.test_planted_bugs import BUGS, MOST_SEEDS, Plant

from oraculo.testing.simulation.campaign import silence_logs
from oraculo.testing.simulation.running import run_seed


def seeds_until_caught(plant: Plant, first: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return next((n for n in range(1, MOST_SEEDS + 1) if not run_seed(first + n).is_clean), MOST_SEEDS + 1)


def main() -> None:
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    silence_logs()
    print("| planted bug | law | median seeds | most |\n|---|---|---|---|")
    for plant, law in BUGS.items():
        taken = [seeds_until_caught(plant, 10_000 * start) for start in range(starts)]
        name = plant.__name__.replace("_", " ")
        print(f"| {name} | {law} | {statistics.median(taken):g} | {max(taken)} |", flush=True)


if __name__ == "__main__":
    main()
