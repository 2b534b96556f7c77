"""What the engine does about a broker that is lost, or came back without its memory: what it took is sent again."""

import asyncio
import sqlite3
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.core.events import BrokerLost
from oraculo.core.machine import Verdict
from oraculo.engine import service
from oraculo.engine.cluster import broker_watch
from oraculo.engine.inbox import Wish
from oraculo.engine.send.outbox import Outbox
from oraculo.engine.send.publisher import Key
from oraculo.errors import BrokerError, MessageTooLarge, StoreUnavailable
from oraculo.ports.broker import BrokerStatus, Delivery, Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import BrokerChanged, CommandsTakenBack
from oraculo.settings import RunSettings, Settings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from tests.engine import broker_stage as stage
from tests.engine.broker_stage import QUICK, Durable, DurableUnreadable, Told, forget, sent_by, worker_on
from tests.engine.workers import Journal, answer, recording_app
from tests.waiting import until

impatient = stage.impatient  # a fixture


async def test_what_a_lost_broker_took_is_sent_again_over_the_next_under_the_same_identity() -> None:
    first, second, told, journal = Durable("first"), Durable("second"), Told(), Journal()
    both = FailoverBroker([first, second])
    async with Harness(settings=QUICK, broker=both, telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a", "executador_b"], "payload": {}})
        await until(lambda: sent_by(oraculo, run_id, ["first", "first"]), saying="both to be sent by the first")
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


async def test_a_connection_that_breaks_for_a_moment_sends_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_watch, "GRACE", 30.0)
    first, second, told = Durable("first"), Durable("second"), Told()
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second]), telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(oraculo, run_id, ["first"]))
        await first.leave()
        await until(lambda: told.of(BrokerChanged), saying="the loss to be told")
        first.come_back()
        await until(lambda: len(told.of(BrokerChanged)) == 2, saying="the return to be told")
        assert told.of(CommandsTakenBack) == []
        assert [state.ready for state in await second.queues(["executador_a"])] in ([], [0])


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
        await until(lambda: sent_by(oraculo, run_id, ["first"]))
        await until(lambda: oraculo.broker.statuses()[1].unread, saying="it to be found out")
        await first.leave()
        await until(lambda: sent_by(oraculo, run_id, ["second"]), saying="the command over the second")


async def test_what_a_broker_took_before_it_was_known_that_it_cannot_be_read_is_sent_again_over_the_next() -> None:
    first, second, journal = DurableUnreadable("first"), Durable("second"), Journal()
    first.forbidden = None
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second])) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(oraculo, run_id, ["first"]))
        first.forbidden = "not permitted"
        await first.lose_consumers()
        await until(lambda: sent_by(oraculo, run_id, ["second"]), saying="the command on the second")
        assert (
            "ORÁCULO itself hears nothing on queue resultados now (of first: not permitted)"
            in await oraculo.operations.explain(run_id)
        )
        told = (await oraculo.operations.health()).parts["broker first"] or ""
        assert told.endswith(": the consumer is being made again; the last one failed: not permitted")
        worker = await worker_on(second, recording_app(journal, ("executador_a",)))
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        await worker.stop()


async def test_what_went_to_a_broker_that_is_no_longer_configured_is_sent_again(tmp_path: Path) -> None:
    path, journal = str(tmp_path / "x.db"), Journal()
    async with Harness(settings=QUICK, broker=Durable("nats"), store=SqliteStore(path)) as before:
        run_id = await before.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(before, run_id, ["nats"]))
    app = recording_app(journal, ("executador_a",))
    async with Harness(app, settings=QUICK, broker=Durable("rabbitmq"), store=SqliteStore(path)) as after:
        assert (await after.ended(run_id))["status"] == "concluida"
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT via FROM tasks").fetchall() == [("rabbitmq",)]


