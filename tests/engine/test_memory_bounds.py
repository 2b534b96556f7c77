"""Bounds of memory: what plans and runs are counted as, how long runs are kept, and how large requests are read."""

import asyncio
import threading
from collections import Counter
from typing import Any

import msgspec
import pytest

from oraculo.core.run import Run, RunStatus
from oraculo.engine import inbox, operations, pipelines
from oraculo.engine.decide.cache import IDLE, HotRuns, Plans
from oraculo.engine.send import outbox
from oraculo.errors import (
    UnknownPipeline,
)
from oraculo.pipeline.definition import Definition, Kind, Step, content_hash, encode_definition
from oraculo.settings import (
    EngineSettings,
    Settings,
)
from oraculo.testing.harness import Harness
from tests.core.building import run_of
from tests.engine.workers import Journal, recording_app
from tests.waiting import until


class FixedClock:
    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        return self.at


def test_plans_are_weighed_with_the_payloads_they_hold() -> None:
    plans = Plans(max_weight=1000)
    for number in range(10):
        step = Step(id="a", queue="a", payload=msgspec.Raw(b'{"n":"%d%s"}' % (number, b"x" * 300_000)))
        encoded = encode_definition(Definition(name="", steps=(step,), kind=Kind.FAN_OUT))
        plans.plan(content_hash(encoded), encoded)
    assert len(plans._plans) <= 4


def test_plans_of_one_task_are_weighed_with_what_each_takes_by_itself() -> None:
    plans = Plans(max_weight=300)
    for number in range(200):
        step = Step(id="a", queue="a", payload=msgspec.Raw(b"%d" % number))
        encoded = encode_definition(Definition(name="", steps=(step,), kind=Kind.FAN_OUT))
        plans.plan(content_hash(encoded), encoded)
    assert len(plans._plans) == 100


async def test_runs_of_one_task_are_weighed_with_what_each_takes_by_itself() -> None:
    hot = HotRuns(300, lambda: True)
    for number in range(200):
        hot.keep(named_run(f"r{number}", tasks=1))
    assert len(hot) == 100
    hot.keep(named_run("wide", tasks=298))
    assert (len(hot), hot.get("wide") is not None) == (1, True)


