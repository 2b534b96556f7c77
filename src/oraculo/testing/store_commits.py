"""The tests of the store suite about commits: creations, versions, all or nothing."""

import asyncio

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.core.history import Happened
from oraculo.core.machine import start
from oraculo.core.run import Cause, Changes, RunStatus, Task, TaskStatus
from oraculo.errors import StoreError
from oraculo.ports.store import CreationOutcome
from oraculo.testing.store_runs import (
    NOW,
    OK,
    PAYLOADS,
    UNWRITABLE,
    assert_stored,
    assert_task_stored,
    change,
    changed,
    create,
    creation,
    failure,
    full_head,
    full_task,
    load,
    make_run,
    raises,
    revived,
    stored_form,
)
from oraculo.testing.store_stage import StoreStage


class StoreCommits(StoreStage):
    """Tests about commits."""

    async def test_a_new_run_is_loaded_as_it_was_created(self) -> None:
        async with self.opened() as store:
            run = make_run("first", payload=b'{"fonte":"x"}', prioridade=9, webhook="https://example.org/hook")
            await create(store, run)
            assert run.head.version == 1
            await assert_stored(store, run)

    async def test_every_field_comes_back(self) -> None:
        async with self.opened() as store:
            run = make_run("full", name="rota")
            first = creation(run)
            run.head, run.tasks = full_head(run.head), [full_task(task) for task in run.tasks]
            first.changes.tasks = {task.number: task for task in run.tasks}
            await store.commit([first], [])
            await assert_stored(store, run)

    async def test_every_field_that_changes_is_written_by_a_change(self) -> None:
        """A run is changed alone and with others, which a store may write in two ways."""
        async with self.opened() as store:
            for count in (1, 3, 20):
                runs = [make_run(f"{number} of {count}", name="rota") for number in range(count)]
                await create(store, *runs)
                changes = [Changes(run) for run in runs]
                for run, each in zip(runs, changes, strict=True):
                    run.head, run.tasks[1] = full_head(run.head), full_task(run.tasks[1])
                    run.head.version = 1
                    each.touch(run.tasks[1])
                await change(store, *changes)
                for run in runs:
                    assert run.head.version == 2
                    await assert_stored(store, run)

    async def test_fields_can_be_emptied_again(self) -> None:
        async with self.opened() as store:
            run = make_run("full")
            first = creation(run)
            run.tasks[0] = first.changes.tasks[0] = full_task(run.tasks[0])
            await store.commit([first], [])
            changes = Changes(run)
            run.tasks[0] = Task(0)
            run.head.due_at = run.head.ended_at = None
            run.head.deliveries = []
            changes.touch(run.tasks[0])
            await change(store, changes)
            await assert_stored(store, run)

    async def test_every_status_of_a_run(self) -> None:
        async with self.opened() as store:
            for status in RunStatus:
                run = make_run(status.name)
                first = creation(run)
                run.head.status = status
                await store.commit([first], [])
                assert (await load(store, status.name)).head.status is status

    async def test_every_status_and_cause_of_a_task(self) -> None:
        combinations = [(status, cause) for status in TaskStatus for cause in Cause]
        async with self.opened() as store:
            run = make_run("run", destinos=[{"fila": "q", "id": str(n)} for n in range(len(combinations))])
            first = creation(run)
            for task, (status, cause) in zip(run.tasks, combinations, strict=True):
                task.status, task.cause = status, cause
            await store.commit([first], [])
            loaded = (await load(store, "run")).tasks
            assert [(task.status, task.cause) for task in loaded] == combinations
            assert {type(task.status) for task in loaded} == {TaskStatus}

    async def test_payloads_and_results_come_back_byte_for_byte(self) -> None:
        async with self.opened() as store:
            for number, payload in enumerate(PAYLOADS):
                run = make_run(str(number), payload=payload)
                await create(store, run)
                await change(store, changed(run, Answered(1, 1, payload)))
                snapshot = await load(store, run.id)
                assert snapshot.payload == payload
                assert snapshot.tasks[1].result == payload
                await assert_task_stored(store, run, 1)

    async def test_ids_and_texts_of_any_script(self) -> None:
        async with self.opened() as store:
            run = make_run("漢字 'aspas\" ; -- 🙂 \\ %s $1 :x ?")
            await create(store, run)
            await change(store, changed(run, Progressed(0, 33.3, "100 % — não há 'nada' aqui\n\t🙂")))
            await assert_stored(store, run)

    async def test_loading_what_is_not_there(self) -> None:
        async with self.opened() as store:
            await create(store, make_run("here"))
            assert set(await store.load(["here", "not there", "here"])) == {"here"}
            assert await store.load([]) == {}
            assert await store.task("not there", 0) is None
            assert await store.task("here", 3) is None

    async def test_many_runs_are_loaded_at_once(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}", now=NOW + n) for n in range(1_200)]
            await create(store, *runs)
            loaded = await store.load([run.id for run in runs])
            assert [loaded[run.id].head for run in runs] == [run.head for run in runs]
            assert all(stored_form(loaded[run.id].tasks) == stored_form(run.tasks) for run in runs)

    async def test_a_run_of_ten_thousand_tasks(self) -> None:
        async with self.opened() as store:
            run = make_run("wide", destinos=[{"fila": "q", "id": f"t{n}"} for n in range(10_000)])
            await create(store, run)
            await change(store, changed(run, Sent(9_998, 1), Answered(5_000, 1, OK), failure(9_997)))
            await assert_stored(store, run)
            for number in (0, 5_000, 9_997, 9_999):
                await assert_task_stored(store, run, number)
            last = await store.unsent(limit=20_000, after=("wide", 9_900))
            assert [command.task for command in last] == [*range(9_901, 9_998), 9_999]

    # -- ids and idempotency keys -------------------------------------------------------------------------------

    async def test_the_same_request_twice_is_one_run(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            again = make_run("a")
            [created] = (await store.commit([creation(again)], [])).created
            assert (created.outcome, created.run_id) == (CreationOutcome.SAME, "a")
            assert again.head.version == 0
            await assert_stored(store, run)

    async def test_an_id_in_use(self) -> None:
        async with self.opened() as store:
            run = make_run("a", payload=b'{"mine":1}')
            await create(store, run)
            other = creation(make_run("a", payload=b'{"yours":1}'), fingerprint="other", key="k")
            [created] = (await store.commit([other], [])).created
            assert (created.outcome, created.run_id) == (CreationOutcome.ID_IN_USE, "a")
            await assert_stored(store, run)
            # The refused request must not have taken its key.
            [created] = (await store.commit([creation(make_run("b"), key="k")], [])).created
            assert created.outcome is CreationOutcome.CREATED

    async def test_an_idempotency_key_gives_the_first_run(self) -> None:
        async with self.opened() as store:
            await store.commit([creation(make_run("a"), key="k")], [])
            same = creation(make_run("b"), key="k")
            other = creation(make_run("c"), key="k", fingerprint="other")
            created = (await store.commit([same, other], [])).created
            assert [(c.outcome, c.run_id) for c in created] == [
                (CreationOutcome.SAME, "a"),
                (CreationOutcome.KEY_REUSED, "a"),
            ]
            assert set(await store.load(["a", "b", "c"])) == {"a"}

    async def test_a_run_is_found_by_its_key_and_fingerprint(self) -> None:
        async with self.opened() as store:
            await store.commit([creation(make_run("a"), key="k"), creation(make_run("k"))], [])
            assert await store.created_with("k", "same") == "a"
            assert await store.created_with("k", "other") is None
            assert await store.created_with("a", "same") is None

    async def test_the_key_counts_before_the_id(self) -> None:
        async with self.opened() as store:
            await store.commit([creation(make_run("a"), key="k"), creation(make_run("b"))], [])
            [created] = (await store.commit([creation(make_run("b"), key="k")], [])).created
            assert (created.outcome, created.run_id) == (CreationOutcome.SAME, "a")

    async def test_equal_requests_in_one_commit(self) -> None:
        async with self.opened() as store:
            runs = [make_run("a"), make_run("a"), make_run("b"), make_run("c"), make_run("b")]
            keys = [None, None, "k", "k", None]
            creations = [creation(run, key=key) for run, key in zip(runs, keys, strict=True)]
            created = (await store.commit(creations, [])).created
            assert [c.outcome for c in created] == [
                CreationOutcome.CREATED,
                CreationOutcome.SAME,
                CreationOutcome.CREATED,
                CreationOutcome.SAME,
                CreationOutcome.SAME,
            ]
            assert [c.run_id for c in created] == ["a", "a", "b", "b", "b"]
            assert (await store.census())[RunStatus.RUNNING] == 2

    async def test_a_creation_whose_rival_in_the_commit_was_refused(self) -> None:
        """The first with the id is refused, because another run has its key. The second can be written."""
        async with self.opened() as store:
            await store.commit([creation(make_run("x"), key="k")], [])
            rivals = [creation(make_run("a"), key="k", fingerprint="other"), creation(second := make_run("a"))]
            created = (await store.commit(rivals, [])).created
            assert [(c.outcome, c.run_id) for c in created] == [
                (CreationOutcome.KEY_REUSED, "x"),
                (CreationOutcome.CREATED, "a"),
            ]
            await assert_stored(store, second)

    async def test_a_race_for_one_key_has_one_winner(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}") for n in range(50)]
            commits = await asyncio.gather(*(store.commit([creation(run, key="k")], []) for run in runs))
            created = [commit.created[0] for commit in commits]
            winners = [c.run_id for c in created if c.outcome is CreationOutcome.CREATED]
            assert len(winners) == 1
            assert {(c.outcome, c.run_id) for c in created} == {
                (CreationOutcome.CREATED, winners[0]),
                (CreationOutcome.SAME, winners[0]),
            }
            assert set(await store.load([run.id for run in runs])) == set(winners)

    async def test_two_engines_share_keys(self) -> None:
        async with self.opened() as one, self.opened() as other:
            for attempt in range(10):
                runs = [make_run(f"{attempt}-{n}") for n in range(40)]
                creations = [creation(run, key=f"{attempt}-key-{n // 4}") for n, run in enumerate(runs)]
                # Each in another order, so that each could hold what the other waits for.
                committed = await asyncio.gather(one.commit(creations[::2], []), other.commit(creations[::-2], []))
                created = [each for result in committed for each in result.created]
                assert [each.outcome for each in created].count(CreationOutcome.CREATED) == 10
                assert {each.outcome for each in created} == {CreationOutcome.CREATED, CreationOutcome.SAME}
                assert set(await one.load([run.id for run in runs])) == {each.run_id for each in created}

    async def test_two_engines_race_for_one_id(self) -> None:
        async with self.opened() as one, self.opened() as other:
            for attempt in range(20):
                rivals = [creation(make_run(f"run-{attempt}"), fingerprint=name) for name in ("mine", "yours")]
                results = await asyncio.gather(one.commit(rivals[:1], []), other.commit(rivals[1:], []))
                outcomes = sorted(result.created[0].outcome for result in results)
                assert outcomes == [CreationOutcome.CREATED, CreationOutcome.ID_IN_USE]
                assert len((await load(one, f"run-{attempt}")).tasks) == 3

    # -- commits by version -------------------------------------------------------------------------------------

    async def test_two_engines_conflict_by_version(self) -> None:
        async with self.opened() as one, self.opened() as other:
            await create(one, make_run("a"))
            for version in range(1, 20):
                rivals = [(store, revived(await load(store, "a"))) for store in (one, other)]
                commits = [store.commit([], [changed(run, Progressed(0, float(version)))]) for store, run in rivals]
                results = await asyncio.gather(*commits)
                assert sorted(len(result.conflicts) for result in results) == [0, 1]
                snapshot = await load(one, "a")
                assert snapshot.head.version == version + 1
                assert len(await one.history("a")) == snapshot.head.entries

    async def test_a_commit_moves_the_version_by_one(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            for version in (2, 3, 4):
                await change(store, changed(run, Progressed(0, float(version))))
                assert run.head.version == version
                await assert_stored(store, run)

    async def test_nothing_to_commit(self) -> None:
        async with self.opened() as store:
            committed = await store.commit([], [])
            assert (list(committed.created), committed.conflicts) == ([], frozenset())

    async def test_a_conflict_writes_nothing(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            stale = revived(await load(store, "a"))
            await change(store, changed(run, Sent(0, 1)))
            lost = changed(stale, Answered(0, 1, OK), failure(1))
            assert (await store.commit([], [lost])).conflicts == {"a"}
            assert stale.head.version == 1
            await assert_stored(store, run)
            assert [entry.what for entry in await store.history("a")] == [Happened.STARTED, Happened.SENT]

    async def test_a_version_from_the_future_conflicts(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            changes = changed(run, Sent(0, 1))
            changes.based_on = 2
            assert (await store.commit([], [changes])).conflicts == {"a"}
            assert (await load(store, "a")).head.version == 1

    async def test_a_change_of_a_run_that_is_gone_conflicts(self) -> None:
        async with self.opened() as store:
            run = make_run("never created")
            start(run, NOW)
            run.head.version = 1
            assert (await store.commit([], [changed(run, Sent(0, 1))])).conflicts == {run.id}
            assert await store.load([run.id]) == {}

    async def test_one_conflict_does_not_stop_the_others(self) -> None:
        async with self.opened() as store:
            runs = [make_run(name) for name in "abc"]
            await create(store, *runs)
            stale = revived(await load(store, "b"))
            await change(store, changed(runs[1], Sent(0, 1)))
            batch = [changed(runs[0], Sent(1, 1)), changed(stale, Sent(2, 1)), changed(runs[2], Sent(1, 1))]
            committed = await store.commit([creation(new := make_run("d"))], batch)
            assert committed.conflicts == {"b"}
            assert [created.outcome for created in committed.created] == [CreationOutcome.CREATED]
            for run in (*runs, new):
                await assert_stored(store, run)

    async def test_a_copy_far_behind_conflicts_and_the_run_beside_it_is_written(self) -> None:
        async with self.opened() as store:
            moved, beside = make_run("moved"), make_run("beside")
            await create(store, moved, beside)
            stale = revived(await load(store, "moved"))
            for number in range(20):
                await change(store, changed(moved, Progressed(0, float(number))))
            committed = await store.commit([], [changed(stale, Sent(0, 1)), changed(beside, Sent(0, 1))])
            assert committed.conflicts == {"moved"}
            assert (stale.head.version, beside.head.version) == (1, 2)
            for run in (moved, beside):
                await assert_stored(store, run)

    async def test_of_rivals_on_one_version_exactly_one_wins(self) -> None:
        async with self.opened() as store:
            await create(store, make_run("a"))
            for version in range(1, 6):
                rivals = [revived(await load(store, "a")) for _ in range(10)]
                batches = [changed(run, Progressed(0, float(number))) for number, run in enumerate(rivals)]
                committed = await asyncio.gather(*(store.commit([], [batch]) for batch in batches))
                winners = [run for run, result in zip(rivals, committed, strict=True) if not result.conflicts]
                assert len(winners) == 1
                assert winners[0].head.version == version + 1
                await assert_stored(store, winners[0])

    async def test_what_changes_after_the_call_is_not_written(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            commit = asyncio.ensure_future(store.commit([], [changed(run, Progressed(0, 10.0, "then"))]))
            await asyncio.sleep(0)  # let it begin
            run.tasks[0].note, run.head.late = "later", 5
            await commit
            snapshot = await load(store, "a")
            assert (snapshot.tasks[0].note, snapshot.head.late) == ("then", 0)

    async def test_a_commit_outlives_the_caller_who_gave_up(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            commit = asyncio.ensure_future(store.commit([creation(run)], []))
            await asyncio.sleep(0)
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
            # It is written whole or not at all, and the store goes on.
            await create(store, make_run("b"))
            for snapshot in (await store.load(["a"])).values():
                assert len(snapshot.tasks) == 3

    # -- all or nothing -----------------------------------------------------------------------------------------

    async def test_a_change_that_cannot_be_written_leaves_nothing(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            before = await load(store, "a")
            bad = changed(run, Sent(0, 1), Answered(1, 1, OK))
            bad.record(NOW, Happened.PROGRESS, detail=UNWRITABLE)
            with raises(StoreError):
                await store.commit([], [bad])
            assert run.head.version == 1
            assert await load(store, "a") == before
            assert len(await store.history("a")) == 1
            assert len(await store.unsent(10)) == 3

    async def test_a_creation_that_cannot_be_written_leaves_nothing(self) -> None:
        async with self.opened() as store:
            bad = creation(make_run("a"), key="k")
            bad.changes.tasks[2].reason = UNWRITABLE
            with raises(StoreError):
                await store.commit([bad], [])
            assert await store.load(["a"]) == {}
            assert (await store.unsent(10), await store.next_due()) == ([], None)
            [created] = (await store.commit([creation(make_run("a"), key="k")], [])).created
            assert created.outcome is CreationOutcome.CREATED

    async def test_a_bad_commit_does_not_sink_those_beside_it(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}") for n in range(20)]
            creations = [creation(run) for run in runs]
            creations[7].changes.tasks[0].note = UNWRITABLE
            results = await asyncio.gather(*(store.commit([each], []) for each in creations), return_exceptions=True)
            assert [number for number, result in enumerate(results) if isinstance(result, StoreError)] == [7]
            assert set(await store.load([run.id for run in runs])) == {run.id for run in runs} - {"run-7"}
