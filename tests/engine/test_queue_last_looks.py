"""After a timeout the reason says what was seen of the queue: that nobody listened, or that others were before it."""

import pytest

from oraculo.engine.queues import last_looks
from oraculo.engine.queues import looks as queue_looks
from oraculo.engine.queues import served as served_queues
from oraculo.engine.wiring import Role
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.testing.harness import Harness
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, recording_app
from tests.servers.fleet import BROKERS, Fleet
from tests.waiting import until


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine under load has looked in time."""
    monkeypatch.setattr(last_looks, "_EVERY", 0.1)
    monkeypatch.setattr(queue_looks, "FRESH", 0.05)
    monkeypatch.setattr(served_queues, "_FRESH", 0.05)


async def test_nobody_listened() -> None:
    async with Harness() as oraculo:
        consumer = await oraculo.broker.consume("outra_fila", prefetch=1)
        run_id = await oraculo.submit({"destinos": ["executador_x", "outra_fila"], "timeout": 2})
        await consumer.take(1)
        aggregate = await oraculo.ended(run_id)
        assert (
            aggregate["falhas"]["executador_x"]["motivo"] == "no answer in 2 s; nobody listened on queue executador_x"
        )
        assert aggregate["falhas"]["outra_fila"]["motivo"] == "no answer in 2 s"
        told = "'executador_x' timeout: no answer in 2 s; nobody listened on queue executador_x"
        assert told in await oraculo.operations.explain(run_id)


async def test_nobody_listened_on_any_of_many_queues() -> None:
    queues = [f"executador_{number}" for number in range(50)]
    async with Harness() as oraculo:
        aggregate = await oraculo.run({"destinos": queues, "timeout": 2})
    motives = {queue: failure["motivo"] for queue, failure in aggregate["falhas"].items()}
    assert motives == {queue: f"no answer in 2 s; nobody listened on queue {queue}" for queue in queues}


async def test_a_steps_own_deadline_says_so_too() -> None:
    destination = {"fila": "executador_x", "timeout": 2}
    async with Harness() as oraculo:
        aggregate = await oraculo.run({"destinos": [destination], "timeout": 30})
        assert (
            aggregate["falhas"]["executador_x"]["motivo"] == "no answer in 2 s; nobody listened on queue executador_x"
        )


async def test_others_were_before_it() -> None:
    async with Harness() as oraculo:
        consumer = await oraculo.broker.consume("executador_x", prefetch=1)
        await publish_all(oraculo.broker, [Outgoing("executador_x", b"of somebody else")])
        await consumer.take(1)
        aggregate = await oraculo.run({"destinos": ["executador_x"], "timeout": 2})
        why = "no answer in 2 s; 1 message waited in queue executador_x, where 1 listened"
        assert aggregate["falhas"]["executador_x"]["motivo"] == why


@pytest.mark.parametrize("name", BROKERS)
async def test_as_each_broker_says(name: str, fleet: Fleet) -> None:
    async with Stage(settings_for(fleet.url(name))) as oraculo:
        motive = (await oraculo.run({"destinos": ["executador_x"], "timeout": 2}))["falhas"]["executador_x"]["motivo"]
    unheard = "1 message waited in queue executador_x, and nobody seemed to take it"
    expected = unheard if name == "nats" else "nobody listened on queue executador_x"
    assert motive == f"no answer in 2 s; {expected}"


async def test_a_run_of_another_process_whose_plan_is_not_known_here() -> None:
    async with Harness(role=Role.FRONT) as front:
        run_id = await front.submit({"destinos": ["executador_x"], "timeout": 2})
        async with Harness(broker=front.broker, store=front.store, clock=front.clock):
            aggregate = await front.ended(run_id)
    assert aggregate["falhas"]["executador_x"]["motivo"] == "no answer in 2 s; nobody listened on queue executador_x"


@pytest.mark.parametrize("name", ["memory", *BROKERS])
async def test_where_nobody_serves_the_queue_one_with_a_similar_name_is_asked_after(name: str, fleet: Fleet) -> None:
    app = recording_app(Journal(), ("escavador_blog",))
    async with Harness(app) if name == "memory" else Stage(settings_for(fleet.url(name)), app) as oraculo:
        await until(lambda: _serves(oraculo, "escavador_blog"))
        mistyped = {"fila": "escavador_blgo", "timeout": 3}
        run_id = await oraculo.submit({"destinos": [mistyped, "executador_que_ninguem_serve"], "timeout": 4})

        async def is_asked() -> bool:
            told = await oraculo.operations.explain(run_id)
            return "nobody listens on queue escavador_blgo: did you mean 'escavador_blog'?)" in told

        if name != "nats":  # which does not count consumers: what waits there is said later
            await until(is_asked)
        failures = (await oraculo.ended(run_id))["falhas"]
        motive = failures["escavador_blgo"]["motivo"]
        assert motive.startswith("no answer in 3 s; ")
        assert motive.endswith(": did you mean 'escavador_blog'?")
        assert "did you mean" not in failures["executador_que_ninguem_serve"]["motivo"]


async def _serves(oraculo: Harness, queue: str) -> bool:
    return await oraculo.engine.parts.queues.served.near(queue + "x") == queue
