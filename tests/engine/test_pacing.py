"""A wide run that several engines decide: each leaves it to the others for a while, and none is held up by it."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oraculo.core import machine
from oraculo.core.events import Answered, RunDue, Sent
from oraculo.core.run import Changes, TaskStatus
from oraculo.engine.decide import pacing
from oraculo.engine.decide.batches import Batch
from oraculo.engine.decide.pacing import LITTLE, LONGEST, MUCH, WIDE, Pace
from oraculo.engine.inbox import AnswerInput, Arrived, BadAnswer, Inbox, Note, Rest, Wish
from oraculo.ports.broker import Consumer, Delivery
from oraculo.ports.clock import SystemEntropy
from oraculo.ports.store import Committed, Creation
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from tests.core.building import START, run_of
from tests.engine.workers import Journal, answer, recording_app
from tests.waiting import until

TASKS = 8


class Contested(SqliteStore):
    """As if another engine were faster with one run, for a while."""

    contested: str | None = None
    is_lost = False
    commits = 0

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        others = [change for change in changes if change.run.id != self.contested]
        self.commits += len(others) < len(changes)
        if not self.is_lost or len(others) == len(changes):
            return await super().commit(creations, changes)
        committed = await super().commit(creations, others)
        return Committed(committed.created, committed.conflicts | {str(self.contested)})


class OfTwo(Harness):
    """An engine that knows of another, which does nothing."""

    def __init__(self, store: Contested, *apps: Any) -> None:
        super().__init__(*apps, store=store, settings=Settings(engine=EngineSettings(note_linger=0.005)))
        self.contested = store

    async def wide_run(self, steps: Sequence[dict[str, Any]] | None = None) -> str:
        peers = self.engine.peers
        peers.engines, peers._is_well = [peers.name, "other"], lambda: False  # keeps what it knows of the others
        run_id = await self.submit({"destinos": steps or destinations(TASKS)["destinos"]})
        self.contested.contested = run_id

        async def all_are_sent() -> bool:
            return all(task.sent_at for task in (await self.store.load([run_id]))[run_id].tasks)

        await until(all_are_sent)
        await until(lambda: not self.engine.inbox.resting([run_id]), saying="the end of its rest")
        return run_id

    async def answer(self, run_id: str, number: int) -> None:
        await self.publish("resultados", answer(run_id, tarefa=f"t{number}", tipo_evento="resultado_execucao"))

    async def note_failure(self, run_id: str, number: int) -> None:
        self.engine.inbox.note([Note(run_id, Answered(number, 1, b"{}", failed=True, retryable=False))])

        async def is_noted() -> bool:
            return (await self.store.heads([run_id]))[run_id].failed == 1

        await until(is_noted)

    async def succeeded(self, run_id: str) -> int:
        return (await self.store.heads([run_id]))[run_id].succeeded


@pytest.fixture
def store(tmp_path: Path) -> Contested:
    return Contested(str(tmp_path / "oraculo.db"))


@pytest.fixture
def all_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "WIDE", TASKS)
    monkeypatch.setattr(pacing, "A_TASK", 0.1 / TASKS / 2)


@pytest.mark.usefixtures("all_are_wide")
async def test_a_wide_run_that_others_are_faster_with_holds_up_no_other_run(store: Contested) -> None:
    async with OfTwo(store, recording_app(Journal(), ("executador_x",))) as oraculo:
        run_id = await oraculo.wide_run()
        store.is_lost = True
        await oraculo.answer(run_id, 0)
        await until(lambda: store.commits > 5, saying="that it is tried again and again")
        assert (await oraculo.run({"destinos": ["executador_x"]}))["status"] == "concluida"
        assert await oraculo.succeeded(run_id) == 0
        store.is_lost = False

        async def is_counted() -> bool:
            return await oraculo.succeeded(run_id) == 1

        await until(is_counted)
        assert store.commits < 100


@pytest.fixture
def long_rests(all_are_wide: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called."""

    def begin() -> None:
        monkeypatch.setattr(pacing, "A_TASK", 1000.0)
        monkeypatch.setattr(pacing, "LONGEST", 100.0)  # of the 300 s that a run has

    return begin


