"""What the engine does about its brokers: losses, leases, messages that cannot be settled, one that is away at the
start."""

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.core.events import BrokerLost
from oraculo.core.machine import Verdict
from oraculo.engine import links, service
from oraculo.engine.inputs import Wish
from oraculo.engine.outbox import Outbox
from oraculo.engine.publishing import Key
from oraculo.errors import BrokerError, BrokerUnavailable, NotFound, StoreUnavailable
from oraculo.ports.broker import Capabilities, Consumer, DeadLetter, Delivery, Link, Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import BrokerChanged, CommandsTakenBack, LoopFailed, Record
from oraculo.settings import BrokerSettings, EngineSettings, RunSettings, Settings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from oraculo.worker import App, Worker
from tests.brokers.failover_stage import Named, Refusing, Unreadable
from tests.engine.test_bounds import MoodyStore
from tests.engine.workers import Journal, answer, recording_app
from tests.waiting import until

QUICK = Settings(engine=EngineSettings(poll=0.02), runs=RunSettings(backoff=0.01))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GRACE", 0.05)
    for name in ("broker.PROBE_PAUSE", "broker.LONGEST_PROBE_PAUSE", "broker.PULSE", "consumer.FAILED_PAUSE"):
        monkeypatch.setattr(f"oraculo.brokers.failover.{name}", 0.02)
    monkeypatch.setattr("oraculo.brokers.failover.consumer.RESUBSCRIBE_PAUSE", 0.02)
    monkeypatch.setattr("oraculo.core.unread._LONGER", 0.2)


class Told:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def of(self, kind: type[Record]) -> list[Record]:
        return [record for record in self.records if isinstance(record, kind)]


