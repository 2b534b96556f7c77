"""What the engine does while a broker is away, also at the start."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.errors import BrokerError, BrokerUnavailable, NotFound, QueueDown
from oraculo.ports.broker import BrokerStatus, Capabilities, Outgoing, publish_all
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.telemetry import BrokerChanged, LoopFailed
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from tests.brokers.failover_stage import Refusing
from tests.engine import broker_stage as stage
from tests.engine.broker_stage import QUICK, Durable, Told, is_ready, sent_by, worker_on
from tests.engine.workers import Journal, answer, recording_app
from tests.waiting import until

impatient = stage.impatient  # a fixture


async def test_an_engine_starts_while_its_broker_is_away() -> None:
    broker, told = Durable("rabbitmq"), Told()
    broker.away = "not there yet"
    async with Harness(settings=QUICK, broker=broker, telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        health = await oraculo.operations.health()
        assert (health.is_ready, health.parts["broker rabbitmq"]) == (False, "not there yet")
        assert any(record.duty == "broker" for record in told.of(LoopFailed))  # type: ignore[attr-defined]
        assert (await oraculo.operations.explain(run_id)).count("cannot be used") == 1
        broker.come_back()
        worker = await worker_on(broker, recording_app(Journal(), ("executador_a",)))
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        await until(lambda: is_ready(oraculo), saying="the engine to be ready")  # it has a second queue to read
        await worker.stop()


async def test_an_engine_that_starts_while_all_its_brokers_are_away_tells_why_of_each() -> None:
    first, second, told = Durable("rabbitmq"), Durable("redis"), Told()
    first.away, second.away = "no route", "no such host"
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second]), telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: told.of(LoopFailed), saying="the trouble in the log")
        trouble = [why for why in (await oraculo.operations.health()).parts.values() if why is not None]
        words = [*trouble, await oraculo.operations.explain(run_id), *map(str, told.of(LoopFailed))]
        assert any("rabbitmq: no route; redis: no such host" in one for one in words)
        assert not [one for one in words if "start()" in one]


async def test_a_broker_that_does_not_let_the_engine_subscribe_ends_the_start() -> None:
    class Unsubscribable(Durable, Refusing):
        async def declare(self, queues: Sequence[str]) -> None: ...

    broker = Unsubscribable("rabbitmq")
    broker.refused = frozenset({"resultados"})
    oraculo = Harness(settings=QUICK, broker=broker)
    with pytest.raises(BrokerError, match="not allowed"):
        await oraculo.engine.start()
    await oraculo.engine.stop()


async def test_one_that_keeps_nothing_and_was_away_at_the_start_gets_its_commands_again(tmp_path: Path) -> None:
    class Forgetful(Durable):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(durable=False, shared=True, priorities=True, counts_consumers=True)

    path = str(tmp_path / "x.db")
    async with Harness(settings=QUICK, broker=Forgetful("redis"), store=SqliteStore(path)) as before:
        run_id = await before.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(before, run_id, ["redis"]))
    broker = Forgetful("redis")
    broker.away = "still booting"
    app = recording_app(Journal(), ("executador_a",))
    async with Harness(app, settings=QUICK, broker=broker, store=SqliteStore(path)) as after:
        broker.come_back()
        assert (await after.ended(run_id))["status"] == "concluida"


async def test_a_reply_goes_by_the_broker_that_brought_the_request_and_while_that_is_away_by_another() -> None:
    first, second = Durable("first"), Durable("second")
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second])) as oraculo:
        await publish_all(second, [Outgoing("orquestrador", request_for_replies("one"))])
        await until(lambda: second.queues(["minhas-respostas"]), saying="the reply on the second")
        await publish_all(second, [Outgoing("orquestrador", request_for_replies("two", timeout=0.5))])
        await until(lambda: oraculo.store.heads(["two"]), saying="the second request to be taken")
        await second.leave()
        await until(lambda: first.queues(["minhas-respostas"]), saying="the reply on the first")
        second.come_back()
        states = [*await first.queues(["minhas-respostas"]), *await second.queues(["minhas-respostas"])]
        assert [state.ready for state in states] == [1, 1]


def request_for_replies(run_id: str, timeout: float = 0.05) -> bytes:
    """Of a run that ends by its deadline."""
    payload = {"destinos": ["executador_a"], "timeout": timeout, "responder_em": "minhas-respostas"}
    return msgspec.json.encode(answer(run_id, tipo_evento="iniciar_orquestracao", payload=payload))


async def test_a_dead_letter_of_a_broker_that_is_away_is_not_said_to_be_gone() -> None:
    first, told = Durable("first"), Told()
    both = FailoverBroker([first, Durable("second")])
    async with Harness(settings=QUICK, broker=both, telemetry=told) as oraculo:
        await publish_all(first, [Outgoing("executador_a", b"1", reason="why")])
        [letter] = await oraculo.operations.dead_letters("executador_a")
        await first.leave()
        await until(lambda: told.of(BrokerChanged), saying="the loss to be told")
        with pytest.raises(BrokerUnavailable, match=r"first.* is away: pulled out"):
            await oraculo.operations.redrive("executador_a", [letter.id])
        with pytest.raises(BrokerUnavailable, match=r"first.* is away: pulled out"):
            await oraculo.operations.discard("executador_a", letter.id)
        with pytest.raises(NotFound):
            await oraculo.operations.discard("resultados", "second:1")
        first.come_back()
        await until(lambda: len(told.of(BrokerChanged)) == 2, saying="the return to be told")
        assert (await oraculo.operations.redrive("executador_a", [letter.id])).moved == 1


class Leaderless(Durable):
    """Says nothing of a queue, once that has lost its leader."""

    has_leader = True

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        if not self.has_leader and names and "executador_a" in names:
            raise QueueDown("no leader")
        return await super().queues(names)

    def statuses(self) -> Sequence[BrokerStatus]:
        [link] = super().statuses()
        stuck = () if self.has_leader else (("executador_a", "the queue has no leader"),)
        return [msgspec.structs.replace(link, stuck=stuck)]


async def test_that_the_other_broker_does_not_have_the_queue_is_not_taken_for_a_lost_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oraculo.core.explain._SLOW", 0.0)
    first = Leaderless("rabbitmq")
    async with Harness(settings=QUICK, broker=FailoverBroker([first, Durable("redis")])) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(oraculo, run_id, ["rabbitmq"]))
        first.has_leader = False
        told = await oraculo.operations.explain(run_id)
        assert "the queue has no leader" in told
        assert "no longer there" not in told
        assert "nobody listens" not in told
