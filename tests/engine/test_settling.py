"""Messages that the engine took stay its own until they are settled, and are settled whatever fails."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.core import machine
from oraculo.engine.decide import settle
from oraculo.errors import BrokerUnavailable, NotFound
from oraculo.ports.broker import Consumer, Delivery, Outgoing, publish_all
from oraculo.ports.broker_admin import DeadLetter
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import DeadLettered, LoopFailed
from oraculo.settings import BrokerSettings, Settings
from oraculo.stores.sqlite import MEMORY
from oraculo.testing.harness import Harness
from tests.brokers.failover_stage import Crammed, Named
from tests.engine.broker_stage import QUICK, Durable, Told
from tests.engine.test_bounds import MoodyStore
from tests.engine.workers import Journal, answer, recording_app
from tests.waiting import until


async def test_messages_that_wait_for_the_store_keep_their_lease() -> None:
    """Else each would be delivered again and again, and quarantined at the delivery limit."""
    settings = Settings(engine=QUICK.engine, broker=BrokerSettings(lease=0.15))
    broker = MemoryBroker(SystemClock(), lease=0.15, delivery_limit=2)
    store = MoodyStore(MEMORY)
    async with Harness(settings=settings, broker=broker, store=store) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "payload": {}})
        await until(lambda: broker.queues(["escavador_a"]))
        store.away = True
        await oraculo.publish("resultados", answer(run_id))
        await asyncio.sleep(1.0)  # the length of the trouble: more than six leases
        store.away = False
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        [state] = await broker.queues(["resultados"])
        assert (state.ready, state.dead_letters) == (0, 0)
        history = [entry.what.value for entry in await oraculo.operations.history(run_id)]
        assert "resposta_repetida" not in history


async def test_what_lost_consumers_brought_is_kept_once_while_the_store_is_away() -> None:
    """The broker delivers it again with each new consumer: else an outage would fill the memory."""
    settings = Settings(engine=msgspec.structs.replace(QUICK.engine, prefetch=10, batch=5))
    broker, store = Named("one", delivery_limit=1000), MoodyStore(MEMORY)
    async with Harness(settings=settings, broker=broker, store=store) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        store.away = True
        for number in range(10):
            await oraculo.publish("resultados", answer(run_id, tarefa=f"t{number}"))
        inbox, held = oraculo.engine.parts.runs.inbox, list[int]()
        for _ in range(6):
            await until(lambda: any(one.delivery.redeliveries == len(held) for one in inbox.arrived), within=20)
            held.append(len(inbox))
            await broker.lose_consumers()
        assert max(held) <= 20, held
        store.away = False
        await oraculo.publish("resultados", answer(run_id))
        assert (await oraculo.ended(run_id))["status"] == "concluida"


async def test_a_message_that_breaks_the_engine_and_cannot_be_given_back_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def stumble(*_: object, **__: object) -> None:
        raise RuntimeError("a bug of the adapter")

    monkeypatch.setattr(MemoryConsumer, "retry", stumble)
    async with Harness(settings=QUICK) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        with monkeypatch.context() as bug:
            bug.setattr(machine, "apply", broken)
            await oraculo.publish("resultados", answer(run_id, tarefa="escavador_a"))
            cancelling = asyncio.create_task(oraculo.operations.cancel(run_id))
            with pytest.raises(ZeroDivisionError):
                await cancelling
        await oraculo.publish("resultados", answer(run_id, tarefa="escavador_a"))
        assert (await oraculo.ended(run_id))["status"] == "concluida"


class Burying(MemoryBroker):
    """Its consumers tell how many they bury at once, and may be made to wait with it."""

    def __init__(self, lease: float | None = None) -> None:
        super().__init__(SystemClock(), lease=lease)
        self.buried: list[int] = []
        self.extended: list[Delivery] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def consume(self, queue: str, *, prefetch: int) -> Consumer:  # type: ignore[override]
        consumer = await super().consume(queue, prefetch=prefetch)
        bury, extend = consumer.dead_letter, consumer.extend

        async def dead_letter_all(letters: Sequence[tuple[Delivery, str]]) -> None:
            self.buried.append(len(letters))
            await self.gate.wait()
            for delivery, reason in letters:
                await bury(delivery, reason)

        async def noted(deliveries: Sequence[Delivery]) -> None:
            self.extended += deliveries
            await extend(deliveries)

        consumer.dead_letter = lambda delivery, reason: dead_letter_all([(delivery, reason)])  # type: ignore[method-assign]
        consumer.dead_letter_all = dead_letter_all  # type: ignore[method-assign]
        consumer.extend = noted  # type: ignore[method-assign]
        return consumer


async def test_bad_answers_are_quarantined_together_so_that_good_ones_do_not_wait_behind_them() -> None:
    broker = Burying()
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        await publish_all(broker, [Outgoing("resultados", b"{bad %d" % n) for n in range(300)])
        await until(lambda: sum(broker.buried) == 300, saying="all to be quarantined")
        assert len(await oraculo.operations.dead_letters("resultados", limit=400)) == 300
    assert len(broker.buried) < 10


async def test_messages_that_wait_to_be_quarantined_keep_their_lease() -> None:
    settings = Settings(engine=QUICK.engine, broker=BrokerSettings(lease=0.15))
    broker = Burying(lease=0.15)
    async with Harness(settings=settings, broker=broker) as oraculo:
        broker.gate.clear()
        await oraculo.publish("resultados", b"{bad")
        await until(lambda: len(broker.extended) > 8, saying="its lease to be renewed for longer than two")
        broker.gate.set()
        (letter,) = await until(lambda: oraculo.operations.dead_letters("resultados"))
    assert (letter.body, letter.redeliveries, broker.buried) == (b"{bad", 0, [1])


async def test_a_dead_letter_that_one_of_several_brokers_cannot_put_away_is_told_as_such_and_closes_no_other() -> None:
    first, second, told = Crammed("first"), Named("second"), Told()
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second]), telemetry=told) as oraculo:
        assert second._server is not None
        readers = second._server.queues["resultados"].consumers
        before = list(readers)
        assert len(before) == 1
        await publish_all(first, [Outgoing("resultados", b"{bad")])
        await until(lambda: told.of(LoopFailed), saying="the failure to be told")
        assert told.of(DeadLettered) == []
        first.is_crammed = False
        await until(lambda: oraculo.operations.dead_letters("resultados"), saying="the letter to be put away")
        assert list(readers) == before
    assert [record.queue for record in told.of(DeadLettered)] == ["resultados"]  # type: ignore[attr-defined]


async def test_a_refused_answer_that_comes_again_because_it_cannot_be_buried_is_told_once_in_its_run() -> None:
    broker, told = Crammed("first"), Told()
    async with Harness(settings=QUICK, broker=FailoverBroker([broker]), telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a", "escavador_b"]})
        await until(lambda: broker.queues(["escavador_b"]), saying="the commands to be sent")
        for message in (answer(run_id, tarefa="escavador_a", tentativa="1"), answer(run_id)):
            await oraculo.publish("resultados", message)
        await until(lambda: len(told.of(LoopFailed)) > 1, saying="that to fail, and to fail again")
        broker.is_crammed = False
        letters = oraculo.operations.dead_letters
        found = await until(lambda: _two_of(letters("resultados")), saying="both to be put away")
        assert all(letter.redeliveries for letter in found)
        history = await oraculo.operations.history(run_id)
        assert [entry.what for entry in history].count("resposta_recusada") == 2


async def _two_of(asked: Awaitable[Sequence[DeadLetter]]) -> Sequence[DeadLetter]:
    found = await asked
    return found if len(found) == 2 else ()


async def test_the_batches_that_wait_to_be_settled_are_bounded() -> None:
    broker, most = Burying(), settle.MOST_SETTLING + 1
    settings = msgspec.structs.replace(QUICK, engine=msgspec.structs.replace(QUICK.engine, batch=1))
    async with Harness(settings=settings, broker=broker):
        broker.gate.clear()
        await publish_all(broker, [Outgoing("resultados", b"{bad") for _ in range(most * 3)])
        await until(lambda: len(broker.buried) >= most, saying="as many as may be to wait")
        assert len(broker.buried) == most
        broker.gate.set()
        await until(lambda: len(broker.buried) == most * 3, saying="all to be settled")


class Reading(MemoryBroker):
    """As RabbitMQ, which reads all dead letters whenever it is asked for some."""

    reads = 0

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        self.reads += 1
        return await super().dead_letters(queue, limit=limit, after=after)

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        self.reads += 1
        await super().look_through(queue, see, ids)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        self.reads += 1
        return await super().redrive(queue, ids)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        self.reads += 1
        return await super().discard(queue, ids)


async def test_to_discard_one_dead_letter_or_redrive_all_they_are_read_a_few_times_however_many_they_are() -> None:
    broker = Reading(SystemClock())
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        await publish_all(broker, [Outgoing("executador_a", b"%d" % n, reason="failed") for n in range(1000)])
        (letter,) = await oraculo.operations.dead_letters("executador_a", limit=1)
        broker.reads = 0
        await oraculo.operations.discard("executador_a", letter.id)
        assert broker.reads == 2
        assert (await oraculo.operations.redrive("executador_a")).moved == 999
        assert broker.reads == 5
        with pytest.raises(NotFound, match=f"no dead letter with the id {letter.id}"):
            await oraculo.operations.discard("executador_a", letter.id)


class Unsettled(MemoryBroker):
    """The first ack of an answer fails, though the consumer lives on."""

    failures = 1
    error: Exception = BrokerUnavailable("the ack was lost")

    async def consume(self, queue: str, *, prefetch: int) -> Consumer:  # type: ignore[override]
        consumer = await super().consume(queue, prefetch=prefetch)
        acknowledge = consumer.ack

        async def ack(deliveries: Sequence[Delivery]) -> None:
            if queue == "resultados" and self.failures:
                self.failures -= 1
                raise self.error
            await acknowledge(deliveries)

        consumer.ack = ack  # type: ignore[method-assign]
        return consumer


@pytest.mark.parametrize("error", [BrokerUnavailable("the ack was lost"), KeyError("an adapter's own fault")])
async def test_an_answer_whose_ack_fails_does_not_stay_in_the_prefetch_for_ever(error: Exception) -> None:
    broker, told = Unsettled(SystemClock()), Told()
    broker.error = error
    async with Harness(settings=QUICK, broker=broker, telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "payload": {}})
        await until(lambda: broker.queues(["escavador_a"]))
        await oraculo.publish("resultados", answer(run_id))
        assert (await oraculo.ended(run_id))["status"] == "concluida"

        async def settled() -> bool:
            [state] = await broker.queues(["resultados"])
            return state.ready + state.unacked == 0

        await until(settled, saying="the answer to be settled by the next consumer")
    assert [record.duty for record in told.of(LoopFailed)] == ["settle"]  # type: ignore[attr-defined]


async def test_a_broker_that_does_not_take_acks_stops_neither_accepting_nor_progress() -> None:
    class Frozen(Durable):
        is_frozen = False

        async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
            consumer = await super().consume(queue, prefetch=prefetch)
            acknowledge = consumer.ack

            async def ack(deliveries: Sequence[Delivery]) -> None:
                if self.is_frozen:
                    await asyncio.sleep(5)
                await acknowledge(deliveries)

            consumer.ack = ack
            return consumer

    broker = Frozen("rabbitmq")
    async with Harness(recording_app(Journal(), ("executador_a",)), settings=QUICK, broker=broker) as oraculo:
        broker.is_frozen = True
        async with asyncio.timeout(4):
            for _ in range(3):
                assert (await oraculo.run({"destinos": ["executador_a"], "payload": {}}))["status"] == "concluida"
        broker.is_frozen = False
