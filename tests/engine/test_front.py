"""An API without an engine, beside others that have one: `oraculo api`."""

import asyncio

import pytest

from oraculo.engine.decide import cache
from oraculo.engine.queues import unheard_answers
from oraculo.engine.wiring import Role
from tests.engine import peers_stage as stage
from tests.engine.peers_stage import Group, Unreachable, acquainted
from tests.engine.workers import Journal, answer, recording_app
from tests.waiting import until

group = stage.group  # a fixture


async def test_a_front_creates_runs_and_hears_of_their_end(group: Group) -> None:
    journal = Journal()
    engine, front = group.member(recording_app(journal, ("executador_x",))), group.member(role=Role.FRONT)
    async with acquainted(engine, front):
        aggregate = await front.run({"destinos": ["executador_x"]})
        assert aggregate["status"] == "concluida"
        health = await front.operations.health()
        assert health.is_ready
        assert "consumers" not in health.parts
        assert engine.engine.parts.peers.is_alone


async def test_health_asks_all_at_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that says nothing takes its time, and whoever asks has little."""
    asked, all_are_asked = list[str](), asyncio.Event()
    front = group.member(role=Role.FRONT)
    async with acquainted(front):
        parts = [(front.broker, "check"), (front.store, "check"), (front.store, "engines")]

        async def answer_together(*_: object) -> list[str]:
            asked.append("")
            if len(asked) == len(parts):
                all_are_asked.set()
            await all_are_asked.wait()
            return ["an engine"]

        for part, call in parts:
            monkeypatch.setattr(part, call, answer_together)
        assert set((await front.operations.health()).parts.values()) == {None}
        monkeypatch.undo()


async def test_a_front_says_that_no_engine_is_alive(group: Group) -> None:
    front = group.member(role=Role.FRONT)
    async with acquainted(front):
        health = await front.operations.health()
        assert health.is_ready, "runs are accepted all the same"
        why = (
            "no engine gives a sign of life: runs are accepted, and wait; start one, or see by its own /health/ready "
            "whether the store takes its writes"
        )
        assert health.parts["engines"] == why, "one that cannot write is alive all the same"
        run_id = await front.submit({"destinos": ["executador_x"]})
        assert f"nothing is decided now ({why})" in await front.operations.explain(run_id)
        assert await front.operations.engines() == []
        async with group.member():
            assert (await front.operations.health()).parts["engines"] is None
            assert "nothing is decided" not in await front.operations.explain(run_id)
            assert len(await front.operations.engines()) == 1
        assert (await front.operations.health()).parts["engines"] is not None, "it departed"


async def test_a_front_says_that_engines_with_another_prefix_do_not_hear_its_answers(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give their signs of life in the store all the same, and the workers have done their part."""
    monkeypatch.setattr(unheard_answers, "_EVERY", 0.01)
    front, stranger = group.member(role=Role.FRONT, prefix="uma."), group.member(prefix="outra.")

    async def told() -> str | None:
        return (await front.operations.health()).parts["engines"]

    async with acquainted(front, stranger):
        run_id = await front.submit({"destinos": ["executador_x"]})
        await front.publish("resultados", answer(run_id, tarefa="executador_x"))
        why = await until(told, saying="that nobody hears")
        assert why.startswith("1 message waits in queue uma.resultados, where answers come, and nobody listens: see ")
        assert (await front.operations.health()).is_ready, "runs are accepted all the same"
        assert f"; {why};" in await front.operations.explain(run_id)
        assert "answers" not in stranger.engine.parts.duties, "it listens itself"
        await stranger.stop()
        assert "no engine gives a sign of life" in str(await told())
        explanation = await front.operations.explain(run_id)
        assert "no engine gives a sign of life" in explanation
        assert "nobody listens: see" not in explanation, "of which that is no more than a consequence"
        async with group.member(prefix="uma."):
            await front.ended(run_id)
            await until(lambda: front.engine.parts.health.queues.unheard_answers is None, saying="that it is over")
            assert await told() is None


async def test_a_front_shows_events_as_they_happen_elsewhere(group: Group) -> None:
    journal = Journal()
    engine, front = group.member(recording_app(journal, ("executador_x",))), group.member(role=Role.FRONT)
    async with acquainted(engine, front):
        run_id = await engine.submit({"destinos": ["executador_x", "nobody"], "timeout": 0.5})
        run = await front.operations.run(run_id)
        told = [entry.what.value async for entry in front.operations.follow(run.id)]
        assert told[0] == "orquestracao_iniciada"
        assert told[-1] == "orquestracao_encerrada"
        assert "tarefa_timeout" in told


async def test_a_front_rings_no_timers_and_takes_no_messages(group: Group) -> None:
    front = group.member(role=Role.FRONT)
    async with acquainted(front):
        run_id = await front.submit({"destinos": ["nobody"], "timeout": 0.05})
        await front.publish("resultados", b"garbage")
        assert await front.operations.wait(run_id, 0.5) is None
        (state,) = await group.server.queues(["resultados"])
        assert (state.ready, state.consumers) == (1, 0)
        async with group.member() as engine:
            assert (await engine.ended(run_id))["status"] == "timeout"


async def test_a_front_does_not_keep_the_runs_that_engines_end(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "IDLE", -1.0)
    front = group.member(role=Role.FRONT, broker=Unreachable(group.server))  # nothing is sent, so nothing is noted
    async with acquainted(front):
        for _ in range(3):
            await front.submit({"destinos": ["nobody"]})
        assert len(front.engine.parts.intake._decider.hot) == 1
