"""A wide run takes long to look at, and others do not wait for that."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from oraculo.core.run import Run
from oraculo.engine import dead_letters, explanation
from oraculo.engine.results import get as reader
from oraculo.ports import threads
from oraculo.ports.store import Snapshot
from oraculo.ports.threads import WIDE
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from tests.engine.test_bounds import until_letters
from tests.engine.workers import answer, failing_app
from tests.waiting import until

Look = Callable[[Harness, str], Awaitable[object]]


async def look(oraculo: Harness, run_id: str) -> object:
    return await oraculo.operations.view(await oraculo.operations.run(run_id))


async def explain(oraculo: Harness, run_id: str) -> object:
    return await oraculo.operations.explain(run_id)


async def cancel(oraculo: Harness, run_id: str) -> object:
    return await oraculo.operations.view(await oraculo.operations.cancel(run_id))


LOOKS = [
    (look, ["restore", "run_view"]),
    (explain, ["restore", "_queues_of", "explain"]),
    (cancel, ["restore", "run_view"]),
]


@pytest.fixture
async def oraculo() -> AsyncIterator[Harness]:
    async with Harness() as harness:
        yield harness


class Stretches:
    """The long parts of looking at a run, told as they are gone through, and by whom."""

    def __init__(self, oraculo: Harness, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        self.seen: list[str] = []
        self._meanwhile = meanwhile
        for place, name in (
            (oraculo.engine.parts.runs.plans, "restore"),
            (reader, "run_view"),
            (explanation, "_queues_of"),
            (explanation, "explain"),
        ):
            monkeypatch.setattr(place, name, self._told(name, getattr(place, name)))

    def _told(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            self.seen.append(name)
            self._meanwhile()
            return work(*args)

        return told


async def a_run(oraculo: Harness, width: int) -> str:
    run_id = await oraculo.submit({"destinos": [{"fila": "executador_x", "id": f"t{n}"} for n in range(width)]})

    async def is_sent() -> bool:
        return not any(task.unsent for task in (await oraculo.operations.run(run_id)).tasks)

    await until(is_sent, saying="the commands to be noted as sent")
    return run_id


@pytest.mark.parametrize(("ask", "parts"), LOOKS)
async def test_the_event_loop_has_its_turns_while_a_wide_run_is_looked_at(
    oraculo: Harness, ask: Look, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    def expect_a_turn() -> None:
        had_a_turn = threading.Event()
        loop.call_soon_threadsafe(had_a_turn.set)
        assert had_a_turn.wait(2), "the event loop stood still"

    run_id = await a_run(oraculo, WIDE)
    stretches = Stretches(oraculo, monkeypatch, expect_a_turn)
    await ask(oraculo, run_id)
    assert stretches.seen == parts


@pytest.mark.parametrize(("ask", "parts"), LOOKS)
async def test_a_small_run_is_looked_at_without_a_thread(
    oraculo: Harness, ask: Look, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    run_id = await a_run(oraculo, 3)
    stretches = Stretches(oraculo, monkeypatch, lambda: threads.append(threading.current_thread()))
    await ask(oraculo, run_id)
    assert stretches.seen == parts
    assert {*threads} == {threading.current_thread()}


LATE = {"tarefa": "t0", "tipo_evento": "resultado_execucao"}
PROGRESS = {"tarefa": "t0", "tipo_evento": "progresso", "payload": {"percentual": 40}}


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "open"])
@pytest.mark.parametrize("fields", [LATE, PROGRESS], ids=["answers", "progress"])
async def test_a_run_is_not_read_as_a_whole_for_each_message_of_a_task_that_has_ended(
    oraculo: Harness, ends: bool, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come one by one, and there may be thousands."""
    run_id = await a_run(oraculo, 3)

    async def take(fields: dict[str, Any]) -> None:
        async def is_settled() -> bool:
            [state] = await oraculo.broker.queues(["resultados"])
            return not state.ready and not state.unacked

        await oraculo.publish("resultados", answer(run_id, **fields))
        await until(is_settled)

    await take(LATE)
    if ends:
        await oraculo.operations.cancel(run_id)
    loads, load = list[Sequence[str]](), oraculo.store.load

    async def counted(run_ids: Sequence[str]) -> dict[str, Snapshot]:
        loads.append(run_ids)
        return await load(run_ids)

    monkeypatch.setattr(oraculo.store, "load", counted)
    for _ in range(5):
        await take(fields)
    assert len(loads) == ends  # one that ended is read again once


class CountingLoads(SqliteStore):
    loads = 0

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        self.loads += 1
        return await super().load(run_ids)


@asynccontextmanager
async def wide_failure(store: SqliteStore) -> AsyncIterator[tuple[Harness, str]]:
    """A run of 30 tasks, all of which are dead letters; and its id."""
    app = failing_app("executador_x", failures=None, for_good=True)
    async with Harness(app, store=store, settings=Settings(engine=EngineSettings(poll=0.02))) as oraculo:
        targets = [{"id": f"t{number}", "fila": "executador_x"} for number in range(30)]
        run_id = await oraculo.submit({"destinos": targets})
        await oraculo.ended(run_id)
        await until_letters(oraculo, 30)
        app.broken = False  # type: ignore[attr-defined]
        yield oraculo, run_id


async def test_a_redrive_of_a_wide_run_reads_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "_PAGE", 5)
    monkeypatch.setattr(dead_letters, "_PAGE_BYTES", 5_000)
    store = CountingLoads(MEMORY)
    async with wide_failure(store) as (oraculo, run_id):
        oraculo.engine.parts.intake._decider.hot.drop(run_id)
        before = store.loads
        assert (await oraculo.operations.redrive("executador_x")).reopened == 30
        assert store.loads - before <= 2, "by who sorts the letters, and by who decides"
        assert (await oraculo.ended(run_id))["status"] == "concluida"


async def test_a_redrive_of_a_wide_run_reads_it_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WIDE", 30)
    async with wide_failure(SqliteStore(MEMORY)) as (oraculo, _):
        restore, by = oraculo.engine.parts.runs.plans.restore, list[threading.Thread]()

        def told(snapshot: Snapshot) -> Run:
            by.append(threading.current_thread())
            return restore(snapshot)

        monkeypatch.setattr(oraculo.engine.parts.runs.plans, "restore", told)
        assert (await oraculo.operations.redrive("executador_x")).reopened == 30
        assert any(thread is not threading.main_thread() for thread in by)  # who decides reads it too, in the loop


async def test_to_discard_a_dead_letter_of_a_wide_run_reads_its_task_alone() -> None:
    store = CountingLoads(MEMORY)
    async with wide_failure(store) as (oraculo, run_id):
        first, second, *_ = await oraculo.operations.dead_letters("executador_x")
        await oraculo.operations.discard("executador_x", first.id)  # the run is read where it is decided
        before = store.loads
        await oraculo.operations.discard("executador_x", second.id)
        assert store.loads == before
        told = [entry.what for entry in await oraculo.operations.history(run_id)]
        assert told.count("carta_morta_descartada") == 2