async def test_who_has_decided_a_wide_run_gathers_what_comes_for_it_and_leaves_it_to_others(
    store: Contested, long_rests: Callable[[], None]
) -> None:
    async with OfTwo(store) as oraculo:
        run_id = await oraculo.wide_run()
        long_rests()
        store.commits = 0
        await oraculo.answer(run_id, 0)
        await until(lambda: store.commits, saying="the first")
        for number in range(1, TASKS):
            await oraculo.answer(run_id, number)
            await until(lambda: len(oraculo.engine.inbox) == number, saying="that it is held")  # noqa: B023
        assert await oraculo.succeeded(run_id) == 1
        oraculo.engine.inbox.end_all_rests()
        aggregate = await oraculo.ended(run_id)
    assert aggregate["resumo"]["concluidas"] == TASKS
    assert store.commits == 2


async def test_what_the_engine_itself_did_is_noted_though_the_run_rests(
    store: Contested, long_rests: Callable[[], None]
) -> None:
    """Else another would do it again."""
    async with OfTwo(store) as oraculo:
        run_id = await oraculo.wide_run()
        long_rests()
        await oraculo.answer(run_id, 0)
        await until(lambda: oraculo.engine.inbox.resting([run_id]), saying="its rest")
        await oraculo.answer(run_id, 1)
        await oraculo.note_failure(run_id, 2)
        assert await oraculo.succeeded(run_id) == 1
        assert oraculo.engine.inbox.resting([run_id])


async def test_no_rest_begins_with_what_the_engine_itself_did(store: Contested, long_rests: Callable[[], None]) -> None:
    """Notes of sending come all the time while a run is sent, and what comes from outside would wait for their end."""
    async with OfTwo(store) as oraculo:
        run_id = await oraculo.wide_run()
        long_rests()
        await oraculo.note_failure(run_id, 2)
        assert not oraculo.engine.inbox.resting([run_id])
        await oraculo.answer(run_id, 0)
        await until(lambda: oraculo.engine.inbox.resting([run_id]), saying="its rest")


async def test_what_is_held_when_the_engine_stops_is_decided(store: Contested, long_rests: Callable[[], None]) -> None:
    async with OfTwo(store) as oraculo:
        run_id = await oraculo.wide_run()
        long_rests()
        store.commits = 0
        for number in range(3):
            await oraculo.answer(run_id, number)
        await until(lambda: store.commits, saying="the first")
        await oraculo.answer(run_id, 3)
        await until(lambda: len(oraculo.engine.inbox), saying="that the last is held")
    await store.start()
    assert (await store.heads([run_id]))[run_id].succeeded == 4
    await store.close()


def destinations(count: int) -> dict[str, Any]:
    return {"destinos": [{"id": f"t{n}", "fila": "ninguem"} for n in range(count)]}


@pytest.mark.parametrize(
    ("tasks", "changed", "deciders", "seconds"),
    [
        (WIDE, 1, 1, 0.0),
        (WIDE - 1, 1, 2, 0.0),
        (WIDE, 1, 2, 0.02),
        (WIDE, LITTLE - 1, 2, 0.02),
        (WIDE, LITTLE, 2, 0.0),
        (4_000, 399, 2, 0.16),
        (4_000, 400, 2, 0.0),
        (60_000, MUCH - 1, 2, 2.4),
        (60_000, MUCH, 2, 0.0),
        (60_000, 1, 6, LONGEST),
        (WIDE, 1, 6, 0.06),
    ],
)
def test_a_run_of_which_little_was_decided_rests_the_longer_the_wider_it_is_and_the_more_decide_it(
    tasks: int, changed: int, deciders: int, seconds: float
) -> None:
    pace, changes = Pace(lambda: deciders, SystemEntropy()), Changes(run_of(destinations(tasks)))
    for task in changes.run.tasks[:changed]:
        changes.touch(task)
    rest = pace.rest_after(changes, START)
    assert (rest.seconds if rest else 0.0) == pytest.approx(seconds)


