"""kill -9 of a process that writes to a store, at random moments, for any store:

    await survives_kills(MongoStore, url, kills=5)

A child process makes and changes runs without a pause and prints what the store confirmed. After each kill every run
must be whole, everything confirmed must be there, and a second process must be able to go on with it.
"""

import asyncio
import os
import pkgutil
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.core.run import Changes, Run, RunHead
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import CreationOutcome, Snapshot, Store
from oraculo.testing.checkers import check_run
from oraculo.testing.store_runs import NOW, OK, changed, creation, make_run, revived, unsent_pages
from tests.stores.started import started
from tests.waiting import until

ROOT = Path(__file__).parents[2]
WRITERS = 4
WIDTHS = (1, 3, 40, 200)
LINES = 100  # by then the first runs of every writer have ended, and others are at any point of their lives
LAST_PROGRESS = 6  # the version at which a run's tasks report progress for the last time
FOR_EVER = NOW + 10_000_000


async def survives_kills(kind: Callable[[str], Store], url: str, *, kills: int) -> None:
    """The store at `url` is left with the runs of the killed processes in it."""
    for _ in range(kills):
        name = os.urandom(4).hex()
        confirmed = await _write_until_killed(kind, url, name, lines=random.randrange(5, LINES))
        async with started(kind(url)) as store:
            await _assert_whole(store, name, confirmed)
            await _assert_timers_and_outbox(store)