class Narrow(Durable):
    """Takes no command."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if any(message.queue == "executador_a" for message in messages):
            raise MessageTooLarge("9 bytes are more than 8", 9, 8)
        return await super().publish(messages)


async def test_what_was_taken_back_and_is_too_large_for_the_broker_that_is_left_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "x.db")
    async with Harness(settings=QUICK, broker=Durable("rabbitmq"), store=SqliteStore(path)) as before:
        run_id = await before.submit({"destinos": ["executador_a"], "payload": {}})
        await until(lambda: sent_by(before, run_id, ["rabbitmq"]))
    told = "; queue executador_a does not take the command (its command is too large for nats: 9 bytes are more than 8;"
    async with Harness(settings=QUICK, broker=Narrow("nats"), store=SqliteStore(path)) as after:

        async def is_told() -> bool:
            return told in await after.operations.explain(run_id)

        await until(is_told, saying="the refusal")
        await after.publish("resultados", answer(run_id, tipo_evento="resultado_execucao"))  # rabbitmq's worker had it
        assert (await after.ended(run_id))["status"] == "concluida"


async def test_what_an_engine_sent_over_a_broker_that_only_it_knew_is_sent_again_once_it_has_gone(
    tmp_path: Path,
) -> None:
    path, journal = str(tmp_path / "x.db"), Journal()
    app, rabbitmq = recording_app(journal, ("executador_a",)), Durable("rabbitmq")
    async with Harness(app, settings=QUICK, broker=rabbitmq, store=SqliteStore(path)) as after:
        async with Harness(settings=QUICK, broker=Durable("nats"), store=SqliteStore(path)) as before:
            await until(lambda: len(after.engine.parts.peers.engines) == 2, saying="the engines to know each other")
            run_id = await before.submit({"destinos": ["executador_a"], "payload": {}})
            await until(lambda: sent_by(before, run_id, ["nats"]))
            assert not journal.seen
        assert (await after.ended(run_id))["status"] == "concluida"


class Split:
    """All that a watch asks for, in a world where another engine reaches the broker `first` and sends a run there again
    whenever this one has taken it back."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.departures = 0
        self.is_engine = True

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus("first", "away"), BrokerStatus("second", None)]

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
    monkeypatch.setattr(broker_watch, "GRACE", 2.0)
    split: Any = Split()
    watch = broker_watch.BrokerWatch(split, split, split, split, SystemClock(), Told(), poll=0.5)
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