def paced(tasks: int = WIDE) -> tuple[Pace, Changes]:
    """A run that has begun, and nothing that was just decided."""
    run = run_of(destinations(tasks))
    machine.start(run, START)
    return Pace(lambda: 2, SystemEntropy()), Changes(run)


def test_a_rest_is_the_longer_the_longer_it_takes_to_read_a_run_here() -> None:
    pace, changes = paced()
    for _ in range(8):
        pace.has_read(WIDE - 1, 60.0)
    assert rested(pace, changes) == pytest.approx(0.02)
    pace.has_read(WIDE, 60.0)
    assert rested(pace, changes) == pytest.approx(0.04), "once may be chance"
    for _ in range(8):
        pace.has_read(WIDE, 0.1)
    assert rested(pace, changes) == pytest.approx(0.8)
    for _ in range(100):
        rested(pace, changes)
    assert 0.05 < rested(pace, changes) < 0.2, "that was long ago"
    pace.has_read(WIDE, 0.0)
    assert rested(pace, changes) == pytest.approx(0.02)


def rested(pace: Pace, changes: Changes) -> float:
    rest = pace.rest_after(changes, START)
    return 0.0 if rest is None else rest.seconds


def test_no_run_rests_when_its_deadline_is_near() -> None:
    pace, changes = paced()
    changes.run.head.due_at = START + 0.065
    for task in changes.run.tasks:
        task.deadline = None
    assert pace.rest_after(changes, START) is not None
    assert pace.rest_of_one_who_lost(changes, START) is not None
    assert pace.rest_after(changes, START + 0.05) is None
    assert pace.rest_of_one_who_lost(changes, START + 0.05) is None


def test_no_run_rests_when_the_deadline_of_a_task_is_near() -> None:
    """Another engine would ring its timer, and its answer is held here."""
    pace, changes = paced()
    changes.run.tasks[7].deadline = START + 0.065
    assert pace.rest_after(changes, START) is not None
    assert pace.rest_after(changes, START + 0.05) is None
    changes.run.tasks[7].status = TaskStatus.SUCCEEDED
    assert pace.rest_after(changes, START + 0.05) is not None
    changes.touch(changes.run.tasks[7])  # by an answer, which may have to be decided again
    assert pace.rest_of_one_who_lost(changes, START + 0.05) is None


def test_a_rest_ends_when_all_that_is_awaited_has_come_but_now_and_then() -> None:
    """Each hop of a long chain would else wait. That the others have a moment, too, a part of the time is for them."""
    pace, changes = paced()
    others = list(changes.run.tasks[4:])
    told = Changes(changes.run)
    for task in others:
        machine.apply(changes.run, Answered(task.number, 1, b"{}"), START, told)
    rests = [pace.rest_after(changes, START + 0.02 * n) for n in range(40)]
    enough = [rest.enough for rest in rests if rest is not None]
    assert len(enough) == 40
    assert set(enough) == {2, LITTLE}, "of four that are awaited, half are for the other"
    assert 3 <= enough.count(LITTLE) <= 5
    assert enough[0] == LITTLE


def test_who_lost_rests_after_a_loss_and_not_in_step_with_others() -> None:
    pace, changes = paced()
    lost = [rest for _ in range(5) if (rest := pace.rest_of_one_who_lost(changes, START))]
    assert len({rest.seconds for rest in lost}) == 5
    assert all(0.01 <= rest.seconds <= 0.03 and rest.after_loss for rest in lost)


def sent(task: int) -> Note:
    return Note("r", Sent(task, 1, False, "memory", 0.0))


