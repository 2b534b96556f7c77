"""Runs of many seeds on all cores."""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import structlog

from oraculo.core.chunks import pages
from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.running import run_seed

_CHUNK = 25
_SHIFT = 80  # chunks until the processes are replaced: the memory of dead hosts is never freed


class Tally(msgspec.Struct):
    """The results so far."""

    seeds: int = 0
    broken: dict[int, str] = {}  # seed -> the law, and how it was broken
    statuses: Counter[str] = msgspec.field(default_factory=Counter)
    troubles: Counter[str] = msgspec.field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.broken |= other.broken
        self.statuses += other.statuses
        self.troubles += other.troubles

    @property
    def rate(self) -> float:
        return self.seeds / self.seconds if self.seconds else 0.0


def run_seeds(first: int, count: int, faults: Faults | None = None) -> Iterator[Tally]:
    """Yield the tally so far, each time a few more seeds are done."""
    started = time.perf_counter()
    total = Tally(broken={})
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    for part in pages(chunks, _SHIFT):
        with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as processes:
            for tally in processes.map(_run_chunk, part, [faults] * len(part)):
                total.add(tally)
                total.seconds = time.perf_counter() - started
                yield total


def silence_logs() -> None:
    """Turn logs off: the workers of a simulation fail on purpose, thousands of times."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _run_chunk(seeds: Iterable[int], faults: Faults | None) -> Tally:
    silence_logs()
    tally = Tally(broken={})
    for seed in seeds:
        outcome = run_seed(seed, faults)
        tally.seeds += 1
        tally.statuses += outcome.statuses
        tally.troubles += outcome.troubles
        if not outcome.is_clean:
            violation = outcome.violations[0]
            tally.broken[seed] = f"law {violation.law}: {violation.how}"
    return tally