async def _write_until_killed(kind: Callable[[str], Store], url: str, name: str, lines: int) -> dict[str, int]:
    """The last version of each run that the process, killed a moment after some `lines`, was told was safe."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.stores.killed_writer", f"{kind.__module__}:{kind.__qualname__}", url, name),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        told = [await asyncio.wait_for(child.stdout.readline(), 30) for _ in range(lines)]
        await asyncio.sleep(random.random() * 0.02)  # any moment of a commit, not only the one after a confirmation
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGKILL)
    told += (await child.stdout.read()).splitlines(keepends=True)
    trouble = (await child.stderr.read()).decode()
    assert await child.wait() == -signal.SIGKILL, trouble[-2000:]
    # The kill may have cut the last line.
    whole = (line.decode().split() for line in told if line.endswith(b"\n"))
    return {run_id: int(version) for run_id, version in whole}


async def _assert_whole(store: Store, name: str, confirmed: dict[str, int]) -> None:
    found = await _at_rest(store, name)
    assert confirmed
    assert {run_id for run_id in confirmed if run_id not in found} == set()
    async for snapshot in _snapshots(store, name):
        run_id = snapshot.head.id
        assert snapshot.head.version == found[run_id] >= confirmed.get(run_id, 1), run_id
        await _assert_run_whole(store, snapshot)
    await _assert_another_can_go_on(store, list(found))


async def _at_rest(store: Store, name: str) -> dict[str, int]:
    """The versions of the runs, once they stay: a server may finish what the dead process had sent to it."""
    same = 0
    versions: dict[str, int] = {}

    async def stay() -> bool:
        nonlocal same, versions
        before, versions = versions, {head.id: head.version async for head in _heads(store, name)}
        same = same + 1 if versions == before else 0
        return same >= 20

    await until(stay, within=30, saying="an end of what was sent")
    return versions


async def _heads(store: Store, text: str | None = None) -> AsyncIterator[RunHead]:
    cursor = None
    while True:
        page = await store.runs(RunQuery(text=text, limit=100, cursor=cursor))
        for head in page.heads:
            yield head
        cursor = page.cursor
        if cursor is None:
            return


async def _snapshots(store: Store, text: str | None = None) -> AsyncIterator[Snapshot]:
    run_ids = [head.id async for head in _heads(store, text)]
    for start in range(0, len(run_ids), 50):
        for snapshot in (await store.load(run_ids[start : start + 50])).values():
            yield snapshot


async def _assert_run_whole(store: Store, snapshot: Snapshot) -> None:
    head, tasks = snapshot.head, snapshot.tasks
    history = await store.history(head.id, limit=100_000)
    assert check_run(snapshot, history) == []
    assert [entry.seq for entry in history] == list(range(1, head.entries + 1)), head.id
    assert [task.number for task in tasks] == list(range(head.total)), head.id
    # Head and all tasks are of one moment: every change tells its version to every task.
    reported = min(head.version, LAST_PROGRESS)
    assert {task.note for task in tasks} == {str(reported) if reported > 2 else None}, head.id
    assert snapshot.payload == _payload(head.id)


async def _assert_another_can_go_on(store: Store, run_ids: list[str]) -> None:
    """A dead process leaves no lock behind, and what it wrote can be changed."""
    snapshots = await store.load(run_ids[:20])
    runs = [revived(snapshot) for snapshot in snapshots.values()]
    runs = [run for run in runs if run.is_open and run.head.version < LAST_PROGRESS]
    committed = await store.commit([], [_next_change(run) for run in runs])
    assert committed.conflicts == frozenset()
    for run_id, snapshot in (await store.load([run.id for run in runs])).items():
        assert snapshot.head.version == snapshots[run_id].head.version
        await _assert_run_whole(store, snapshot)


async def _assert_timers_and_outbox(store: Store) -> None:
    """What is kept beside the runs, to find them by, agrees with the runs."""
    unsent: set[tuple[str, int]] = set()
    timers: set[tuple[str, int | None]] = set()
    statuses: Counter[str] = Counter()
    async for snapshot in _snapshots(store):
        head = snapshot.head
        statuses[head.status] += 1
        unsent |= {(head.id, task.number) for task in snapshot.tasks if task.unsent}
        timers |= {(head.id, task.number) for task in snapshot.tasks if task.due_at is not None}
        timers |= {(head.id, None)} if head.due_at is not None else set()
    assert {(one.run_id, one.task) for page in await unsent_pages(store, 500) for one in page} == unsent
    assert {(one.run_id, one.task) for one in await store.due(FOR_EVER, 1_000_000)} == timers
    assert {status: number for status, number in (await store.census()).items() if number} == statuses


# -- the process that is killed -------------------------------------------------------------------------------------


def _payload(run_id: str) -> bytes:
    return b'{"of":"%s","x":"%s"}' % (run_id.encode(), b"x" * (len(run_id) * 100))


def _next_change(run: Run) -> Changes:
    """Touches every task, so that a commit that was torn shows."""
    version = run.head.version + 1
    if version == 2:
        return changed(run, *(Sent(task.number, 1, via="rabbitmq") for task in run.tasks))
    if version <= LAST_PROGRESS:
        return changed(run, *(Progressed(task.number, float(version), str(version)) for task in run.tasks))
    return changed(run, *(Answered(task.number, 1, OK) for task in run.tasks))


def _new_run(run_id: str) -> Run:
    steps = [{"fila": "q", "id": f"t{n}", "timeout": 50} for n in range(random.choice(WIDTHS))]
    return make_run(run_id, payload=_payload(run_id), destinos=steps)


async def _write_for_ever(store: Store, name: str) -> None:
    for number in count():
        runs = [_new_run(f"{name}-{number}-{each}") for each in range(random.randrange(1, 5))]
        committed = await store.commit([creation(run, key=run.id) for run in runs], [])
        assert {created.outcome for created in committed.created} == {CreationOutcome.CREATED}
        _confirm(runs)
        while runs[0].is_open:
            committed = await store.commit([], [_next_change(run) for run in runs])
            assert not committed.conflicts
            _confirm(runs)


def _confirm(runs: list[Run]) -> None:
    for run in runs:
        print(run.id, run.head.version, flush=True)


async def _main(kind: str, url: str, name: str) -> None:
    store = pkgutil.resolve_name(kind)(url)
    await store.start()
    await asyncio.gather(*(_write_for_ever(store, f"{name}-{writer}") for writer in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