class Durable(Named):
    """As a real broker: the engine does not forget at its start what it has sent through it."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(durable=True, shared=True, priorities=True, counts_consumers=True)


async def worker_on(broker: Durable, app: App) -> Worker:
    worker = Worker(app, broker, QUICK.worker, SystemClock())
    await broker.start()
    await worker.start()
    return worker


async def test_what_a_lost_broker_took_is_sent_again_over_the_next_under_the_same_identity() -> None:
    first, second, told, journal = Durable("first"), Durable("second"), Told(), Journal()
    both = FailoverBroker([first, second])
    async with Harness(settings=QUICK, broker=both, telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a", "executador_b"], "payload": {}})
        await until(lambda: _sent_by(oraculo, run_id, ["first", "first"]), saying="both to be sent by the first")
        await oraculo.publish("resultados", answer(run_id, tarefa="executador_b", tipo_evento="resultado_execucao"))
        await until(lambda: _one_ended(oraculo, run_id), saying="the answer to be taken")
        await first.leave()
        worker = await worker_on(second, recording_app(journal, ("executador_a", "executador_b")))
        aggregate = await oraculo.ended(run_id)
        await until(lambda: told.of(CommandsTakenBack))  # told once all are decided, and the run may be faster
        await worker.stop()
    assert aggregate["status"] == "concluida"
    assert [(context.tarefa, context.tentativa) for context in journal.seen] == [("executador_a", 1)]
    assert told.of(BrokerChanged)[0] == BrokerChanged("first", "pulled out")
    assert told.of(CommandsTakenBack) == [CommandsTakenBack("first", 1)]


async def _one_ended(oraculo: Harness, run_id: str) -> bool:
    return (await oraculo.store.heads([run_id]))[run_id].succeeded == 1


async def _sent_by(oraculo: Harness, run_id: str, brokers: list[str]) -> bool:
    snapshot = (await oraculo.store.load([run_id]))[run_id]
    return [task.via for task in snapshot.tasks] == brokers


async def test_a_connection_that_breaks_for_a_moment_sends_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GRACE", 30.0)
    first, second, told = Durable("first"), Durable("second"), Told()
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second]), telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: _sent_by(oraculo, run_id, ["first"]))
        await first.leave()
        await until(lambda: told.of(BrokerChanged), saying="the loss to be told")
        first.come_back()
        await until(lambda: len(told.of(BrokerChanged)) == 2, saying="the return to be told")
        assert told.of(CommandsTakenBack) == []
        assert [state.ready for state in await second.queues(["executador_a"])] in ([], [0])


async def test_a_broker_that_came_back_without_its_memory_gets_everything_again() -> None:
    broker = Durable("redis")
    settings = Settings(engine=QUICK.engine, runs=RunSettings(max_attempts=1))
    async with Harness(settings=settings, broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a", "executador_b"], "payload": {}, "timeout": 30})
        failure = answer(
            run_id, tarefa="executador_b", tipo_evento="resultado_execucao", payload={"status": "erro", "erros": ["x"]}
        )
        await oraculo.publish("resultados", failure)
        await until(lambda: oraculo.operations.dead_letters("executador_b", limit=1))
        await until(lambda: _sent_by(oraculo, run_id, ["redis", "redis"]))
        assert broker._depot is not None
        for queue in ("executador_a", "executador_b.dlq"):
            broker._depot.queues.pop(queue)
        broker.losses += 1
        await until(lambda: oraculo.operations.dead_letters("executador_b", limit=1), saying="the dead letter again")
        await until(lambda: broker.queues(["executador_a"]), saying="the command again")
        await until(lambda: not oraculo.engine._links._losses, saying="the last look")
        [lost, failed] = await broker.queues(["executador_a", "executador_b"])
        assert lost.ready == 1
        assert failed.dead_letters >= 1  # nobody knows when it was sent, so each look sends it


class Halting(SqliteStore):
    """Cannot say at first which dead letters a broker had."""

    failures = 5

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        if dead_letters and self.failures:
            self.failures -= 1
            raise StoreUnavailable("the disk is away")
        return await super().held_by(via, limit, after, dead_letters=dead_letters)


async def test_a_loss_is_counted_once_though_the_store_fails_while_it_is_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_PAUSE_AFTER_FAILURE", 0.05)
    broker, store = Durable("redis"), Halting(MEMORY)
    async with Harness(settings=QUICK, broker=broker, store=store) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}, "timeout": 30})
        await until(lambda: _sent_by(oraculo, run_id, ["redis"]))
        broker.losses += 1
        await until(lambda: not store.failures and not oraculo.engine._links._losses, saying="the last look")
        [state] = await broker.queues(["executador_a"])
        assert state.ready == 2  # as it was, and once again


class AdjustableClock(SystemClock):
    skew = 0.0

    def now(self) -> float:
        return super().now() + self.skew


async def test_what_was_sent_before_the_clock_was_set_back_is_not_forgotten_with_a_memory() -> None:
    broker, clock = Durable("redis"), AdjustableClock()
    async with Harness(settings=QUICK, broker=broker, clock=clock) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}, "timeout": 3600})
        await until(lambda: _sent_by(oraculo, run_id, ["redis"]))
        clock.skew = -600.0
        assert broker._depot is not None
        broker._depot.queues.pop("executador_a")
        broker.losses += 1
        await until(lambda: broker.queues(["executador_a"]), saying="the command again")


async def test_what_went_to_a_broker_that_is_no_longer_configured_is_sent_again(tmp_path: Path) -> None:
    path, journal = str(tmp_path / "x.db"), Journal()
    async with Harness(settings=QUICK, broker=Durable("nats"), store=SqliteStore(path)) as before:
        run_id = await before.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: _sent_by(before, run_id, ["nats"]))
    app = recording_app(journal, ("executador_a",))
    async with Harness(app, settings=QUICK, broker=Durable("rabbitmq"), store=SqliteStore(path)) as after:
        assert (await after.ended(run_id))["status"] == "concluida"
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT via FROM tasks").fetchall() == [("rabbitmq",)]


async def test_what_an_engine_sent_over_a_broker_that_only_it_knew_is_sent_again_once_it_has_gone(
    tmp_path: Path,
) -> None:
    path, journal = str(tmp_path / "x.db"), Journal()
    app, rabbitmq = recording_app(journal, ("executador_a",)), Durable("rabbitmq")
    async with Harness(app, settings=QUICK, broker=rabbitmq, store=SqliteStore(path)) as after:
        async with Harness(settings=QUICK, broker=Durable("nats"), store=SqliteStore(path)) as before:
            await until(lambda: len(after.engine.peers.engines) == 2, saying="the engines to know each other")
            run_id = await before.submit({"destinos": ["executador_a"], "payload": {}})
            await until(lambda: _sent_by(before, run_id, ["nats"]))
            assert not journal.seen
        assert (await after.ended(run_id))["status"] == "concluida"


class Split:
    """All that a watch asks for, in a world where another engine reaches the broker `first` and sends a run there again
    whenever this one has taken it back."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.departures = 0

    def links(self) -> Sequence[Link]:
        return [Link("first", "away", 0), Link("second", None, 0)]

    async def held_by(self, via: str, limit: int, after: str, *, dead_letters: bool) -> Sequence[str]:
        return [] if after else ["run"]

    async def brokers_in_use(self) -> Sequence[str]:
        return ["first", "second"]

    def put(self, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            self.taken.append(wish.run_id)
            wish.done.set_result(Verdict.APPLIED)


async def test_engines_that_miss_different_brokers_do_not_send_the_same_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "GRACE", 2.0)
    split: Any = Split()
    watch = links.LinkWatch(split, split, split, split, SystemClock(), Told(), poll=0.5)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    for half_seconds in range(7200):
        monkeypatch.setattr(loop, "time", lambda now=begin + half_seconds / 2: now)
        await watch.look()
    assert 4 <= len(split.taken) <= 8
    split.taken.clear()
    await watch._take_back_from_strangers()  # as when an engine has gone
    monkeypatch.setattr(loop, "time", lambda: begin + 3630)
    await watch.look()
    assert split.taken == ["run"]


