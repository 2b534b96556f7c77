"""A wide run that another engine is always faster with rests here, and holds up no other."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oraculo.core import machine
from oraculo.core.events import RunDue, Sent
from oraculo.core.run import Changes, TaskStatus
from oraculo.engine.decide import decider
from oraculo.engine.decide.batches import Batch
from oraculo.engine.decide.decider import WIDE, Decider
from oraculo.engine.inbox import AnswerInput, Arrived, Inbox, Note, Wish
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
QUICK = Settings(engine=EngineSettings(note_linger=0.005))


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


@pytest.fixture
def store(tmp_path: Path) -> Contested:
    return Contested(str(tmp_path / "oraculo.db"))


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Every run is wide, and rests for about so many seconds."""

    def last(seconds: float) -> None:
        monkeypatch.setattr(decider, "WIDE", TASKS)
        monkeypatch.setattr(decider, "REST_A_TASK", seconds / TASKS)
        monkeypatch.setattr(decider, "_LONGEST_REST", 100.0)  # of the 300 s that a run has

    last(0.1)
    return last


def destinations(count: int) -> dict[str, Any]:
    return {"destinos": [{"id": f"t{n}", "fila": "ninguem"} for n in range(count)]}


async def wide_run(oraculo: Harness, store: Contested) -> str:
    store.contested = run_id = await oraculo.submit(destinations(TASKS))

    async def all_are_sent() -> bool:
        return all(task.sent_at for task in (await store.load([run_id]))[run_id].tasks)

    await until(all_are_sent)
    return run_id


async def answered(oraculo: Harness, run_id: str, number: int) -> None:
    await oraculo.publish("resultados", answer(run_id, tarefa=f"t{number}", tipo_evento="resultado_execucao"))


async def succeeded(store: Contested, run_id: str) -> int:
    return (await store.heads([run_id]))[run_id].succeeded


@pytest.mark.usefixtures("rests")
async def test_a_run_that_loses_every_race_holds_up_no_other(store: Contested) -> None:
    async with Harness(recording_app(Journal(), ("executador_x",)), store=store, settings=QUICK) as oraculo:
        run_id = await wide_run(oraculo, store)
        store.is_lost = True
        await answered(oraculo, run_id, 0)
        await until(lambda: store.commits > 5, saying="that it is tried again and again")
        assert (await oraculo.run({"destinos": ["executador_x"]}))["status"] == "concluida"
        assert await succeeded(store, run_id) == 0
        store.is_lost = False

        async def is_counted() -> bool:
            return await succeeded(store, run_id) == 1

        await until(is_counted)
        assert store.commits < 100


async def test_what_waits_for_a_rest_when_the_engine_stops_is_decided(
    store: Contested, rests: Callable[[float], None]
) -> None:
    async with Harness(store=store, settings=QUICK) as oraculo:
        run_id = await wide_run(oraculo, store)
        rests(50.0)
        store.is_lost = True
        for number in range(3):
            await answered(oraculo, run_id, number)
        await until(lambda: oraculo.engine.parts.runs.inbox.resting([run_id]), saying="its rest")
        store.is_lost = False
    await store.start()
    assert await succeeded(store, run_id) == 3
    await store.close()


@pytest.mark.usefixtures("rests")
async def test_timers_of_a_run_that_rests_hold_up_no_others(store: Contested) -> None:
    async with Harness(store=store, settings=QUICK) as oraculo:
        wide = await wide_run(oraculo, store)
        oraculo.engine.parts.runs.inbox.rest(wide, 1000.0)
        waiting = asyncio.create_task(oraculo.operations.cancel(wide))
        other = await oraculo.submit({"destinos": ["ninguem"], "timeout": 0.5})
        assert (await oraculo.ended(other))["status"] == "timeout"
        oraculo.engine.parts.runs.inbox.end_all_rests()
        assert (await waiting).head.status == "cancelada"


def loser(tasks: int = WIDE) -> tuple[Decider, Changes]:
    """A run that has begun, and nothing that was just decided."""
    clock = SimpleNamespace(now=lambda: START)
    made = Decider(*cast("Any", [None] * 3), clock, SystemEntropy(), prefix="", tracebacks=False)
    run = run_of(destinations(tasks))
    machine.start(run, START)
    return made, Changes(run)


def test_only_wide_runs_rest_and_not_in_step_with_others() -> None:
    made, changes = loser(WIDE - 1)
    assert made.rest_of_loser(changes) == 0
    made, changes = loser()
    rests = {made.rest_of_loser(changes) for _ in range(5)}
    assert len(rests) == 5
    assert all(0.025 <= seconds <= 0.075 for seconds in rests)
    made, changes = loser(100_000)
    assert made.rest_of_loser(changes) <= 7.5


@pytest.mark.parametrize("whose", ["the run's", "a task's", "that of a task with an answer here"])
def test_no_run_rests_when_a_deadline_is_near(whose: str) -> None:
    made, changes = loser()
    for task in changes.run.tasks:
        task.deadline = None
    if whose == "the run's":
        changes.run.head.due_at = START + 0.04
    else:
        changes.run.tasks[7].deadline = START + 0.04
    if whose == "that of a task with an answer here":
        changes.run.tasks[7].status = TaskStatus.SUCCEEDED
        assert made.rest_of_loser(changes) > 0
        changes.touch(changes.run.tasks[7])
    assert made.rest_of_loser(changes) == 0


# -- the inbox ------------------------------------------------------------------------------------------------------


def sent(task: int) -> Note:
    return Note("r", Sent(task, 1, False, "memory", 0.0))


def wish() -> Wish:
    return Wish("r", RunDue(), asyncio.get_running_loop().create_future())


async def test_an_inbox_holds_what_comes_for_a_run_that_rests() -> None:
    inbox, lost, other = Inbox(0.0), cast("Consumer", object()), cast("Consumer", object())
    arrived = [Arrived(Delivery("resultados", b"", number), whose) for number, whose in enumerate([lost, other])]
    cancel, note = wish(), sent(0)
    inbox.rest("r", 1000.0)
    assert inbox.resting(["q", "r"]) == ["r"]
    inbox.hold("r", [note, *(AnswerInput(cast("Any", None), one) for one in arrived), cancel])
    assert len(inbox) == 4
    assert list(inbox.arrived) == arrived, "their leases are renewed"
    inbox.forget_arrived(lost)
    inbox.end_all_rests()
    assert await inbox.take(10) == ([arrived[1], cancel], [note])
    inbox.rest("r", 1000.0)
    assert not inbox.resting(["r"]), "the engine stops"


async def test_what_is_held_comes_in_order_when_the_rest_is_over_or_at_once_after_it() -> None:
    inbox, notes, one = Inbox(1000.0), [sent(0), sent(1)], wish()
    inbox.rest("r", 0.01)
    inbox.hold("r", notes)
    assert await asyncio.wait_for(inbox.take(10), 5) == ([], notes)
    inbox.hold("r", [one])
    assert await inbox.take(10) == ([one], [])


def test_large_answers_that_are_left_out_are_not_put_away() -> None:
    batch, one = Batch(), AnswerInput(cast("Any", SimpleNamespace(correlation_id="r")), cast("Arrived", None))
    batch.of_run("r", one)
    batch.large.append(one)
    batch.leave_out(["r"])
    assert (batch.large, batch.resting) == ([], {"r": [one]})
