"""`make bench`: prints a table of the four workloads, beside what the machine and the disk themselves allow. With
`--broker` the workers are a process of their own behind a real broker, and a bare echo shows what that broker and its
client allow. With `--store` the runs are kept by a real server, and with `--engines` others share it: the process that
measures is the first of them.

Every workload runs in a process of its own, so that one's memory and caches do not colour the next. Numbers from
different machines do not compare; the ratio to the disk's own commits, and W3's growth, do.
"""

import argparse
import asyncio
import json
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from tests.servers.fleet import Fleet

from benchmarks import echo, machine, workloads
from oraculo.bootstrap import collect_garbage_less_often, make_broker, make_store
from oraculo.ports.broker import Broker
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Store
from oraculo.ports.telemetry import BatchCommitted, Record
from oraculo.settings import Settings, WorkerSettings, load_settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from oraculo.wire.naming import QueueNames

Measures = dict[str, float]


CONCURRENCY = 200


class _Conflicts:
    """Counts the runs that were decided again because another engine was faster."""

    count = 0

    def emit(self, record: Record) -> None:
        if isinstance(record, BatchCommitted):
            self.count += record.conflicts


_conflicts = _Conflicts()


async def _measure(name: str, folder: str, engines: int) -> Measures:
    if name == "echo":
        with _process("-m", "benchmarks.echo"):
            return await echo.measure(load_settings())
    if "ORACULO_BROKER_URL" not in os.environ:
        settings = Settings(worker=WorkerSettings(concurrency=CONCURRENCY))
        store: Store = SqliteStore(f"{folder}/bench.db")
        async with Harness(workloads.no_op_workers(), settings=settings, store=store) as embedded:
            return await _measured(name, embedded)
    os.environ.setdefault("ORACULO_STORE_URL", f"sqlite:///{folder}/bench.db")
    settings = load_settings()
    store = make_store(settings)
    command = "from oraculo.cli import main; main()"
    with ExitStack() as processes:
        processes.enter_context(_process("-c", command, "worker", "benchmarks.workers:app"))
        harness = Harness(settings=settings, broker=_broker(settings), store=store, telemetry=_conflicts)
        async with harness:  # it makes the schema, before the others come
            for _ in range(engines - 1):
                processes.enter_context(_process("-c", command, "engine"))
            while len(harness.engine.parts.peers.engines) < engines:  # noqa: ASYNC110 - other processes are waited for
                await asyncio.sleep(0.1)
            return await _measured(name, harness)


def _broker(settings: Settings) -> Broker:
    names = QueueNames(settings.broker.prefix)
    return make_broker(settings, SystemClock(), own_queues=(names.requests, names.answers))


