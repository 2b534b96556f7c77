"""A command that comes twice is worked on once."""

import asyncio
from typing import Any

import msgspec
import pytest

from oraculo.worker import App
from oraculo.worker.answer_memory import RememberedAnswers

from .stage import Stage

SAME: dict[str, Any] = {"correlation_id": "c", "tarefa": "t", "tentativa": 1}


def counting_app() -> tuple[App, list[Any]]:
    app, runs = App("a"), []

    @app.queue("q")
    async def count(payload: dict[str, Any]) -> int:
        runs.append(payload)
        return len(runs)

    return app, runs


async def test_a_repeat_of_an_answered_command_gets_the_same_answer(stage: Stage) -> None:
    app, runs = counting_app()
    async with stage.worker(app):
        await stage.send("q", **SAME)
        first = await stage.answer()
        await stage.send("q", **SAME, responder_em="elsewhere")
        second = await stage.answer("elsewhere")
    assert msgspec.json.encode(first) == msgspec.json.encode(second)  # its timestamp too
    assert len(runs) == 1
    assert await stage.left("q") == (0, 0, 0)


@pytest.mark.parametrize("change", [{"correlation_id": "d"}, {"tarefa": "u"}, {"tentativa": 2}])
async def test_another_identity_is_another_command(stage: Stage, change: dict[str, Any]) -> None:
    app, runs = counting_app()
    async with stage.worker(app):
        await stage.send("q", **SAME)
        await stage.answer()
        await stage.send("q", **(SAME | change))
        await stage.answer()
    assert len(runs) == 2


@pytest.mark.parametrize("missing", ["tarefa", "tentativa"])
async def test_commands_of_plain_publishers_are_all_run(stage: Stage, missing: str) -> None:
    app, runs = counting_app()
    fields = {key: value for key, value in SAME.items() if key != missing}
    async with stage.worker(app):
        for _ in range(3):
            await stage.send("q", **fields)
        for _ in range(3):
            await stage.answer()
    assert len(runs) == 3


async def test_a_repeat_of_a_command_in_work_waits_for_its_answer(stage: Stage) -> None:
    app, runs, started, go_on = App("a"), [], asyncio.Queue[int](), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> str:
        runs.append(1)
        started.put_nowait(1)
        await go_on.wait()
        return "done"

    async with stage.worker(app):
        await stage.send("q", **SAME)
        await started.get()
        await stage.send("q", **SAME, responder_em="elsewhere")
        await stage.send("q", correlation_id="behind it", tarefa="t", tentativa=1)
        await started.get()  # then the repeat, which came before, has been seen
        go_on.set()
        answers = [await stage.payload(), await stage.payload("elsewhere")]
    assert answers == [{"status": "ok", "resultado": "done"}] * 2
    assert len(runs) == 2
    assert await stage.left("q") == (0, 0, 0)


async def test_failures_are_remembered_too(stage: Stage) -> None:
    app, runs = App("a"), []

    @app.queue("q")
    def fail(payload: Any) -> None:
        runs.append(1)
        raise ValueError("x")

    async with stage.worker(app):
        await stage.send("q", **SAME)
        first = await stage.answer()
        await stage.send("q", **SAME)
        assert await stage.answer() == first
    assert runs == [1]


async def test_only_so_many_answers_are_remembered(stage: Stage) -> None:
    app, runs = counting_app()
    async with stage.worker(app, remembered=1):
        for task in ("t1", "t2", "t1"):
            await stage.send("q", correlation_id="c", tarefa=task, tentativa=1)
            await stage.answer()
    assert len(runs) == 3


def test_the_least_recently_used_answer_goes_first() -> None:
    memory = RememberedAnswers(2)
    one, two, three = (("c", "t", number) for number in (1, 2, 3))
    memory.put(one, b"1")
    memory.put(two, b"2")
    memory.get(one)
    memory.put(three, b"3")
    assert [memory.get(key) for key in (one, two, three)] == [b"1", None, b"3"]


def test_the_memory_is_bounded_in_bytes() -> None:
    memory = RememberedAnswers(1000, max_bytes=100)
    for number in range(50):
        memory.put(("c", "t", number), b"x" * 40)
        memory.put(("c", "t", number), b"y" * 40)  # replaced, not counted twice
    assert len(memory) == 2
    memory.put(("c", "t", 99), b"z" * 101)
    assert len(memory) == 0


def test_what_is_forgotten_is_gone() -> None:
    memory = RememberedAnswers(2)
    memory.put(("c", "t", 1), b"1")
    memory.forget(("c", "t", 1))
    assert memory.get(("c", "t", 1)) is None
