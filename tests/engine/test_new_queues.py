"""Queues that are named for the first time: to make them takes a broker a while, which others do not wait for."""

import asyncio
from collections.abc import Sequence

from oraculo.brokers.memory import MemoryBroker
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.testing.harness import Harness
from oraculo.worker import App
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

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
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
