"""What every store must do: one suite for all of them, run by each adapter's own test module.

    class TestMyStore(StoreSuite):
        async def make_store(self) -> Storage: ...  # started, on a place of the test's own; a second shares the data

The tests are plain coroutines with plain asserts: pytest with `asyncio_mode = "auto"` runs them, and importing this
module needs no pytest.
"""

import asyncio
import time
from enum import StrEnum
from typing import Any

import msgspec

from oraculo.core.events import (
    Answered,
    BrokerLost,
    Cancelled,
    DeadLetterDiscarded,
    Delivered,
    Progressed,
    RunDue,
    Sent,
    TaskDue,
)
from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.run import RunStatus
from oraculo.errors import InvalidInput, StoreUnavailable, WrittenByNewer
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Creation, CreationOutcome, Due, Unsent
from oraculo.testing.store_commits import StoreCommits
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
    ids_of,
    load,
    make_run,
    raises,
    revived,
    succeeded,
    unsent_pages,
)
from oraculo.wire.tracebacks import bounded_traceback, split_traceback


class StoreSuite(StoreCommits):
    """Subclass it, name the class `Test…`, and give it `make_store`."""

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

    # -- what is to be sent, and what rests in dead letters -----------------------------------------------------

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
            assert await store.forget_sent() == 1  # the other one of this run waits for its retry
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

    # -- lists --------------------------------------------------------------------------------------------------

    async def test_runs_are_listed_newest_first(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}", now=NOW + n) for n in range(5)]
            await create(store, *runs[:3])
            await create(store, *runs[3:])
            page = await store.runs(RunQuery())
            assert list(page.heads) == [run.head for run in reversed(runs)]
            assert page.cursor is None

    async def test_lists_are_filtered(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"{name}-{n}", name=name, now=NOW + n) for n, name in enumerate(("video", "blog") * 2)]
            await create(store, *runs)
            await change(store, succeeded(runs[0]), succeeded(runs[1]))
            assert await ids_of(store, RunQuery(name="video")) == ["video-2", "video-0"]
            assert await ids_of(store, RunQuery(statuses=frozenset({RunStatus.SUCCEEDED}))) == ["blog-1", "video-0"]
            assert await ids_of(store, RunQuery(statuses=frozenset({RunStatus.RUNNING}), name="blog")) == ["blog-3"]
            assert await ids_of(store, RunQuery(statuses=frozenset({RunStatus.FAILED}))) == []
            assert await ids_of(store, RunQuery(name="vide")) == []
            assert await ids_of(store, RunQuery(statuses=frozenset({RunStatus.RUNNING}), name="blog", text="og-3")) == [
                "blog-3"
            ]

    async def test_lists_take_several_statuses_newest_first(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"{name}-{n}", name=name, now=NOW + n) for n, name in enumerate(("video", "blog") * 3)]
            await create(store, *runs)
            await change(store, succeeded(runs[0]), succeeded(runs[3]), changed(runs[4], Cancelled()))
            ended = frozenset({RunStatus.SUCCEEDED, RunStatus.CANCELLED, RunStatus.TIMED_OUT})
            assert await ids_of(store, RunQuery(statuses=ended)) == ["video-4", "blog-3", "video-0"]
            assert await ids_of(store, RunQuery(statuses=ended, name="video")) == ["video-4", "video-0"]
            assert await ids_of(store, RunQuery(statuses=ended, text="O-3")) == []
            assert await ids_of(store, RunQuery(statuses=ended, text="OG-3")) == ["blog-3"]
            every = frozenset(RunStatus)
            assert await ids_of(store, RunQuery(statuses=every)) == [run.id for run in reversed(runs)]
            first = await store.runs(RunQuery(statuses=every, limit=4))
            rest = await store.runs(RunQuery(statuses=every, limit=4, cursor=first.cursor))
            assert [head.id for head in (*first.heads, *rest.heads)] == [run.id for run in reversed(runs)]
            assert rest.cursor is None

    async def test_lists_are_bounded_by_when_runs_were_created(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}", name="rota", now=NOW + n) for n in range(5)]
            await create(store, *runs)
            await change(store, succeeded(runs[2]))
            assert await ids_of(store, RunQuery(since=NOW + 3)) == ["run-4", "run-3"]
            assert await ids_of(store, RunQuery(until=NOW + 1)) == ["run-0"], "that moment itself is not before it"
            between = RunQuery(since=NOW + 1, until=NOW + 4)
            assert await ids_of(store, between) == ["run-3", "run-2", "run-1"]
            page = await store.runs(msgspec.structs.replace(between, limit=2))
            rest = await store.runs(msgspec.structs.replace(between, limit=2, cursor=page.cursor))
            assert [head.id for head in rest.heads] == ["run-1"]
            assert rest.cursor is None
            running = frozenset({RunStatus.RUNNING})
            narrow = msgspec.structs.replace(between, statuses=running, name="rota", text="RUN")
            assert await ids_of(store, narrow) == ["run-3", "run-1"]
            assert await ids_of(store, RunQuery(since=NOW + 100)) == []
            assert await ids_of(store, RunQuery(until=NOW - 1e6, statuses=running | {RunStatus.FAILED})) == []

    async def test_text_is_found_anywhere_in_any_case_and_literally(self) -> None:
        async with self.opened() as store:
            names = ("100%", "1000", "a_b", "aXb", "back\\slash", "Promoção-É", "[x]*.?")
            await create(store, *(make_run(name, now=NOW + n) for n, name in enumerate(names)))
            await create(store, make_run("by-name", name="Coleta_Completa", now=NOW + 50))
            assert await ids_of(store, RunQuery(text="0%")) == ["100%"]
            assert await ids_of(store, RunQuery(text="A_B")) == ["a_b"]
            assert await ids_of(store, RunQuery(text="k\\s")) == ["back\\slash"]
            assert await ids_of(store, RunQuery(text="PROMOÇÃO-é")) == ["Promoção-É"]
            assert await ids_of(store, RunQuery(text="[X]*.?")) == ["[x]*.?"]
            assert await ids_of(store, RunQuery(text="coleta_c")) == ["by-name"]
            assert await ids_of(store, RunQuery(text="nowhere")) == []

    async def test_text_is_found_in_letters_whose_other_case_is_written_otherwise(self) -> None:
        async with self.opened() as store:
            names = ("Straße", "\N{KELVIN SIGN}elvin", "\N{LATIN SMALL LETTER LONG S}ol", "plain")
            await create(store, *(make_run(name, now=NOW + n) for n, name in enumerate(names)))
            await create(store, make_run("by-name", name="\N{LATIN SMALL LIGATURE FI}m", now=NOW + 50))
            for text in ("strasse", "STRASSE", "straße", "Aß"):
                assert await ids_of(store, RunQuery(text=text)) == ["Straße"]
            assert await ids_of(store, RunQuery(text="kelv")) == [names[1]]
            assert await ids_of(store, RunQuery(text="SOL")) == [names[2]]
            assert await ids_of(store, RunQuery(text="fim")) == ["by-name"]
            assert await ids_of(store, RunQuery(text="\N{KELVIN SIGN}")) == [names[1]]

    async def test_no_text_is_found_across_id_and_name(self) -> None:
        async with self.opened() as store:
            await create(store, make_run("a", name="rota"))
            for between in ("", "\x1e", "\x1f", "\n", "|"):
                assert await ids_of(store, RunQuery(text=f"a{between}rota")) == []
            assert await ids_of(store, RunQuery(text="\x1f")) == []

    async def test_pages_stay_true_while_runs_are_added(self) -> None:
        async with self.opened() as store:
            await create(store, *(make_run(f"old-{n}", now=NOW + n) for n in range(7)))
            seen: list[str] = []
            cursor = None
            for page_number in range(4):
                page = await store.runs(RunQuery(limit=2, cursor=cursor))
                seen += [head.id for head in page.heads]
                cursor = page.cursor
                assert (cursor is None) == (page_number == 3)
                await create(store, make_run(f"new-{page_number}", now=NOW + 100 + page_number))
            assert seen == [f"old-{n}" for n in range(6, -1, -1)]

    async def test_a_full_last_page_has_no_cursor(self) -> None:
        async with self.opened() as store:
            await create(store, *(make_run(f"run-{n}", now=NOW + n) for n in range(4)))
            first = await store.runs(RunQuery(limit=2, text="run"))
            last = await store.runs(RunQuery(limit=2, text="run", cursor=first.cursor))
            assert [head.id for head in last.heads] == ["run-1", "run-0"]
            assert last.cursor is None

    async def test_a_page_behind_runs_that_were_pruned_shows_no_new_ones(self) -> None:
        async with self.opened() as store:
            runs = [make_run(f"run-{n}") for n in range(3)]
            await create(store, *runs)
            page = await store.runs(RunQuery(limit=1))
            await change(store, *(succeeded(run) for run in runs))
            assert await store.prune(NOW + 100, 10) == 3
            await create(store, make_run("new", now=NOW + 200))
            assert (await store.runs(RunQuery(cursor=page.cursor))).heads == []

    async def test_a_cursor_that_no_page_gave_is_refused(self) -> None:
        async with self.opened() as store:
            await create(store, make_run("a"))
            for cursor in ("", "x", "0", "-1", "AAAA", "não é", "' OR 1=1", "A" * 16, "A" * 5_000):
                with raises(InvalidInput) as refusal:
                    await store.runs(RunQuery(cursor=cursor))
                assert [fault.field for fault in refusal.exception.faults] == ["cursor"]

    async def test_history_is_paged(self) -> None:
        async with self.opened() as store:
            run = make_run("a", name="rota")
            first = creation(run)
            told = list(first.changes.history)
            await store.commit([first, creation(make_run("b"))], [])
            for number in range(5):
                changes = changed(run, Progressed(1, float(number), f"passo {number}"), now=NOW + number)
                told += changes.history
                await change(store, changes)
            assert list(await store.history("a")) == told
            assert told[1] == HistoryEntry(2, NOW, Happened.PROGRESS, 1, 1, "0 % passo 0")
            assert list(await store.history("a", after=2, limit=3)) == told[2:5]
            assert list(await store.history("a", after=6)) == []
            assert list(await store.history("nobody")) == []

    async def test_the_traceback_of_an_attempt_is_kept_as_it_is(self) -> None:
        async with self.opened() as store:
            run, trace = make_run("a"), bounded_traceback('  File "loja.py"\n\ttoo much: né\n' * 2_000)
            await create(store, run)
            failed = Answered(1, 1, b"{}", failed=True, reason="boom", traceback=trace)
            await change(store, changed(run, failed, now=NOW))
            last = (await store.history("a"))[-1]
            assert last.what is Happened.ATTEMPT_FAILED
            assert split_traceback(last.detail)[1] == trace

    async def test_heads_are_read_without_their_tasks(self) -> None:
        async with self.opened() as store:
            runs = [make_run("a", name="rota"), make_run("b")]
            await create(store, *runs)
            await change(store, succeeded(runs[0]))
            heads = await store.heads(["b", "a", "nobody"])
            assert heads == {"a": runs[0].head, "b": runs[1].head}

    async def test_a_copy_is_current_until_somebody_else_commits(self) -> None:
        async with self.opened() as store:
            runs = [make_run("a"), make_run("b")]
            await create(store, *runs)
            copies = [run.head for run in runs]
            assert await store.unchanged([*copies, make_run("nobody").head]) == {"a", "b"}
            await change(store, succeeded(revived(await load(store, "a"))))
            assert await store.unchanged(copies) == {"b"}
            assert await store.unchanged([(await load(store, "a")).head]) == {"a"}
            again = msgspec.structs.replace(copies[1], created_at=copies[1].created_at - 1)
            assert await store.unchanged([again]) == frozenset(), "another run, to which the id was given before"

    async def test_the_census_counts_every_status(self) -> None:
        async with self.opened() as store:
            assert await store.census() == dict.fromkeys(RunStatus, 0)
            runs = [make_run(f"run-{n}") for n in range(5)]
            await create(store, *runs)
            await change(store, succeeded(runs[0]), succeeded(runs[1]), changed(runs[2], Cancelled()))
            counted = await store.census()
            assert counted == dict.fromkeys(RunStatus, 0) | {
                RunStatus.RUNNING: 2,
                RunStatus.SUCCEEDED: 2,
                RunStatus.CANCELLED: 1,
            }
            assert {type(status) for status in counted} == {RunStatus}

    # -- what a newer version wrote -----------------------------------------------------------------------------

    async def test_a_word_that_only_a_newer_version_knows_is_told_with_what_to_do(self) -> None:
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
            # Its id and its key are free again, and nothing of the old run clings to the new one.
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

    # -- pipelines ----------------------------------------------------------------------------------------------

    async def test_pipelines_are_put_replaced_and_deleted(self) -> None:
        async with self.opened() as store:
            assert await store.pipelines() == {}
            await store.put_pipeline("vídeo", b'{"v":1}', NOW)
            await store.put_pipeline("blog", b'{"b":1}', NOW)
            await store.put_pipeline("vídeo", b'{"v":2}', NOW + 1)
            assert await store.pipelines() == {"vídeo": b'{"v":2}', "blog": b'{"b":1}'}
            assert await store.delete_pipeline("vídeo") is True
            assert await store.delete_pipeline("vídeo") is False
            assert await store.pipelines() == {"blog": b'{"b":1}'}

    async def test_the_pipelines_mark_changes_with_every_put_and_delete(self) -> None:
        async with self.opened() as store:
            marks = [await store.pipelines_mark()]
            for definition in (b"{}", b'{"a":1}', b'{"a":1}'):
                await store.put_pipeline("p", definition, NOW)  # all at one moment: the mark is no time
                marks.append(await store.pipelines_mark())
            assert await store.delete_pipeline("p")
            marks.append(await store.pipelines_mark())
            assert len(set(marks)) == len(marks)
            assert await store.pipelines_mark() == marks[-1]

    # -- engines ------------------------------------------------------------------------------------------------

    async def test_engines_that_attend_see_each_other(self) -> None:
        async with self.opened() as store:
            assert await store.attend("b", NOW, 5) == ["b"]
            assert await store.attend("a", NOW + 1, 5) == ["a", "b"]
            assert await store.attend("b", NOW + 2, 5) == ["a", "b"]

    async def test_an_engine_that_no_longer_attends_is_forgotten(self) -> None:
        async with self.opened() as store:
            await store.attend("a", NOW, 5)
            assert await store.attend("b", NOW + 5, 5) == ["a", "b"]
            assert await store.attend("b", NOW + 5.5, 5) == ["b"]
            assert await store.attend("a", NOW + 6, 5) == ["a", "b"]

    async def test_an_engine_that_was_noted_before_the_clock_was_set_back_is_forgotten(self) -> None:
        async with self.opened() as store:
            await store.attend("dead", NOW, 5)
            assert await store.attend("alive", NOW - 600, 5) == ["alive"]
            await store.attend("other", NOW - 599, 5)
            assert await store.attend("alive", NOW - 598, 5) == ["alive", "other"]

    async def test_whoever_is_no_engine_sees_those_that_attend(self) -> None:
        async with self.opened() as store:
            assert list(await store.engines(NOW - 5)) == []
            await store.attend("b", NOW, 5)
            await store.attend("a", NOW + 1, 5)
            assert list(await store.engines(NOW)) == ["a", "b"]
            assert list(await store.engines(NOW + 0.5)) == ["a"]
            assert list(await store.engines(NOW + 1.5)) == []
            assert await store.attend("a", NOW + 2, 5) == ["a", "b"], "looking forgets nobody"

    async def test_an_installation_has_a_name_of_its_own_that_stays(self) -> None:
        async with self.opened() as store, self.opened() as other:
            names = await asyncio.gather(store.installation(), other.installation())
            assert names[0] == names[1] == await store.installation()
            assert len(names[0]) == 32
            reopened = await self.reopen(store)
            assert await reopened.installation() == names[0]
            await reopened.close()

    async def test_what_was_noted_once_is_known_to_all_and_stays(self) -> None:
        async with self.opened() as store, self.opened() as other:
            assert not await store.noted("seen: /a")
            await asyncio.gather(store.note("seen: /a"), other.note("seen: /a"))
            assert await store.noted("seen: /a")
            assert await other.noted("seen: /a")
            assert not await store.noted("seen: /b")
            reopened = await self.reopen(store)
            assert await reopened.noted("seen: /a")
            await reopened.close()

    async def test_its_own_clock_goes_on_by_seconds_since_1970(self) -> None:
        async with self.opened() as store:
            if (first := await store.clock()) is not None:
                second = await store.clock()
                assert second is not None
                assert first <= second < first + 60
                assert abs(time.time() - first) < 60, "the server of a test goes by this machine's clock"

    async def test_an_engine_that_departs_is_forgotten_at_once(self) -> None:
        async with self.opened() as store:
            await store.attend("a", NOW, 5)
            await store.attend("b", NOW, 5)
            await store.depart("a")
            await store.depart("nobody")
            assert await store.attend("b", NOW, 5) == ["b"]

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

    async def test_the_check_tells_the_version(self) -> None:
        async with self.opened() as store:
            assert any(character.isdigit() for character in await store.check())
            assert store.name


class _Newer(StrEnum):
    """As another version would write it where this one has words of its own."""

    WORD = "novo"


_WORDS_OF_RUNS = {
    "head.status": "the status of a run",
    "task.status": "the status of a task",
    "task.cause": "why a task ended",
    "delivery.channel": "the way of a delivery",
    "delivery.status": "the status of a delivery",
}


def _with_a_word_in(field: str) -> Creation:
    """A run that is named after the field."""
    made = creation(make_run(field, webhook="https://a.org"))
    run, history = made.changes.run, made.changes.history
    if field == "what":
        history[0] = msgspec.structs.replace(history[0], what=_Newer.WORD)
        return made
    owner, _, name = field.partition(".")
    owners: dict[str, Any] = {"head": run.head, "task": run.tasks[0], "delivery": run.head.deliveries[0]}
    setattr(owners[owner], name, _Newer.WORD)
    return made