def wish(run_id: str = "r") -> Wish:
    return Wish(run_id, RunDue(), asyncio.get_running_loop().create_future())


async def test_an_inbox_holds_what_comes_for_a_run_that_rests() -> None:
    inbox, lost, other = Inbox(0.0), cast("Consumer", object()), cast("Consumer", object())
    arrived = [Arrived(Delivery("resultados", b"", number), whose) for number, whose in enumerate([lost, other])]
    cancel, note = wish(), Note("r", Sent(0, 1, False, "memory", 0.0))
    inbox.rest("r", Rest(1000.0, after_loss=True))
    assert list(inbox.resting(["q", "r"])) == ["r"]
    inbox.hold("r", [note, *(AnswerInput(cast("Any", None), one) for one in arrived), cancel])
    assert (len(inbox), list(inbox.arrived)) == (4, arrived)
    inbox.forget_arrived(lost)
    assert list(inbox.arrived) == arrived[1:]
    inbox.put([newer := wish("s")])
    inbox.end_all_rests()
    assert await inbox.take(10) == ([arrived[1], cancel, newer], [note]), "what waited longest comes first"
    inbox.rest("r", Rest(1000.0))
    assert not inbox.resting(["r"])


def answers(count: int) -> list[AnswerInput]:
    consumer = cast("Consumer", object())
    return [AnswerInput(cast("Any", None), Arrived(Delivery("resultados", b"", n), consumer)) for n in range(count)]


async def test_a_rest_ends_when_enough_has_gathered() -> None:
    """More would fill the room for the messages of other runs."""
    inbox, three = Inbox(0.0), answers(3)
    inbox.rest("r", Rest(1000.0, enough=3))
    inbox.hold("r", three[:2])
    assert inbox.resting(["r"])
    inbox.hold("r", three[2:])
    assert not inbox.resting(["r"])
    assert await inbox.take(10) == ([one.arrived for one in three], [])


@pytest.mark.parametrize("after_loss", [False, True])
async def test_runs_that_rest_do_not_take_all_the_places_for_messages_unless_a_race_was_lost(after_loss: bool) -> None:
    """The engine would hear nothing of other runs until one has rested; to lose again and again takes longer still."""
    inbox = Inbox(0.0, most_held=4)
    for run_id in ("wide", "wider"):
        inbox.rest(run_id, Rest(60.0, enough=500, after_loss=after_loss))
    inbox.hold("wide", answers(1))
    inbox.hold("wider", answers(2))
    assert set(inbox.resting(["wide", "wider"])) == {"wide", "wider"}
    inbox.hold("wide", answers(1))
    assert ("wide" in inbox.resting(["wide"])) is after_loss
    inbox.end_all_rests()


@pytest.mark.parametrize("after_loss", [False, True])
async def test_a_rest_ends_when_somebody_waits_for_what_is_held_unless_a_race_was_lost(after_loss: bool) -> None:
    """A timer, say, with which all others would wait; and what came before it is decided before."""
    inbox, [one], timer = Inbox(0.0), answers(1), wish()
    inbox.rest("r", Rest(1000.0))
    inbox.hold("r", [one])
    if after_loss:
        inbox.rest("r", Rest(1000.0, after_loss=True))
    inbox.hold("r", [timer])
    assert bool(inbox.resting(["r"])) is after_loss
    inbox.end_all_rests()
    assert await inbox.take(10) == ([one.arrived, timer], [])


async def test_what_is_held_for_a_run_that_has_rested_comes_at_once() -> None:
    """Not after a turn of the event loop: the next batch would find that it rests, and so would all others."""
    inbox, one = Inbox(0.0), wish()
    inbox.hold("r", [one])
    assert not inbox.resting(["r"])
    assert await inbox.take(10) == ([one], [])