class Stuck(Split):
    """With two pages of runs, of which the first cannot be decided for a while: to send its commands again, or its dead
    letters."""

    def __init__(self, *, letters: bool, well: int, undecided: int) -> None:
        super().__init__()
        self._letters = letters
        self._fails = chain(repeat(False, well), repeat(True, undecided))
        self.asks_for_letters = False

    async def held_by(self, via: str, limit: int, after: str, *, dead_letters: bool) -> Sequence[str]:
        return {"": ["a"], "a": ["b"]}.get(after, [])

    def put(self, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            assert isinstance(wish.event, BrokerLost)
            self.asks_for_letters |= wish.event.dead_letters
            if wish.run_id == "a" and wish.event.dead_letters is self._letters and next(self._fails, False):
                wish.done.set_exception(StoreUnavailable("it refuses whatever it is given"))
            else:
                super().put([wish])


@pytest.mark.parametrize(
    ("letters", "well", "asked_for_letters"),
    [
        (False, 0, [False] * 7 + [True]),
        (False, 2, [False] * 2 + [True] * 6),
        (True, 0, [False] * 2 + [True] * 6),
    ],
    ids=["the first looks", "the last look", "its dead letters"],
)
async def test_a_loss_is_looked_after_until_its_runs_could_be_decided(
    letters: bool, well: int, asked_for_letters: Sequence[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks are to be decided, and only the last of them is for dead letters too."""
    monkeypatch.setattr(broker_watch, "GRACE", 0.0)
    stuck: Any = Stuck(letters=letters, well=well, undecided=5)
    watch = broker_watch.BrokerWatch(stuck, stuck, stuck, stuck, SystemClock(), Told(), poll=0.5)
    watch.note_loss("second")
    asked: list[bool] = []
    while not watch.has_taken_back("second") and len(asked) < 20:
        stuck.asks_for_letters = False
        await watch._look_after_loss("second")
        asked.append(stuck.asks_for_letters)
    assert asked == asked_for_letters


class BothAway(Split):
    second: str | None = "away"

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus("first", "away"), BrokerStatus("second", self.second)]


async def test_what_a_broker_took_is_not_taken_back_while_no_other_could_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_watch, "GRACE", 0.0)
    world: Any = BothAway()
    watch = broker_watch.BrokerWatch(world, world, world, world, SystemClock(), Told(), poll=0.5)
    for _ in range(5):
        await watch.look()
    assert world.taken == []
    world.second = None
    await watch.look()
    assert world.taken == ["run"]


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
        await until(lambda: sent_by(oraculo, run_id, ["redis", "redis"]))
        forget(broker, "executador_a", "executador_b.dlq")
        await until(lambda: oraculo.operations.dead_letters("executador_b", limit=1), saying="the dead letter again")
        await until(lambda: broker.queues(["executador_a"]), saying="the command again")
        await until(lambda: not oraculo.engine.parts.broker_watch._losses, saying="the last look")
        [lost, failed] = await broker.queues(["executador_a", "executador_b"])
        assert lost.ready == 1
        assert failed.dead_letters == 1


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
        await until(lambda: sent_by(oraculo, run_id, ["redis"]))
        forget(broker)
        await until(lambda: oraculo.engine.parts.broker_watch._losses, saying="that it is noticed")
        await until(
            lambda: not store.failures and not oraculo.engine.parts.broker_watch._losses, saying="the last look"
        )
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
        await until(lambda: sent_by(oraculo, run_id, ["redis"]))
        clock.skew = -600.0
        forget(broker, "executador_a")
        await until(lambda: broker.queues(["executador_a"]), saying="the command again")


def set_once_looked_for(event: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first look for what a broker had taken."""
    decide = broker_watch.BrokerWatch._decide

    async def look(watch: broker_watch.BrokerWatch, lost: BrokerLost, *absence: Any) -> Any:
        found = await decide(watch, lost, *absence)
        event.set()
        return found

    monkeypatch.setattr(broker_watch.BrokerWatch, "_decide", look)


async def expect_sent_again_when_lost(oraculo: Harness, broker: Durable, run_id: str) -> None:
    forget(broker, "executador_a")
    [state] = await until(lambda: broker.queues(["executador_a"]), saying="the command again")
    assert state.ready == 1
    await until(lambda: sent_by(oraculo, run_id, ["redis"]))


class Tardy(Durable):
    """Its first confirm of a command is read only when it is let through."""

    def __init__(self) -> None:
        super().__init__("redis")
        self.has_command, self.is_read = asyncio.Event(), asyncio.Event()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        taken = await super().publish(messages)
        if any(message.queue == "executador_a" for message in messages) and not self.has_command.is_set():
            self.has_command.set()
            await self.is_read.wait()
        return taken


async def test_what_was_taken_before_the_loss_is_sent_again_though_its_confirm_was_read_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Tardy()
    set_once_looked_for(broker.is_read, monkeypatch)
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}, "timeout": 30})
        await asyncio.wait_for(broker.has_command.wait(), 10)
        await expect_sent_again_when_lost(oraculo, broker, run_id)


async def test_a_note_that_comes_after_the_loss_was_looked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command was confirmed before the memory was lost, and noted only after the first look for such."""
    broker, looked, confirmed = Durable("redis"), asyncio.Event(), Outbox.confirmed
    late: list[asyncio.Task[None]] = []

    async def note_later(outbox: Outbox, keys: Sequence[Key], vias: Sequence[str], started: float) -> None:
        await looked.wait()
        confirmed(outbox, keys, vias, started)

    def delayed(outbox: Outbox, keys: Sequence[Key], vias: Sequence[str], started: float) -> None:
        if looked.is_set():
            confirmed(outbox, keys, vias, started)
        else:
            late.append(asyncio.create_task(note_later(outbox, keys, vias, started)))

    monkeypatch.setattr(Outbox, "confirmed", delayed)
    set_once_looked_for(looked, monkeypatch)
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_a"], "payload": {}, "timeout": 30})
        await until(lambda: late, saying="the command to be confirmed")
        await expect_sent_again_when_lost(oraculo, broker, run_id)
