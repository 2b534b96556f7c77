"""The Redis store: the suite every store passes, and how it works in bounded steps."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from oraculo.core.events import (
    Answered,
    BrokerLost,
    Cancelled,
    DeadLetterDiscarded,
    Event,
    Progressed,
    Redriven,
    Repeated,
    RunDue,
    Sent,
    TaskDue,
    Unsendable,
)
from oraculo.core.run import Run, RunStatus
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Store
from oraculo.stores.redis import RedisStore, listing, store
from oraculo.stores.redis.layout import Layout
from oraculo.stores.redis.values import RedisWrite
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.checkers import check_store
from oraculo.testing.store_runs import (
    NOW,
    OK,
    change,
    changed,
    create,
    creation,
    failure,
    ids_of,
    load,
    make_run,
    revived,
    succeeded,
    unsent_pages,
)
from tests.stores import redis_stage as stage
from tests.stores.in_order_suite import InOrderSuite
from tests.stores.killed_writer import survives_kills
from tests.stores.redis_stage import assert_indexes_agree, keys_of, opened
from tests.stores.started import started

namespace, plain, url = stage.namespace, stage.plain, stage.url  # fixtures


class TestConformance(InOrderSuite):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    async def make_store(self) -> Store:
        made = RedisStore(self.url)
        await made.start()
        return made


# -- several stores on one server -----------------------------------------------------------------------------------


async def test_a_writer_that_is_killed_leaves_every_run_whole(url: str) -> None:
    await survives_kills(RedisStore, url, kills=2)


# -- bounded work ---------------------------------------------------------------------------------------------------


def test_a_change_of_a_wide_run_is_small() -> None:
    run = make_run("wide", destinos=[{"fila": "q", "id": f"t{n}"} for n in range(10_000)])
    creation(run)
    written = RedisWrite(Layout("x", "y").scripts["change"], changed(run, Answered(5_000, 1, OK)))
    assert len(written.command) < 40


async def test_everything_in_small_slices(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (store, "ARGUMENTS_TOGETHER", 1),
        (store, "LOADED_TOGETHER", 2),
        (store, "FOUND_TOGETHER", 2),
        (store, "PRUNED_TOGETHER", 2),
        (listing, "LOOKED_AT", 2),
        (listing, "FOUND", 2),
    ):
        monkeypatch.setattr(module, name, size)
    async with opened(url) as runs:
        made = [make_run(f"run-{n}", name=("video", "blog", "rota")[n % 3]) for n in range(9)]
        await create(runs, *made)
        assert len(await runs.load([run.id for run in made])) == 9
        newest = [f"run-{n}" for n in range(8, -1, -1)]
        assert await ids_of(runs, RunQuery()) == newest
        assert await ids_of(runs, RunQuery(text="RUN", limit=5)) == newest[:5]
        assert await ids_of(runs, RunQuery(text="blo")) == ["run-7", "run-4", "run-1"]
        assert await ids_of(runs, RunQuery(name="blog", statuses=frozenset({RunStatus.RUNNING}))) == [
            "run-7",
            "run-4",
            "run-1",
        ]
        assert [len(page) for page in await unsent_pages(runs, 5)] == [5, 5, 5, 5, 5, 2]
        await change(runs, *(changed(run, *(Sent(n, 1, via="redis") for n in range(3))) for run in made))
        assert list(await runs.held_by("redis", 100)) == newest[::-1]
        assert await runs.forget_sent() == 27
        assert len(await runs.unsent(100)) == 27
        stuck = [changed(revived(await load(runs, run.id)), failure(0), Cancelled()) for run in made[:4]]
        ended = [succeeded(revived(await load(runs, run.id))) for run in made[4:]]
        await change(runs, *stuck, *ended)
        assert await runs.prune(NOW + 100, 100) == 5  # behind those that have a dead letter to send
        assert await ids_of(runs, RunQuery()) == ["run-3", "run-2", "run-1", "run-0"]


async def test_pages_stay_true_in_every_list(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LOOKED_AT", 3)
    async with opened(url) as runs:
        made = [make_run(f"run-{n:02}", name=("video", "blog")[n % 2]) for n in range(20)]
        await create(runs, *made)
        await change(runs, *(succeeded(run) for run in made[::3]))
        for query in (
            RunQuery(limit=3),
            RunQuery(limit=3, name="blog"),
            RunQuery(limit=3, statuses=frozenset({RunStatus.SUCCEEDED})),
            RunQuery(limit=2, statuses=frozenset({RunStatus.RUNNING}), name="video"),
            RunQuery(limit=2, statuses=frozenset(RunStatus), name="blog"),
            RunQuery(limit=2, statuses=frozenset(RunStatus), text="vid"),
            RunQuery(limit=4, statuses=frozenset({RunStatus.RUNNING, RunStatus.SUCCEEDED})),
            RunQuery(limit=2, text="RUN-1"),
            RunQuery(limit=1, text="vid", statuses=frozenset({RunStatus.SUCCEEDED})),
        ):
            seen: list[str] = []
            cursor: str | None = None
            while True:
                page = await runs.runs(msgspec.structs.replace(query, cursor=cursor))
                assert 0 < len(page.heads) <= query.limit
                seen += [head.id for head in page.heads]
                cursor = page.cursor
                if cursor is None:
                    break
            expected = [run.head for run in reversed(made)]
            assert seen == [
                head.id
                for head in expected
                if (not query.statuses or head.status in query.statuses)
                and query.name in (None, head.name)
                and (query.text or "").casefold() in f"{head.id} {head.name}"
            ]


async def test_nothing_of_a_pruned_run_is_left(url: str, namespace: str, plain: Any) -> None:
    async with opened(url) as runs:
        made = [make_run(f"run-{n}", name="rota") for n in range(4)]
        await runs.commit([creation(run, key=run.id) for run in made], [])
        resting = [Sent(n, 1, dead_letter=True, via="redis") for n in range(3)]
        await change(runs, *(changed(run, *map(failure, range(3)), *resting) for run in made[:2]))
        await change(runs, *(succeeded(run) for run in made[2:]))
        page = await runs.runs(RunQuery(limit=1))
        assert await runs.prune(NOW + 100, 100) == 4
        assert keys_of(plain, namespace) == {"layout", "sequence", "brokers"}
        # A number is never used again: a cursor that came back would show new runs on an old page.
        await create(runs, make_run("new"))
        assert (await runs.runs(RunQuery(cursor=page.cursor))).heads == []


async def test_pruning_while_the_runs_are_in_use(url: str) -> None:
    async with opened(url) as runs, opened(url) as other:
        made = [make_run(f"run-{n}", destinos=["q", "r"]) for n in range(60)]
        await create(runs, *made)
        ending = [changed(run, Answered(0, 1, OK), failure(1), Sent(1, 1, dead_letter=True)) for run in made]
        await change(runs, *ending)
        again = [changed(revived(await load(other, run.id)), Repeated()) for run in made]
        reopening = [asyncio.ensure_future(other.commit([], [each])) for each in again]
        pruned = await runs.prune(NOW + 100, 100)
        conflicts = [result.conflicts for result in await asyncio.gather(*reopening)]
        # Each was pruned, or opened again, and never both.
        assert pruned == sum(map(len, conflicts))
        assert (await runs.census())[RunStatus.RUNNING] == 60 - pruned
        assert await check_store(runs) == []
        await assert_indexes_agree(runs)


# -- against SQLite -------------------------------------------------------------------------------------------------


BROKERS = ("redis", "rabbitmq", None)


def random_event(run: Run, chance: random.Random) -> Event:
    number = chance.randrange(len(run.tasks))
    attempt = max(1, run.tasks[number].attempt)
    return chance.choice(
        (
            Sent(number, attempt, via=chance.choice(BROKERS)),
            Sent(number, attempt, via=chance.choice(BROKERS)),
            Sent(number, attempt, dead_letter=True, via=chance.choice(BROKERS)),
            Answered(number, attempt, OK),
            Answered(number, attempt, b"{}", failed=True, retryable=chance.random() < 0.6, reason="x", jitter=1.0),
            Answered(number, attempt, b"{}", failed=True, retryable=False, reason="x", jitter=1.0),
            Unsendable(number, attempt, "too large"),
            Progressed(number, 5.0, "working"),
            TaskDue(number),
            RunDue(),
            BrokerLost(chance.choice(BROKERS), dead_letters=chance.random() < 0.5),
            DeadLetterDiscarded(number),
            *((Cancelled(), Repeated(), Redriven(number)) if chance.random() < 0.3 else ()),
        )
    )


async def seen_of(runs: Store, ids: list[str]) -> dict[str, Any]:
    unsent = [one for page in await unsent_pages(runs, 7) for one in page]
    held = {
        (via, dead): list(await runs.held_by(via, 100, dead_letters=dead)) for via in BROKERS for dead in (True, False)
    }
    return {
        "runs": await runs.load(ids),
        "heads": await runs.heads(ids),
        "history": [list(await runs.history(run_id, after=3, limit=20)) for run_id in ids],
        "due": sorted(await runs.due(NOW + 100, 1_000), key=lambda one: (one.run_id, one.task or -1)),
        "next": await runs.next_due(),
        "unsent": sorted(unsent, key=lambda one: (one.run_id, one.task)),
        "brokers": set(await runs.brokers_in_use()),
        "held": held,
        "census": await runs.census(),
        "running": await ids_of(runs, RunQuery(statuses=frozenset({RunStatus.RUNNING}))),
        "named": await ids_of(runs, RunQuery(name="rota", text="RUN")),
    }


@pytest.mark.parametrize("seed", range(6))
async def test_it_finds_what_sqlite_finds(url: str, seed: int) -> None:
    """The same random lives of runs in both, and the same answers to every question on the way."""
    chance = random.Random(seed)
    async with opened(url) as runs, started(SqliteStore(":memory:")) as lite:
        both: tuple[Store, Store] = (runs, lite)
        ids = [f"run-{n}" for n in range(8)]
        for each in both:
            await create(
                each, *(make_run(run_id, webhook="https://a.org" if run_id > "run-5" else None) for run_id in ids)
            )
        now = NOW
        for step in range(120):
            now += chance.random() * 8
            chosen = chance.sample(ids, 3)
            events = {run_id: [chance.random() for _ in range(3)] for run_id in chosen}
            for each in both:
                stored = await each.load(chosen)
                changes = []
                for run_id in chosen:
                    if run_id in stored:
                        run = revived(stored[run_id])
                        some = [random_event(run, random.Random(number)) for number in events[run_id]]
                        changes.append(changed(run, *some, now=now))
                await change(each, *(one for one in changes if one.dirty))
            if step % 40 == 39:
                assert await runs.forget_sent() == await lite.forget_sent()
            if step % 10 == 9:
                assert await seen_of(runs, ids) == await seen_of(lite, ids)
            if step % 30 == 29:
                assert await runs.prune(now - 30, 2) == await lite.prune(now - 30, 2)
        await assert_indexes_agree(runs)
