"""Counts the seeds that it takes to catch each planted bug, for the table of tests/simulation/planted_bugs.md.

Each bug is planted alone, at several starting points far from each other, and seeds are run one after the other until
one is not clean. `--laws` looks with the laws alone, without the oracle.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
from tests.simulation.outcome_bugs import BUGS

from oraculo.testing.simulation.campaign import silence_logs
from oraculo.testing.simulation.running import run_seed

MOST_SEEDS = 100
APART = 100_000  # seeds between two starting points


def seeds_until_caught(name: str, start: int, *, by_laws_alone: bool = False) -> int:
    """Count the seeds that it takes from one starting point; one more than MOST_SEEDS when it is not caught."""
    silence_logs()
    with pytest.MonkeyPatch.context() as patch:
        BUGS[name](patch)
        seeds = (run_seed(APART * start + number, by_laws_alone=by_laws_alone) for number in range(MOST_SEEDS))
        return next((number for number, outcome in enumerate(seeds, 1) if not outcome.is_clean), MOST_SEEDS + 1)


def taken(names: Iterable[str], starts: int, *, by_laws_alone: bool) -> Iterator[tuple[str, list[int]]]:
    count = partial(seeds_until_caught, by_laws_alone=by_laws_alone)
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as processes:
        futures = {name: [processes.submit(count, name, start) for start in range(1, starts + 1)] for name in names}
        for name, each in futures.items():
            yield name, sorted(future.result() for future in each)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make planted-bugs", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BUGS], help="only these bugs")
    parser.add_argument("--starts", type=int, default=5, help="how many starting points")
    parser.add_argument("--laws", action="store_true", help="look with the laws alone, without the oracle")
    arguments = parser.parse_args()
    print("| planted bug | median seeds | all |\n|---|---|---|")
    for name, seeds in taken(arguments.names or BUGS, arguments.starts, by_laws_alone=arguments.laws):
        each = ", ".join(f"over {MOST_SEEDS}" if one > MOST_SEEDS else str(one) for one in seeds)
        print(f"| {name.replace('_', ' ')} | {statistics.median(seeds):g} | {each} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
