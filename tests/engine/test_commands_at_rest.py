"""Commands that nobody answers though all is well: one that is a dead letter, one where nobody listens."""

import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.engine import explanation
from oraculo.errors import BrokerUnavailable
from oraculo.testing.harness import Harness
from tests.engine import broker_stage as stage
from tests.engine.broker_stage import QUICK, Durable, worker_on
from tests.engine.workers import Journal, answer, recording_app
from tests.waiting import until

impatient = stage.impatient
SLOW = "oraculo.core.explain._SLOW"
COUNTED = "it may be in executador_a.dlq, which has 2 dead letters: "
FOUND = ", and its command is in executador_a.dlq: it kills; "


async def told(oraculo: Harness, run_id: str, attempt: int = 1) -> str:
    """The explanation, once it is noted that this attempt was sent."""

    async def of_sent() -> str:
        sentence = await oraculo.operations.explain(run_id)
        return sentence if f"(attempt {attempt} of 3, sent " in sentence else ""

    return await until(of_sent, saying="the command to be noted as sent")


async def quarantined(oraculo: Harness, timeout: float = 30.0) -> str:
    """A run whose command died, as one of another run did before."""
    for _ in range(2):
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}, "timeout": timeout})
        consumer = await oraculo.broker.consume("executador_a", prefetch=1)
        [command] = await consumer.take(1)
        await consumer.dead_letter(command, "it kills")
        await consumer.close()
    return run_id


async def test_the_command_of_a_run_is_found_among_the_dead_letters() -> None:
    async with Harness(settings=QUICK) as oraculo:
        assert FOUND in await told(oraculo, await quarantined(oraculo))
        other = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        assert "dlq" not in await told(oraculo, other)


async def test_it_is_told_also_after_the_run_has_ended() -> None:
    async with Harness(settings=QUICK) as oraculo:
        run_id = await quarantined(oraculo, timeout=1.0)
        await oraculo.ended(run_id)
        told = await oraculo.operations.explain(run_id)
        assert "timeout: no answer in 1 s" in told
        assert FOUND in told


async def test_many_dead_letters_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "_MOST_DEAD_LETTERS", 1)
    monkeypatch.setattr(SLOW, 0.0)
    async with Harness(settings=QUICK) as oraculo:
        assert COUNTED in await told(oraculo, await quarantined(oraculo))


async def test_dead_letters_that_would_be_hidden_from_others_are_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SLOW, 0.0)
    async with Harness(settings=QUICK, broker=Durable("rabbitmq")) as oraculo:
        assert COUNTED in await told(oraculo, await quarantined(oraculo))


async def test_dead_letters_that_cannot_be_read_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLOW, 0.0)
    async with Harness(settings=QUICK) as oraculo:
        run_id = await quarantined(oraculo)

        async def refuse(*_: object) -> None:
            raise BrokerUnavailable("not now")

        monkeypatch.setattr(oraculo.broker, "look_through", refuse)
        assert COUNTED in await told(oraculo, run_id)


async def test_a_letter_of_an_earlier_attempt_is_not_the_next_ones() -> None:
    async with Harness(settings=QUICK) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        consumer = await oraculo.broker.consume("executador_a", prefetch=2)
        [first] = await consumer.take(1)
        await consumer.dead_letter(first, "it kills")
        failure = {"tipo_evento": "resultado_execucao", "payload": {"status": "erro", "motivo": "it ailed"}}
        await oraculo.publish("resultados", answer(run_id, **failure))
        await consumer.take(1)
        assert "dlq" not in await told(oraculo, run_id, attempt=2)


async def test_a_worker_at_another_broker_than_has_the_command_does_not_hear_of_it() -> None:
    first, second = Durable("first"), Durable("second")
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second])) as oraculo:
        worker = await worker_on(second, recording_app(Journal(), ("executador_a",)))
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        assert "nobody listens on queue executador_a at broker first)" in await told(oraculo, run_id)
        await worker.stop()
        assert "nobody listens on queue executador_a)" in await told(oraculo, run_id)
