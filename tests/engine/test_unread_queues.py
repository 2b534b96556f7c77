"""What is told when the engine cannot read its own queues."""

from collections.abc import Sequence

import pytest

from oraculo.engine import service
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import BrokerStatus, ConsumerDoubted, Delivery
from oraculo.ports.telemetry import LoopFailed
from oraculo.testing.harness import Harness
from tests.engine import broker_stage as stage
from tests.engine.broker_stage import QUICK, Durable, DurableUnreadable, Told, is_ready, sent_by
from tests.engine.workers import answer
from tests.waiting import until

impatient = stage.impatient  # a fixture


class Deaf(Durable):
    """Its consumer of answers is connected and gets nothing, as a vigil finds out."""

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus("rabbitmq", None, ("resultados",))]


async def test_a_deaf_consumer_turns_readiness_red() -> None:
    async with Harness(settings=QUICK, broker=Deaf("rabbitmq")) as oraculo:
        health = await oraculo.operations.health()
        assert not health.is_ready
        assert "heard nothing on resultados" in (health.parts["broker rabbitmq"] or "")


async def test_nobody_who_reads_our_queues_is_told_by_readiness() -> None:
    class Closed(Durable):
        is_closed = True

        async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
            if self.is_closed:
                raise BrokerUnavailable("no more consumers")
            return await super().consume(queue, prefetch=prefetch)

    broker = Closed("rabbitmq")
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        health = await oraculo.operations.health()
        assert not health.is_ready
        assert "nobody reads resultados, orquestrador" in (health.parts["consumers"] or "")
        broker.is_closed = False
        await until(lambda: is_ready(oraculo), saying="readiness")


async def test_a_consumer_that_is_only_doubted_is_made_again_at_once_and_without_alarm() -> None:
    """As where other engines take all canaries: nothing is wrong, and readiness stays green all the while."""

    class Doubting(Durable):
        def __init__(self) -> None:
            super().__init__("redis")
            self.made: list[str] = []
            self.unread_meanwhile: list[Sequence[str]] = []

        async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
            if queue in self.made:
                self.unread_meanwhile.append(oraculo.engine.parts.consumers.without_consumer)
            consumer = await super().consume(queue, prefetch=prefetch)
            self.made.append(queue)
            if self.made.count(queue) < 4:

                async def take(limit: int) -> Sequence[Delivery]:
                    raise ConsumerDoubted("to be sure")

                consumer.take = take  # type: ignore[method-assign]
            return consumer

    broker, told = Doubting(), Told()
    async with Harness(settings=QUICK, broker=broker, telemetry=told) as oraculo:
        await until(lambda: len(broker.made) == 8, saying="both to be made again")
        assert broker.unread_meanwhile == [[]] * 6
        assert told.of(LoopFailed) == []
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(oraculo, run_id, ["redis"]))
        await oraculo.publish("resultados", answer(run_id, tipo_evento="resultado_execucao"))
        assert (await oraculo.ended(run_id))["status"] == "concluida"


async def test_what_cannot_be_read_is_told_with_the_reason_by_readiness_and_by_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer can be made each time, and fails as soon as it is asked."""
    monkeypatch.setattr(service, "_PAUSE_AFTER_FAILURE", 0.02)
    broker = DurableUnreadable("redis")
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(oraculo, run_id, ["redis"]))
        told = "nobody reads resultados, orquestrador: a consumer is being made; the last one failed: not permitted"

        async def is_told() -> bool:
            return len(oraculo.engine.parts.consumers.unread) == 2

        await until(is_told, saying="both to be found out")
        for _ in range(4):
            refusals = broker.refusals
            await until(lambda: broker.refusals >= refusals + 2, saying="the next to fail")  # noqa: B023
            health = await oraculo.operations.health()
            assert not health.is_ready
            assert health.parts["consumers"] == told
            explained = await oraculo.operations.explain(run_id)
            assert "ORÁCULO itself hears nothing on queue resultados now (not permitted)" in explained
        await oraculo.publish("resultados", answer(run_id, tipo_evento="resultado_execucao"))
        broker.forbidden = None
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        await until(lambda: is_ready(oraculo), saying="readiness, though no request comes")
        assert "hears nothing" not in await oraculo.operations.explain(run_id)


async def test_while_the_engine_hears_no_answers_no_worker_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.core.explain._SLOW", 0.0)
    async with Harness(settings=QUICK, broker=Deaf("rabbitmq")) as oraculo:
        consumer = await oraculo.broker.consume("executador_a", prefetch=1)
        run_id = await oraculo.submit({"destinos": ["executador_a"], "timeout": 2})
        await consumer.take(1)
        told = await until(lambda: _told(oraculo, run_id, "no longer in queue executador_a);"))
        why = "its consumer gets nothing, and is made again"
        assert f"; ORÁCULO itself hears nothing on queue resultados now ({why});" in told
        motive = (await oraculo.ended(run_id))["falhas"]["executador_a"]["motivo"]
        assert motive == f"no answer in 2 s; ORÁCULO itself heard nothing on queue resultados ({why})"


async def _told(oraculo: Harness, run_id: str, words: str) -> str:
    told = await oraculo.operations.explain(run_id)
    return told if words in told else ""
