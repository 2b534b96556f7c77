"""A run that is shown says of each open task where it is, as far as is known."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.queues import looks as queue_looks
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock
from oraculo.settings import RunSettings, Settings
from oraculo.testing.harness import Harness
from tests.engine.workers import answer, failing_app
from tests.waiting import until


async def phases(oraculo: Harness, run_id: str) -> dict[str, str | None]:
    return {task["id"]: task["fase"] for task in await tasks(oraculo, run_id)}


async def tasks(oraculo: Harness, run_id: str) -> list[dict[str, Any]]:
    view = await oraculo.operations.view(await oraculo.operations.run(run_id))
    return [msgspec.json.decode(task) for task in view["tarefas"]]


async def test_one_at_work_and_the_others_in_the_queue() -> None:
    oraculo = Harness()
    async with oraculo:
        consumer = await oraculo.broker.consume("executador_x", prefetch=1)
        run_id = await oraculo.submit({"destinos": [{"fila": "executador_x", "id": f"t{n}"} for n in range(3)]})
        other = await oraculo.submit({"destinos": [{"fila": "executador_x", "id": "t0"}]})
        [taken] = await consumer.take(1)
        work = {"t0": "em_trabalho", "t1": "na_fila", "t2": "na_fila"}
        await until(lambda: _is(oraculo, run_id, work), saying="the phases of all three")
        await until(lambda: _is(oraculo, other, {"t0": "na_fila"}), saying="the phase in the other run")
        await oraculo.publish("resultados", answer(run_id, tarefa="t0", tipo_evento="resultado_execucao"))
        await consumer.ack([taken])
        await consumer.take(1)
        done = {"t0": None, "t1": "em_trabalho", "t2": "na_fila"}
        await until(lambda: _is(oraculo, run_id, done), saying="the next one's turn")


async def _is(oraculo: Harness, run_id: str, expected: dict[str, str | None]) -> bool:
    return await phases(oraculo, run_id) == expected


async def test_a_task_that_waits_for_its_next_attempt_says_when_that_is() -> None:
    settings = Settings(runs=RunSettings(backoff=60.0))
    async with Harness(failing_app("executador_x", failures=None), settings=settings) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})
        await until(lambda: _is(oraculo, run_id, {"executador_x": "aguardando_nova_tentativa"}), saying="the retry")
        [task] = await tasks(oraculo, run_id)
        assert (task["status"], task["proxima_tentativa_em"] is not None) == ("pendente", True)


class Silent(MemoryBroker):
    """Says nothing of its queues once it is asked to be silent."""

    asked = 0

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_broker_that_says_nothing_holds_up_one_look_and_no_more(monkeypatch: Any) -> None:
    monkeypatch.setattr(queue_looks, "_PATIENCE", 0.05)
    broker = Silent(SystemClock())
    async with Harness(broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})
        await until(lambda: _is_sent(oraculo, run_id), saying="the sending")
        broker.asked = 0
        for _ in range(5):
            assert await phases(oraculo, run_id) == {"executador_x": None}
        assert broker.asked <= 1, "it was asked by the looks before, or once"


async def _is_sent(oraculo: Harness, run_id: str) -> bool:
    return (await tasks(oraculo, run_id))[0]["status"] == "em_execucao"


async def test_looks_follow_each_other_by_a_second_at_most() -> None:
    class Counted(MemoryBroker):
        asked = 0

        async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
            self.asked += 1
            return await super().queues(names)

    broker = Counted(SystemClock())
    async with Harness(broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_x"]})
        await until(lambda: _is(oraculo, run_id, {"executador_x": "na_fila"}), saying="the phase")
        before = broker.asked
        await asyncio.gather(*(phases(oraculo, run_id) for _ in range(50)))
        assert broker.asked <= before + 1
