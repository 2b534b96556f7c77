"""The tests that every store passes, unchanged for each adapter.

  class TestMyStore(StoreSuite):
      async def make_store(self) -> Storage: ...  # started, on a place of the test's own; a second shares the data

The tests are plain coroutines with plain asserts. pytest with `asyncio_mode = "auto"` runs them, and importing this
module needs no pytest.
"""

import asyncio
from enum import StrEnum
from typing import Any

import msgspec

from oraculo.core.events import (
    Answered,
    BrokerLost,
    Cancelled,
    DeadLetterDiscarded,
    Delivered,
    RunDue,
    Sent,
    TaskDue,
)
from oraculo.core.run import RunStatus
from oraculo.errors import StoreError, StoreUnavailable, WrittenByNewer
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Creation, CreationOutcome, Due, Unsent
from oraculo.testing.store_browse import StoreBrowse
from oraculo.testing.store_commits import StoreCommits
from oraculo.testing.store_registry import StoreRegistry
from oraculo.testing.store_runs import (
    NOW,
    OK,
    PAYLOADS,
    assert_stored,
    change,
    changed,
    create,
    creation,
    everything,
    failure,
    load,
    make_run,
    raises,
    revived,
    succeeded,
    unsent_pages,
)


class StoreSuite(StoreCommits, StoreBrowse, StoreRegistry):
    """The whole suite. Subclass it, name the class `Test…`, and give it `make_store`."""

    # -- timers -------------------------------------------------------------------------------------------------

    async def test_due_timers_come_oldest_first(self) -> None:
        async with self.opened() as store:
            await create(store, make_run("late", timeout=90), make_run("early", timeout=10))
            tasks = [{"fila": "q", "id": str(n), "timeout": seconds} for n, seconds in enumerate((50, 5, 20))]
            await create(store, make_run("tasks", destinos=tasks, timeout=70))
            assert await store.next_due() == NOW + 5
            expected = [Due("tasks", 1), Due("early"), Due("tasks", 2), Due("tasks", 0), Due("tasks"), Due("late")]
            assert list(await store.due(NOW + 90, 100)) == expected
            assert list(await store.due(NOW + 90, 2)) == expected[:2]
            assert list(await store.due(NOW + 20, 100)) == expected[:3]
            assert list(await store.due(NOW + 4.999, 100)) == []

    async def test_a_timer_stays_until_a_commit_clears_or_moves_it(self) -> None:
        async with self.opened() as store:
            run = make_run("a", destinos=[{"fila": "q", "timeout": 5}, "r"], timeout=60)
            await create(store, run)
            for _ in range(2):
                assert list(await store.due(NOW + 5, 10)) == [Due("a", 0)]
            await change(store, changed(run, failure(1, retryable=True), now=NOW + 1))
            retry_at = run.tasks[1].due_at
            assert await store.next_due() == min(retry_at or 0.0, NOW + 5)
            await change(store, changed(run, TaskDue(0), now=NOW + 5))
            assert list(await store.due(NOW + 59, 10)) == [Due("a", 1)]
            await change(store, changed(run, RunDue(), now=NOW + 60))
            assert list(await store.due(NOW + 10_000, 10)) == []
            assert await store.next_due() is None

    async def test_timers_are_found_however_late_they_are_asked_for(self) -> None:
        async with self.opened() as store:
            await create(store, make_run("wide", destinos=[{"fila": "q", "id": str(n)} for n in range(100)]))
            for now in (1e12, 1e16, 1e18):
                assert list(await store.due(now, 10)) == [Due("wide")]

    # -- unsent commands and dead letters -----------------------------------------------------------------------

    async def test_unsent_commands_are_paged(self) -> None:
        async with self.opened() as store:
            await create(store, *(make_run(name, now=NOW + n) for n, name in enumerate("cab")))
            found = await unsent_pages(store, 4)
            assert [len(page) for page in found] == [4, 4, 1]
            commands = [command for page in found for command in page]
            assert sorted((c.run_id, c.task, c.attempt) for c in commands) == [
                (name, task, 1) for name in "abc" for task in range(3)
            ]

    async def test_a_command_is_unsent_until_it_is_noted_or_its_task_ends(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            await change(store, changed(run, Sent(0, 1), Answered(2, 1, OK)))
            assert list(await store.unsent(10)) == [Unsent("a", 1, 1)]
            await change(store, changed(run, failure(1, retryable=True)))
            assert list(await store.unsent(10)) == []
            await change(store, changed(run, TaskDue(1), now=run.tasks[1].due_at or 0.0))
            assert list(await store.unsent(10)) == [Unsent("a", 1, 2)]
            await change(store, changed(run, Cancelled()))
            assert list(await store.unsent(10)) == []

    async def test_a_dead_letter_is_unsent_until_it_is_noted_or_discarded(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            await change(store, changed(run, failure(0), failure(1), failure(2)))
            assert not run.is_open
            assert list(await store.unsent(10)) == [Unsent("a", n, 1) for n in range(3)]
            await change(store, changed(run, Sent(1, 1, dead_letter=True), DeadLetterDiscarded(2)))
            assert list(await store.unsent(10)) == [Unsent("a", 0, 1)]

    async def test_sent_commands_are_forgotten(self) -> None:
        async with self.opened() as store:
            run, ended = make_run("a"), make_run("ended")
            await create(store, run, ended)
            await change(store, changed(run, Sent(0, 1), Sent(2, 1), failure(2, retryable=True)))
            await change(store, changed(ended, Sent(0, 1), Cancelled()))
            assert await store.forget_sent() == 1  # the run's other task waits for its retry
            assert list(await store.unsent(10)) == [Unsent("a", 0, 1), Unsent("a", 1, 1)]
            assert await store.forget_sent() == 0
            snapshot = await load(store, "a")
            assert snapshot.tasks[0].unsent
            assert snapshot.head.version == run.head.version
            await change(store, changed(revived(snapshot), Sent(0, 1)))
            assert list(await store.unsent(10)) == [Unsent("a", 1, 1)]

    async def test_resting_dead_letters_are_forgotten(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            await change(store, changed(run, *map(failure, range(3)), *(Sent(n, 1, dead_letter=True) for n in (0, 1))))
            await change(store, changed(run, DeadLetterDiscarded(1)))
            assert await store.forget_sent() == 1
            assert list(await store.unsent(10)) == [Unsent("a", 0, 1), Unsent("a", 2, 1)]

    async def test_the_commands_that_a_broker_took_are_found_by_run(self) -> None:
        async with self.opened() as store:
            one, two, three, ended = (make_run(name, now=NOW + n) for n, name in enumerate(("a", "b", "c", "d")))
            await create(store, one, two, three, ended)
            await change(store, changed(one, Sent(0, 1, via="rabbitmq"), Sent(1, 1, via="rabbitmq"), Sent(2, 1)))
            await change(store, changed(two, Sent(0, 1, via="redis")))
            await change(store, changed(three, Sent(0, 1, via="rabbitmq")))
            await change(store, changed(ended, Sent(0, 1, via="rabbitmq"), Cancelled()))
            assert set(await store.brokers_in_use()) == {"rabbitmq", "redis", None}
            assert list(await store.held_by("rabbitmq", 10)) == ["a", "c"]
            assert list(await store.held_by("rabbitmq", 1)) == ["a"]
            assert list(await store.held_by("rabbitmq", 10, "a")) == ["c"]
            assert list(await store.held_by(None, 10)) == ["a"]
            assert list(await store.held_by("nats", 10)) == []
            await change(store, changed(one, BrokerLost("rabbitmq")))
            assert list(await store.held_by("rabbitmq", 10)) == ["c"], "what is to be sent again is in nobody's hands"
            assert list(await store.unsent(10))[:2] == [Unsent("a", 0, 1), Unsent("a", 1, 1)]

    async def test_the_dead_letters_that_a_broker_took_are_found_by_run(self) -> None:
        async with self.opened() as store:
            run, other = make_run("a"), make_run("b")
            await create(store, run, other)
            resting = [Sent(n, 1, dead_letter=True, via="redis") for n in range(3)]
            await change(store, changed(run, *map(failure, range(3)), *resting))
            await change(store, changed(other, Sent(0, 1, via="redis")))
            assert list(await store.held_by("redis", 10, dead_letters=True)) == ["a"]
            assert list(await store.held_by("rabbitmq", 10, dead_letters=True)) == []
            await change(store, changed(run, BrokerLost("redis", dead_letters=True)))
            assert list(await store.unsent(10))[:3] == [Unsent("a", n, 1) for n in range(3)]

    # -- what a newer version wrote -----------------------------------------------------------------------------

    async def test_a_word_that_only_a_newer_version_knows_is_an_error_that_says_what_to_do(self) -> None:
        async with self.opened() as store:
            for field, what in _WORDS_OF_RUNS.items():
                await store.commit([_with_a_word_in(field)], [])
                with raises(WrittenByNewer) as refusal:
                    await store.load([field])
                expected = f"the store has 'novo' for {what}, as a newer ORÁCULO writes it: run that version"
                assert str(refusal.exception) == expected
            await store.commit([_with_a_word_in("what")], [])
            with raises(WrittenByNewer) as refusal:
                await store.history("what")
            assert "'novo' for an event of a run's history" in str(refusal.exception)

    async def test_the_census_leaves_out_what_only_a_newer_version_can_count(self) -> None:
        async with self.opened() as store:
            await store.commit([_with_a_word_in("head.status"), creation(make_run("a"))], [])
            assert await store.census() == dict.fromkeys(RunStatus, 0) | {RunStatus.RUNNING: 1}

    # -- retention ----------------------------------------------------------------------------------------------

    async def test_ended_runs_are_pruned_whole(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}") for n in range(3)]
            await store.commit([creation(run, key=run.id) for run in runs], [])
            resting = [Sent(n, 1, dead_letter=True) for n in range(3)]
            await change(store, changed(runs[0], *map(failure, range(3)), *resting, now=NOW + 10))
            await change(store, succeeded(runs[1], now=NOW + 20))
            assert await store.prune(NOW + 10, 10) == 0
            assert await store.prune(NOW + 20, 10) == 1
            assert set(await store.load([run.id for run in runs])) == {"run-1", "run-2"}
            assert list(await store.history("run-0")) == []
            assert sum((await store.census()).values()) == 2
            # Its id and its key are free again, and the new run has nothing of the old one.
            again = make_run("run-0", payload=b'{"again":true}')
            [created] = (await store.commit([creation(again, key="run-0", fingerprint="other")], [])).created
            assert created.outcome is CreationOutcome.CREATED
            await assert_stored(store, again)

    async def test_a_prune_deletes_no_more_than_its_limit(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}") for n in range(5)]
            await create(store, *runs)
            await change(store, *(succeeded(run, now=NOW + 1) for run in runs))
            assert [await store.prune(NOW + 100, limit) for limit in (0, 2, 2, 2, 2)] == [0, 2, 2, 1, 0]

    async def test_a_run_with_something_to_deliver_is_kept(self) -> None:
        async with self.opened() as store:
            run = make_run("a", responder_em="respostas")
            await create(store, run)
            await change(store, succeeded(run, now=NOW + 1))
            assert await store.prune(NOW + 1_000, 10) == 0
            await change(store, changed(run, Delivered(0, 1), now=NOW + 2))
            assert await store.prune(NOW + 1_000, 10) == 1

    async def test_a_run_with_a_dead_letter_to_send_is_kept(self) -> None:
        async with self.opened() as store:
            run = make_run("a", destinos=["q"])
            await create(store, run)
            await change(store, changed(run, failure(0)))
            assert await store.prune(NOW + 1_000, 10) == 0
            await change(store, changed(run, Sent(0, 1, dead_letter=True)))
            assert await store.prune(NOW + 1_000, 10) == 1

    # -- the schema ---------------------------------------------------------------------------------------------

    async def test_an_open_store_is_up_to_date(self) -> None:
        async with self.opened() as store:
            await create(store, run := make_run("a"))
            await store.migrate()
            assert await store.migrate() == []
            await assert_stored(store, run)

    # -- opening and closing ------------------------------------------------------------------------------------

    async def test_everything_is_there_after_it_is_opened_again(self) -> None:
        store = await self.make_store()
        runs = [make_run(f"run-{n}", payload=PAYLOADS[3], now=NOW + n, webhook="https://a.org") for n in range(3)]
        await store.commit([creation(run, key=run.id) for run in runs], [])
        await change(store, changed(runs[0], Sent(0, 1), failure(1)), succeeded(runs[2]))
        await store.put_pipeline("p", b"{}", NOW)
        before = await everything(store, runs)
        page = await store.runs(RunQuery(limit=1))
        store = await self.reopen(store)
        try:
            assert await everything(store, runs) == before
            rest = await store.runs(RunQuery(cursor=page.cursor))
            assert [head.id for head in rest.heads] == ["run-1", "run-0"]
            [created] = (await store.commit([creation(make_run("x"), key="run-1")], [])).created
            assert (created.outcome, created.run_id) == (CreationOutcome.SAME, "run-1")
            await change(store, changed(runs[1], Sent(0, 1)))
        finally:
            await store.close()

    async def test_closing_finishes_what_was_accepted(self) -> None:
        store = await self.make_store()
        runs = [make_run(f"run-{n}") for n in range(10)]
        commits = [asyncio.ensure_future(store.commit([creation(run)], [])) for run in runs]
        await asyncio.sleep(0)
        store = await self.reopen(store)
        try:
            await asyncio.gather(*commits)
            assert len(await store.load([run.id for run in runs])) == 10
        finally:
            await store.close()

    async def test_starting_and_closing_twice(self) -> None:
        store = await self.make_store()
        await store.start()
        await create(store, make_run("a"))
        await store.start()
        assert set(await store.load(["a"])) == {"a"}
        await store.close()
        await store.close()
        with raises(StoreUnavailable):
            await store.check()
        for call in (store.load(["a"]), store.commit([], []), store.runs(RunQuery()), store.prune(NOW, 1)):
            with raises(StoreError) as refusal:
                await call
            assert "not open: call start() first" in str(refusal.exception)

    async def test_the_check_returns_the_version(self) -> None:
        async with self.opened() as store:
            assert any(character.isdigit() for character in await store.check())
            assert store.name


class _Newer(StrEnum):
    """Words that a newer version might write."""

    WORD = "novo"


_WORDS_OF_RUNS = {
    "head.status": "the status of a run",
    "task.status": "the status of a task",
    "task.cause": "why a task ended",
    "delivery.channel": "the way of a delivery",
    "delivery.status": "the status of a delivery",
}


def _with_a_word_in(field: str) -> Creation:
    """Return a creation that has a word of a newer version in that field, and the field's name as its id."""
    made = creation(make_run(field, webhook="https://a.org"))
    run, history = made.changes.run, made.changes.history
    if field == "what":
        history[0] = msgspec.structs.replace(history[0], what=_Newer.WORD)
        return made
    owner, _, name = field.partition(".")
    owners: dict[str, Any] = {"head": run.head, "task": run.tasks[0], "delivery": run.head.deliveries[0]}
    setattr(owners[owner], name, _Newer.WORD)
    return made
