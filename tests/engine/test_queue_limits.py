"""Queues that are named for the first time: to make them takes a broker a while, which others do not wait for."""

import asyncio
from collections.abc import Collection, Sequence
from functools import partial

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.queues import limits as queue_limits
from oraculo.ports.broker import Outgoing, Receipt, publish_all
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import DeadLettered, LoopFailed
from oraculo.settings import QueueSettings, Settings
from oraculo.stores.sqlite import MEMORY
from oraculo.testing.harness import Harness
from oraculo.worker import App
from tests.brokers.failover_stage import Named
from tests.engine.broker_stage import Told
from tests.engine.test_bounds import MoodyStore
from tests.waiting import until

GOOD = {"destinos": ["executador_bom"]}

app = App("bom")


@app.executador("bom")
async def good(payload: dict[str, object]) -> dict[str, object]:
    return {"feito": True}


class SlowMaker(MemoryBroker):
    """Makes queues whose names begin with `nova` only once it may."""

    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.may_make = asyncio.Event()
        self.is_making = asyncio.Event()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if any(message.queue.startswith("nova") for message in messages):
            self.is_making.set()
            await self.may_make.wait()
        return await super().publish(messages)


async def test_a_run_to_known_queues_does_not_wait_while_new_ones_are_made() -> None:
    broker = SlowMaker()
    async with Harness(app, broker=broker) as oraculo:
        assert (await oraculo.run(GOOD))["status"] == "concluida"
        held_up = await oraculo.submit({"destinos": [f"nova-{number}" for number in range(100)]})
        await broker.is_making.wait()
        assert (await oraculo.run(GOOD, wait=5))["status"] == "concluida"
        broker.may_make.set()
        await until(lambda: all_sent(oraculo, held_up))


async def test_a_run_to_a_pipelines_queues_does_not_wait_either_though_nothing_was_sent_there_yet() -> None:
    broker = SlowMaker()
    async with Harness(broker=broker) as oraculo:
        await oraculo.operations.put_pipeline("p", b'{"name": "p", "steps": [{"type": "BOM", "queue": "boa"}]}')
        await oraculo.submit({"destinos": ["nova"]})
        await broker.is_making.wait()
        run_id = await oraculo.submit({"pipeline": "p", "payload": {}})
        await until(lambda: all_sent(oraculo, run_id))
        broker.may_make.set()


async def all_sent(oraculo: Harness, run_id: str) -> bool:
    return not any(task.unsent for task in (await oraculo.operations.run(run_id)).tasks)


ONE_NEW = Settings(queues=QueueSettings(new_per_request=1))


def over_the_limit(run_id: str) -> dict[str, object]:
    return {
        "correlation_id": run_id,
        "tipo_evento": "iniciar_orquestracao",
        "payload": {"destinos": [f"{run_id}.a", f"{run_id}.b"]},
        "timestamp": "2026-01-01T00:00:00Z",
    }


class SlowToTell(Named):
    """Tells which of the queues for runs are there only once it may."""

    def __init__(self) -> None:
        super().__init__("one", delivery_limit=1000)
        self.may_tell = asyncio.Event()

    async def queues(self, names: Collection[str] | None = None) -> Sequence[QueueState]:
        if names and any(name.startswith("pedido") for name in names):
            await self.may_tell.wait()
        return await super().queues(names)


async def test_no_run_waits_while_requests_by_message_wait_to_be_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_limits, "PATIENCE", 60.0)
    broker, told = SlowToTell(), Told()
    async with Harness(app, broker=broker, settings=ONE_NEW, telemetry=told) as oraculo:
        for count in range(1, 25):
            await oraculo.publish("orquestrador", over_the_limit(f"pedido-{count}"))
            await until(partial(unacked, broker, count))
            await oraculo.run(GOOD, wait=5)
        broker.may_tell.set()
        await until(lambda: len(told.of(DeadLettered)) >= 24)
        await until(partial(unacked, broker, 0))


async def test_what_lost_consumers_brought_waits_once_to_be_admitted() -> None:
    broker = SlowToTell()
    async with Harness(broker=broker, settings=ONE_NEW) as oraculo:
        for number in range(5):
            await oraculo.publish("orquestrador", over_the_limit(f"pedido-{number}"))
        waiting, held = oraculo.engine.parts.intake._admission, list[int]()
        for _ in range(4):
            await until(lambda: any(one.delivery.redeliveries == len(held) for one in waiting._waiting), within=20)
            held.append(len(waiting._waiting))
            await broker.lose_consumers()
        assert max(held) <= 10, held


async def unacked(broker: MemoryBroker, count: int) -> bool:
    [state] = await broker.queues(["orquestrador"])
    return state.unacked == count


async def test_a_request_over_the_limit_is_refused_once_though_the_store_is_away() -> None:
    broker, store, told = MemoryBroker(clock=SystemClock()), MoodyStore(MEMORY), Told()
    async with Harness(app, broker=broker, store=store, settings=ONE_NEW, telemetry=told) as oraculo:
        good = over_the_limit("bom") | {"payload": GOOD}
        messages = [Outgoing("orquestrador", msgspec.json.encode(each)) for each in (over_the_limit("mau"), good)]
        store.away = True
        await publish_all(broker, messages)
        await until(lambda: len(told.of(LoopFailed)) >= 3)
        store.away = False
        await until(partial(unacked, broker, 0))
        assert (await oraculo.ended("bom"))["status"] == "concluida"
    assert len(told.of(DeadLettered)) == 1