async def test_a_reply_goes_by_the_broker_that_brought_the_request_and_while_that_is_away_by_another() -> None:
    first, second = Durable("first"), Durable("second")
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second])) as oraculo:
        await second.publish([Outgoing("orquestrador", request_for_replies("one"))])
        await until(lambda: second.queues(["minhas-respostas"]), saying="the reply on the second")
        await second.publish([Outgoing("orquestrador", request_for_replies("two", timeout=0.5))])
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
        await first.publish([Outgoing("executador_a", b"1", reason="why")])
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


async def is_ready(oraculo: Harness) -> bool:
    return (await oraculo.operations.health()).is_ready


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
        await broker.publish([Outgoing("resultados", b"{bad %d" % n) for n in range(300)])
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
        await broker.publish([Outgoing("executador_a", b"%d" % n, reason="failed") for n in range(1000)])
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


async def test_a_deaf_consumer_turns_readiness_red() -> None:
    class Deaf(Durable):
        def links(self) -> Sequence[Link]:
            return [Link("rabbitmq", None, 0, ("resultados",))]

    async with Harness(settings=QUICK, broker=Deaf("rabbitmq")) as oraculo:
        health = await oraculo.operations.health()
        assert not health.is_ready
        assert "heard nothing on resultados" in (health.parts["broker rabbitmq"] or "")


async def test_a_note_that_comes_after_the_loss_was_looked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command was confirmed before the memory was lost, and noted only after the first look for such."""
    broker, looked = Durable("redis"), asyncio.Event()
    confirmed, decide = Outbox._confirmed, links.LinkWatch._decide
    late: list[asyncio.Task[None]] = []

    async def note_later(outbox: Outbox, keys: Sequence[Key], via: str, at: float) -> None:
        await looked.wait()
        with monkeypatch.context() as then:
            then.setattr(outbox._clock, "now", lambda: at)
            confirmed(outbox, keys, via)

    def delayed(outbox: Outbox, keys: Sequence[Key], via: str) -> None:
        if looked.is_set():
            confirmed(outbox, keys, via)
        else:
            late.append(asyncio.create_task(note_later(outbox, keys, via, outbox._clock.now())))

    async def look(watch: links.LinkWatch, event: BrokerLost, *absence: Any) -> int:
        found = await decide(watch, event, *absence)
        looked.set()
        return found

    monkeypatch.setattr(Outbox, "_confirmed", delayed)
    monkeypatch.setattr(links.LinkWatch, "_decide", look)
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}, "timeout": 30})
        await until(lambda: late, saying="the command to be confirmed")
        assert broker._depot is not None
        broker._depot.queues.pop("executador_a")
        broker.losses += 1
        [state] = await until(lambda: broker.queues(["executador_a"]), saying="the command again")
        assert state.ready == 1
        await until(lambda: _sent_by(oraculo, run_id, ["redis"]))


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

        async def is_ready() -> bool:
            return (await oraculo.operations.health()).is_ready

        await until(is_ready, saying="readiness")


class DurableUnreadable(Unreadable, Durable):
    pass


async def test_what_cannot_be_read_is_told_with_the_reason_by_readiness_and_by_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer can be made each time, and fails as soon as it is asked."""
    monkeypatch.setattr(service, "_PAUSE_AFTER_FAILURE", 0.02)
    broker = DurableUnreadable("redis")
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: _sent_by(oraculo, run_id, ["redis"]))
        told = "nobody reads resultados, orquestrador: a consumer is being made; the last one failed: not permitted"

        async def is_told() -> bool:
            return len(oraculo.engine.own_queues.unread) == 2

        await until(is_told, saying="both to be found out")
        for _ in range(4):
            refusals = broker.refusals
            await until(lambda: broker.refusals >= refusals + 2, saying="the next to fail")  # noqa: B023
            health = await oraculo.operations.health()
            assert not health.is_ready
            assert health.parts["consumers"] == told
            assert "queue resultados cannot be used (not permitted)" in await oraculo.operations.explain(run_id)
        await oraculo.publish("resultados", answer(run_id, tipo_evento="resultado_execucao"))
        broker.forbidden = None
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        await until(lambda: is_ready(oraculo), saying="readiness, though no request comes")
        assert "cannot be used" not in await oraculo.operations.explain(run_id)


