"""On `memory://` a queue that nobody serves holds up no other, however much is sent to it."""

import json

from oraculo.brokers.memory import MemoryBroker
from oraculo.ports.clock import SystemClock
from oraculo.settings import EngineSettings, Settings
from oraculo.testing.harness import Harness
from tests.engine.workers import Journal, recording_app
from tests.waiting import until

UNSERVED, SERVED = "executador_sem_ninguem", "escavador_a"
LIMIT = 100_000  # bytes
LARGE = {"texto": "x" * 10_000}
SETTINGS = Settings(engine=EngineSettings(poll=0.05, stop_grace=0.2))


async def test_what_a_full_queue_has_no_room_for_waits_alone_until_it_is_read() -> None:
    broker = MemoryBroker(SystemClock(), max_bytes=LIMIT)
    async with Harness(recording_app(Journal(), (SERVED,)), settings=SETTINGS, broker=broker) as oraculo:
        large = {"destinos": [UNSERVED], "payload": LARGE, "timeout": 60}
        waiting = [await oraculo.submit(large) for _ in range(20)]
        await until(lambda: oraculo.engine.parts.health.queues.refusing, saying="that the queue is told of")
        for _ in range(3):
            aggregate = await oraculo.run({"destinos": [SERVED], "payload": {}, "timeout": 5})
            assert aggregate["status"] == "concluida"
        assert oraculo.engine.parts.health.queues.no_queue_takes is None
        assert (await oraculo.operations.health()).is_ready
        assert "nobody reads it" in await oraculo.operations.explain(waiting[-1])
        assert "start a worker for it" in await oraculo.operations.explain(waiting[-1])

        consumer, sent = await broker.consume(UNSERVED, prefetch=2), list[str]()
        while len(sent) < len(waiting):
            taken = await until(lambda: consumer.take(10), saying="the next commands")
            sent += [json.loads(command.body)["correlation_id"] for command in taken]
            await consumer.ack(taken)
        assert sorted(sent) == sorted(waiting)  # each of them, once


async def test_why_a_command_was_never_sent_is_told_of_its_own_queue() -> None:
    broker = MemoryBroker(SystemClock(), max_bytes=LIMIT)
    async with Harness(recording_app(Journal(), (SERVED,)), settings=SETTINGS, broker=broker) as oraculo:
        large = {"destinos": [UNSERVED], "payload": LARGE, "timeout": 60}
        for _ in range(20):
            await oraculo.submit(large)
        aggregate = await oraculo.run({"destinos": [SERVED, UNSERVED], "payload": LARGE, "timeout": 1})
        assert aggregate["resultados"].keys() == {SERVED}
        told = aggregate["falhas"][UNSERVED]["motivo"]
        assert told.startswith("not sent in 1 s: the broker did not take the command (the memory broker has no room ")
        assert f"for {UNSERVED}: messages take " in told
        assert "start a worker for it, or use a real broker" in told
