"""The tests of the store suite about reading runs: lists, histories, heads and counts."""

import msgspec

from oraculo.core.events import (
    Answered,
    Cancelled,
    Progressed,
)
from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.run import RunStatus
from oraculo.errors import InvalidInput
from oraculo.ports.browse import RunQuery
from oraculo.testing.store_runs import (
    NOW,
    change,
    changed,
    create,
    creation,
    ids_of,
    load,
    make_run,
    raises,
    revived,
    succeeded,
)
from oraculo.testing.store_stage import StoreStage
from oraculo.wire.tracebacks import bounded_traceback, split_traceback


class StoreBrowse(StoreStage):
    """Tests about lists, histories, heads and counts."""

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
            entries = list(first.changes.history)
            await store.commit([first, creation(make_run("b"))], [])
            for number in range(5):
                changes = changed(run, Progressed(1, float(number), f"passo {number}"), now=NOW + number)
                entries += changes.history
                await change(store, changes)
            assert list(await store.history("a")) == entries
            assert entries[1] == HistoryEntry(2, NOW, Happened.PROGRESS, 1, 1, "0 % passo 0")
            assert list(await store.history("a", after=2, limit=3)) == entries[2:5]
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