class HalfRead(Durable):
    """Of which one queue cannot be read."""

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        consumer = await super().consume(queue, prefetch=prefetch)
        if queue == "orquestrador":
            consumer.take = _refuse  # type: ignore[method-assign]
        return consumer


async def _refuse(limit: int) -> Sequence[Delivery]:
    raise BrokerError("not permitted")


async def test_where_the_only_other_is_not_read_well_it_still_gets_what_a_lost_broker_took() -> None:
    first, second = Durable("first"), HalfRead("second")
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second])) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: _sent_by(oraculo, run_id, ["first"]))
        await until(lambda: oraculo.broker.links()[1].unread, saying="it to be found out")
        await first.leave()
        await until(lambda: _sent_by(oraculo, run_id, ["second"]), saying="the command over the second")


async def test_a_broker_that_does_not_let_the_engine_subscribe_ends_the_start() -> None:
    class Unsubscribable(Durable, Refusing):
        async def declare(self, queues: Sequence[str]) -> None: ...

    broker = Unsubscribable("rabbitmq")
    broker.refused = frozenset({"resultados"})
    oraculo = Harness(settings=QUICK, broker=broker)
    with pytest.raises(BrokerError, match="not allowed"):
        await oraculo.engine.start()
    await oraculo.engine.stop()


async def test_what_a_broker_took_before_it_was_known_that_it_cannot_be_read_is_sent_again_over_the_next() -> None:
    first, second, journal = DurableUnreadable("first"), Durable("second"), Journal()
    first.forbidden = None
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second])) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: _sent_by(oraculo, run_id, ["first"]))
        first.forbidden = "not permitted"
        await first.lose_consumers()
        await until(lambda: _sent_by(oraculo, run_id, ["second"]), saying="the command on the second")
        assert "queue resultados of first cannot be used (not permitted)" in await oraculo.operations.explain(run_id)
        told = (await oraculo.operations.health()).parts["broker first"] or ""
        assert told.endswith(": the consumer is being made again; the last one failed: not permitted")
        worker = await worker_on(second, recording_app(journal, ("executador_a",)))
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        await worker.stop()


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


async def test_one_that_keeps_nothing_and_was_away_at_the_start_gets_its_commands_again(tmp_path: Path) -> None:
    class Forgetful(Durable):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(durable=False, shared=True, priorities=True, counts_consumers=True)

    path = str(tmp_path / "x.db")
    async with Harness(settings=QUICK, broker=Forgetful("redis"), store=SqliteStore(path)) as before:
        run_id = await before.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: _sent_by(before, run_id, ["redis"]))
    broker = Forgetful("redis")
    broker.away = "still booting"
    app = recording_app(Journal(), ("executador_a",))
    async with Harness(app, settings=QUICK, broker=broker, store=SqliteStore(path)) as after:
        broker.come_back()
        assert (await after.ended(run_id))["status"] == "concluida"