@pytest.mark.parametrize(("is_sole", "kept"), [(True, {"idle", "used", "new"}), (False, {"used", "new"})])
async def test_a_run_that_others_may_have_ended_is_not_kept_for_long(
    is_sole: bool, kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time of the loop, whatever the clock of the machine is set to meanwhile."""
    steady = FixedClock(1000.0)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", steady.now)
    hot = HotRuns(300, lambda: is_sole)
    for run_id in ("used", "idle"):
        hot.keep(named_run(run_id, tasks=1))
    steady.at += IDLE
    hot.get("used")
    hot.keep(named_run("new", tasks=1))
    hot.drop_idle()
    assert len(hot) == 3  # not yet
    steady.at += 1
    hot.drop_idle()
    assert {run_id for run_id in ("idle", "used", "new") if hot.get(run_id)} == kept


async def test_a_run_that_has_ended_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody else may have changed it, and whatever was used longer ago."""
    steady = FixedClock(1000.0)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", steady.now)
    hot = HotRuns(300, lambda: True)
    for run_id in ("open", "late", "later", "again"):
        hot.keep(run := named_run(run_id, tasks=1))
        run.head.status = RunStatus.RUNNING if run_id == "open" else RunStatus.TIMED_OUT
        hot.get(run_id)
    steady.at += IDLE + 1
    hot.get("later")
    if again := hot.get("again"):
        again.head.status = RunStatus.RUNNING
    hot.drop_idle()
    assert {run_id for run_id in ("open", "late", "later", "again") if hot.get(run_id)} == {"open", "later", "again"}
    steady.at += IDLE + 1
    hot.drop_idle()
    assert {run_id for run_id in ("open", "later", "again") if hot.get(run_id)} == {"open", "again"}


def named_run(run_id: str, *, tasks: int) -> Run:
    run = run_of({"destinos": [{"id": f"d{number}", "fila": "a"} for number in range(tasks)]})
    run.head.id = run_id
    return run


def test_a_plan_that_two_threads_made_at_once_is_weighed_once() -> None:
    plans = Plans()
    encoded = encode_definition(Definition(name="", steps=(Step(id="a", queue="a"),), kind=Kind.FAN_OUT))
    made = [plans.plan("hash", encoded)]
    plans._keep("hash", made[0], len(made[0]))
    assert (len(plans._plans), plans._weight) == (1, 1)


@pytest.mark.parametrize(("large", "is_own_thread"), [(100, False), (10_000, True)])
async def test_a_large_request_is_read_by_another_thread(
    monkeypatch: pytest.MonkeyPatch, large: int, is_own_thread: bool
) -> None:
    monkeypatch.setattr(operations, "LARGE_REQUEST", large)
    async with Harness(recording_app(Journal(), ("escavador_a",))) as oraculo:
        make, own = oraculo.engine.parts.runs.maker.submission, list[bool]()

        def noted(*given: Any, **more: Any) -> inbox.Submission:
            own.append(threading.current_thread() is threading.main_thread())
            return make(*given, **more)

        monkeypatch.setattr(oraculo.engine.parts.runs.maker, "submission", noted)
        assert (await oraculo.run({"destinos": ["escavador_a"], "payload": {"a": "x" * 200}}))["status"] == "concluida"
        with pytest.raises(UnknownPipeline):
            await oraculo.submit({"pipeline": "nenhum", "payload": {"a": "x" * 200}})
        assert own == [is_own_thread] * 3  # of a pipeline that is not known it is looked again


async def test_a_large_request_does_not_wait_for_the_pipelines_that_users_put(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, read = threading.Event(), pipelines.read_pipeline

    def slow(text: bytes, **about: Any) -> Definition:
        assert may_go_on.wait(30)
        return read(text, **about)

    monkeypatch.setattr(operations, "LARGE_REQUEST", 100)
    async with Harness() as oraculo:
        monkeypatch.setattr(pipelines, "read_pipeline", slow)
        puts = [
            asyncio.create_task(oraculo.operations.put_pipeline(f"p{number}", b"steps: [{type: a}]"))
            for number in range(8)
        ]
        try:
            large = {"destinos": ["executador_a"], "payload": {"x": "x" * 100}}
            assert await asyncio.wait_for(oraculo.submit(large), 10)
        finally:
            may_go_on.set()
        await asyncio.gather(*puts)
        assert {f"p{number}" for number in range(8)} <= oraculo.engine.parts.catalogue.pipelines.keys()


@pytest.mark.parametrize("room", [50_000, 20])
async def test_the_commands_of_a_wide_run_are_made_a_portion_at_a_time(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """What there is no room for is found by the sweep."""
    monkeypatch.setattr(outbox, "PORTION", 10, raising=False)
    monkeypatch.setattr(outbox, "MAX_WAITING", room, raising=False)
    turn, made, encode = [0], Counter[int](), outbox.encode_command

    def noted(*given: Any, **more: Any) -> bytes:
        made[turn[0]] += 1
        return encode(*given, **more)

    async def count_turns() -> None:
        while True:
            turn[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(outbox, "encode_command", noted)
    async with Harness(settings=Settings(engine=EngineSettings(poll=0.02))) as oraculo:
        counting = asyncio.create_task(count_turns())
        await oraculo.submit({"destinos": [{"id": f"d{n}", "fila": "escavador_a"} for n in range(35)]})
        if room > 35:
            await oraculo.engine.parts.outbox.flushed()
            assert [state.ready for state in await oraculo.broker.queues(["escavador_a"])] == [35]
        await until(lambda: has_ready(oraculo, "escavador_a", 35), saying="all commands")
        counting.cancel()
    assert max(made.values()) <= 10
    assert made.total() == 35


async def has_ready(oraculo: Harness, queue: str, count: int) -> bool:
    return [state.ready for state in await oraculo.broker.queues([queue])] == [count]