@contextmanager
def _process(*arguments: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _measured(name: str, oraculo: Harness) -> Measures:
    await workloads.one_at_a_time(oraculo, 50)  # warm up
    before = _resident_mb()
    if name == "W1":
        return await _latency(oraculo)
    if name == "W2":
        before_conflicts = _conflicts.count
        rate = statistics.median([await workloads.many_at_once(oraculo, 1000) for _ in range(3)])
        return {"runs/s": rate, "conflicts": (_conflicts.count - before_conflicts) / 3}
    if name == "W3":
        narrow = statistics.median([await workloads.one_wide(oraculo, 1000) for _ in range(3)])
        wide = await workloads.one_wide(oraculo, 10_000)
        added = _peak_mb() - before
        return {
            "1,000 s": narrow,
            "10,000 s": wide,
            "ratio": wide / narrow,
            "peak MB": _peak_mb(),
            "added MB": added,
        }
    return {"runs/s": statistics.median([await workloads.many_graphs(oraculo, 500) for _ in range(3)])}


async def _latency(oraculo: Harness) -> Measures:
    """Also of the best hundred in a row: what is left when the machine gives all it has."""
    hundreds = [await workloads.one_at_a_time(oraculo, 100) for _ in range(10)]
    spans = list(chain.from_iterable(hundreds))
    return {
        "p50 ms": statistics.median(spans),
        "p99 ms": statistics.quantiles(spans, n=100)[98],
        "best p50 ms": min(map(statistics.median, hundreds)),
    }


def _machine() -> Measures:
    """What it is worth for a second: see `machine`."""
    spans = [machine.work_ms() for _ in range(300)]
    return {"p50 ms": statistics.median(spans), "best ms": min(spans)}


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _disk(folder: str) -> Measures:
    """What one durable commit costs here with nothing around it: the floor under every number above."""
    connection = sqlite3.connect(f"{folder}/disk.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, body BLOB)")
    spans = []
    for _ in range(300):
        started = time.perf_counter()
        connection.execute("INSERT INTO t (body) VALUES (?)", (b"x" * 300,))
        spans.append((time.perf_counter() - started) * 1000)
    connection.close()
    return {"p50 ms": statistics.median(spans), "p99 ms": statistics.quantiles(spans, n=100)[98]}


EMBEDDED = "memory"
TARGETS = {
    EMBEDDED: {
        "W1": "p50 under 3 ms",
        "W2": "over 1,500 runs/s",
        "W3": "10,000 under 2 s, ratio at most 12, added under 150 MB",
        "W4": "",
    },
    "rabbitmq": {
        "echo": "the limit",
        "W1": "p50 under 3 ms",
        "W2": "over 1,200 runs/s",
        "W3": "10,000 under 3 s",
        "W4": "",
    },
    "redis": {"echo": "the limit", "W1": "", "W2": "over 1,800 runs/s", "W3": "10,000 under 3 s", "W4": ""},
    "nats": {"echo": "the limit", "W1": "", "W2": "over 1,200 runs/s", "W3": "10,000 under 3 s", "W4": ""},
}
STORES = ("sqlite", "postgres", "redis", "mongodb")
WORKLOADS = ("echo", "W1", "W2", "W3", "W4")


def _in_own_process(name: str, folder: str, engines: int) -> Measures:
    command = [sys.executable, "-m", "benchmarks", "--only", name, "--folder", folder, "--engines", str(engines)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measures: Measures = json.loads(printed.splitlines()[-1])
    return measures


def _loop_runner(plain: bool) -> asyncio.Runner:
    if not plain:
        try:
            import uvloop
        except ImportError:
            return asyncio.Runner()
        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("--only", choices=WORKLOADS, help="one workload, printed as JSON")
    parser.add_argument("--broker", choices=sorted(TARGETS), default=EMBEDDED, help="a real one is started")
    parser.add_argument("--store", choices=STORES, default="sqlite", help="a real one is started; needs --broker")
    parser.add_argument("--engines", type=int, default=1, help="that share the store; needs --store")
    parser.add_argument("--folder", help="where the database goes; a temporary folder unless given")
    parser.add_argument("--plain", action="store_true", help="asyncio's own event loop instead of uvloop")
    arguments = parser.parse_args()
    plain = arguments.plain or bool(os.environ.get("ORACULO_BENCH_PLAIN"))
    with tempfile.TemporaryDirectory(dir=arguments.folder or ".", prefix=".bench-") as folder:
        if arguments.only:
            collect_garbage_less_often()  # as `oraculo serve` does
            with _started(arguments.broker, arguments.store), _loop_runner(plain) as runner:
                print(json.dumps(runner.run(_measure(arguments.only, folder, arguments.engines))))
            return
        if plain:
            os.environ["ORACULO_BENCH_PLAIN"] = "1"
        _print_row("work", _machine(), "the machine itself: a piece of work that is always the same")
        _print_row("disk", _disk(folder), "one durable commit")
        with _started(arguments.broker, arguments.store):
            for name, target in TARGETS[arguments.broker].items():
                _print_row(name, _in_own_process(name, folder, arguments.engines), target)
        _print_row("work", _machine(), "")


@contextmanager
def _started(broker: str, store: str) -> Iterator[None]:
    """Real servers for the length of the measurement, as the tests start theirs. A process that measures one workload
    of a table is told of no broker: it finds those of its parent in the environment."""
    if broker == EMBEDDED:
        yield
        return
    fleet = Fleet()
    os.environ |= {
        "ORACULO_BROKER_URL": fleet.url(broker),
        "ORACULO_WORKER_CONCURRENCY": str(CONCURRENCY),
        "ORACULO_LOG_LEVEL": "warning",
    }
    if store != "sqlite":
        os.environ["ORACULO_STORE_URL"] = fleet.url(store)
    try:
        yield
    finally:
        fleet.stop()


def _print_row(name: str, measures: Measures, target: str) -> None:
    numbers = "   ".join(
        f"{what} {value:,.2f}" if value < 100 else f"{what} {value:,.0f}" for what, value in measures.items()
    )
    print(f"{name:5} {numbers:75} {target}", flush=True)


if __name__ == "__main__":
    main()
