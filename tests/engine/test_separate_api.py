"""An API whose runs other processes go on with: what it has sent is noted before their answers, and ends are seen."""

import asyncio
from pathlib import Path

import pytest

from oraculo.engine.send import publisher
from oraculo.engine.watchers import Watchers
from oraculo.engine.wiring import Role
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import BatchCommitted
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from tests.engine.peers_stage import OneServer, Told
from tests.waiting import until

FOR_EVER = Settings(engine=EngineSettings(poll=1000.0, note_linger=1000.0, stop_grace=0.5))


def api(folder: Path, told: Told | None = None) -> Harness:
    """Its notes would linger until the test is over."""
    store, broker = SqliteStore(str(folder / "oraculo.db")), OneServer(SystemClock())
    return Harness(settings=FOR_EVER, broker=broker, store=store, role=Role.FRONT, telemetry=told)


async def is_noted(oraculo: Harness, run_id: str) -> bool:
    return all(task.sent_at is not None for task in (await oraculo.operations.run(run_id)).tasks)


async def test_an_api_notes_at_once_what_it_has_sent(tmp_path: Path) -> None:
    """The answer comes to an engine, which would else be first, and each run be decided twice."""
    async with api(tmp_path) as oraculo:
        run_id = await oraculo.submit({"destinos": ["nobody", "nobody-else"]})
        await until(lambda: is_noted(oraculo, run_id), saying="the note that the commands were sent")


async def test_a_run_that_is_sent_in_many_parts_is_noted_when_all_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To note each part would be in the way of its answers: a wide run takes long to be read again."""
    monkeypatch.setattr(publisher, "PUBLISHED_TOGETHER", 1)
    told = Told()
    async with api(tmp_path, told) as oraculo:
        run_id = await oraculo.submit({"destinos": [f"nobody-{n}" for n in range(20)]})
        await until(lambda: is_noted(oraculo, run_id), saying="the notes that the commands were sent")
    batches = [one for one in told.records if isinstance(one, BatchCommitted)]
    assert [(one.created, one.runs) for one in batches] == [(1, 0), (0, 1)]


async def test_whoever_begins_to_wait_between_two_looks_is_not_passed_over_at_the_next() -> None:
    watchers, loop = Watchers(), asyncio.get_running_loop()
    with watchers.watching("young"), watchers.watching("old") as old:
        now = loop.time() + 0.001
        old.since -= 100
        assert watchers.due_for_a_look(now, shortest=0.05, longest=1.0) == ["young"]
        old.looked_at -= 1
        assert watchers.due_for_a_look(now, shortest=0.05, longest=1.0) == ["young", "old"]