def test_notes_pass_a_rest_but_not_that_of_one_who_lost() -> None:
    """To whom each would be another race that it loses."""
    note = Note("r", Sent(0, 1, False, "memory", 0.0))
    for after_loss in (False, True):
        batch = Batch()
        batch.of_run("r", note)
        batch.of_run("r", bad := BadAnswer(cast("Arrived", None), "odd"))
        batch.leave_out({"r": Rest(1.0, after_loss=after_loss)})
        left_out, left = ([note, bad], {}) if after_loss else ([bad], {"r": [note]})
        assert (batch.resting, batch.by_run) == ({"r": left_out}, left)


def test_who_loses_with_notes_keeps_what_was_left_out_before() -> None:
    batch, note, bad = Batch(), sent(0), BadAnswer(cast("Arrived", None), "odd")
    batch.of_run("r", note)
    batch.of_run("r", bad)
    batch.leave_out({"r": Rest(1.0)})
    batch.give_up(["r"])
    assert (batch.resting, batch.by_run) == ({"r": [bad, note]}, {})


def test_large_answers_that_are_left_out_are_not_put_away() -> None:
    batch, one = Batch(), AnswerInput(cast("Any", SimpleNamespace(correlation_id="r")), cast("Arrived", None))
    batch.of_run("r", one)
    batch.large.append(one)
    batch.leave_out({"r": Rest(1.0)})
    assert not batch.large


async def test_notes_of_a_run_that_has_rested_are_not_lost() -> None:
    inbox, note = Inbox(0.0), sent(0)
    inbox.hold("r", [note])
    assert await inbox.take(10) == ([], [note])


async def test_the_end_of_a_rest_wakes_for_notes_alone_and_they_keep_their_order() -> None:
    inbox, notes = Inbox(1000.0), [sent(0), sent(1)]
    inbox.rest("r", Rest(0.01, after_loss=True))
    inbox.hold("r", notes)
    assert await asyncio.wait_for(inbox.take(10), 5) == ([], notes)


async def test_a_rest_that_ended_early_does_not_end_the_next_one() -> None:
    inbox = Inbox(0.0)
    inbox.rest("r", Rest(0.01, enough=1))
    inbox.hold("r", answers(1))
    inbox.rest("r", Rest(1000.0))
    over = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.02, over.set_result, None)  # later than the first would have ended
    await over
    assert inbox.resting(["r"])


async def test_the_rest_of_one_who_lost_is_not_made_a_common_one() -> None:
    inbox = Inbox(0.0)
    inbox.rest("r", Rest(1000.0, after_loss=True))
    inbox.rest("r", Rest(1000.0))
    assert inbox.resting(["r"])["r"].after_loss


@pytest.mark.usefixtures("all_are_wide")
async def test_timers_of_a_run_that_rests_hold_up_no_others(store: Contested) -> None:
    async with OfTwo(store) as oraculo:
        oraculo.engine.peers.rank = lambda _: 0  # type: ignore[method-assign]
        steps = [{"id": f"t{n}", "fila": "ninguem", "timeout": 0.3} for n in range(TASKS)]
        wide = await oraculo.wide_run(steps)
        oraculo.engine.inbox.rest(wide, Rest(1000.0))  # as if all timers had been far off when it began
        await oraculo.answer(wide, 0)
        other = await oraculo.submit({"destinos": ["ninguem"], "timeout": 0.5})
        assert (await oraculo.ended(other))["status"] == "timeout"

        async def is_counted() -> bool:
            return await oraculo.succeeded(wide) == 1

        await until(is_counted, saying="that what was held is decided")


async def test_an_api_that_runs_apart_counts_as_one_who_decides() -> None:
    """It is none of the engines, and has to cancel a run that one of these decides all the time."""
    async with Harness() as oraculo:
        assert oraculo.engine._count_deciders() == 1
        assert oraculo.engine._intake._hot._is_sole()
        oraculo.engine.peers.has_apis_beside = True
        assert oraculo.engine._count_deciders() == 2
        assert not oraculo.engine._intake._hot._is_sole(), "it ends runs, too, and nobody hears of it"
