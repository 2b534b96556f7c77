"""Restarts and faults: the store is the truth, and everything accepted ends."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.core.run import Changes
from oraculo.engine import consumers, service
from oraculo.engine.decide import intake
from oraculo.errors import BrokerUnavailable, StoreRefuses, StoreUnavailable
from oraculo.ports.broker import Consumer, Delivery, Outgoing, Receipt, publish_all
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Committed, Creation
from oraculo.ports.telemetry import LoopFailed, Record, StoreBack
from oraculo.settings import BrokerSettings, EngineSettings, RunSettings, Settings, StoreSettings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from tests.engine.broker_stage import Told
from tests.engine.workers import Journal, answer, failing_app, recording_app
from tests.stores.sqlite_stage import damage, root_page
from tests.waiting import until

QUICK = Settings(engine=EngineSettings(poll=0.05, note_linger=0.005), runs=RunSettings(backoff=0.01))


def store_at(folder: Path) -> SqliteStore:
    return SqliteStore(str(folder / "oraculo.db"))


async def test_open_runs_go_on_after_a_restart(tmp_path: Path) -> None:
    async with Harness(store=store_at(tmp_path)) as before:
        fan_out = await before.submit({"destinos": ["escavador_a", "escavador_b"]})
        pipeline = await before.submit({"pipeline": "coleta-execucao"})
    journal = Journal()
    app = recording_app(
        journal,
        ("escavador_a", "escavador_b", "escavador_youtube", "escavador_blog", "executador_relatorio"),
    )
    async with Harness(app, store=store_at(tmp_path)) as after:
        for run_id in (fan_out, pipeline):
            assert (await after.ended(run_id))["status"] == "concluida"
    assert {context.tentativa for context in journal.seen} == {1}


async def test_deadlines_that_passed_while_it_was_down_ring_at_the_start(tmp_path: Path) -> None:
    async with Harness(store=store_at(tmp_path)) as before:
        run_id = await before.submit({"destinos": ["escavador_a"], "timeout": 0.05})
    async with Harness(store=store_at(tmp_path)) as after:
        assert (await after.ended(run_id))["status"] == "timeout"


class DistantBroker(MemoryBroker):
    async def consume(self, queue: str, *, prefetch: int) -> Consumer:
        await asyncio.sleep(0.3)
        return await super().consume(queue, prefetch=prefetch)


async def test_answers_that_came_while_it_was_down_are_heard_before_deadlines_that_passed(tmp_path: Path) -> None:
    async with Harness(store=store_at(tmp_path)) as before:
        run_id = await before.submit({"destinos": ["escavador_a", "escavador_b"], "timeout": 1.0})
        deadline = (await before.operations.run(run_id)).head.deadline
    await until(lambda: SystemClock().now() > deadline, saying="its deadline")
    broker = DistantBroker(SystemClock())
    await broker.start()
    await broker.declare(["resultados"])
    answers = [answer(run_id, tarefa=task) for task in ("escavador_a", "escavador_b")]
    await publish_all(broker, [Outgoing("resultados", msgspec.json.encode(each)) for each in answers])
    async with Harness(store=store_at(tmp_path), broker=broker) as after:
        assert (await after.ended(run_id))["status"] == "concluida"


async def test_answers_that_do_not_get_fewer_keep_no_deadline_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "HEARD_WITHIN", 0.5)

    class Unread(MemoryBroker):
        async def consume(self, queue: str, *, prefetch: int) -> Consumer:
            raise BrokerUnavailable("not now")

    async with Harness(store=store_at(tmp_path)) as before:
        run_id = await before.submit({"destinos": ["escavador_a"], "timeout": 0.1})
        deadline = (await before.operations.run(run_id)).head.deadline
    await until(lambda: SystemClock().now() > deadline, saying="its deadline")
    broker = Unread(SystemClock())
    await broker.start()
    await broker.declare(["resultados"])
    await publish_all(broker, [Outgoing("resultados", msgspec.json.encode(answer(run_id)))])
    async with Harness(store=store_at(tmp_path), broker=broker) as after:
        assert (await after.ended(run_id))["status"] == "timeout"


async def test_dead_letters_are_there_again_after_the_memory_broker_lost_them(tmp_path: Path) -> None:
    app = failing_app("executador_x", failures=None)
    async with Harness(app, store=store_at(tmp_path), settings=QUICK) as before:
        run_id = await before.submit({"destinos": ["executador_x"]})
        await before.ended(run_id)
    mended = failing_app("executador_x", failures=0)
    async with Harness(mended, store=store_at(tmp_path), settings=QUICK) as after:
        (letter,) = await until(lambda: after.broker.dead_letters("executador_x", limit=10))
        assert "broken at attempt 3" in letter.reason
        assert (await after.operations.redrive("executador_x", [letter.id])).reopened == 1
        assert (await after.ended(run_id))["status"] == "concluida"


async def test_a_discarded_dead_letter_does_not_come_back(tmp_path: Path) -> None:
    app = failing_app("executador_x", failures=None)
    async with Harness(app, store=store_at(tmp_path), settings=QUICK) as before:
        run_id = await before.submit({"destinos": ["executador_x"]})
        await before.ended(run_id)
        (letter,) = await until(lambda: before.operations.dead_letters("executador_x"))
        await before.operations.discard("executador_x", letter.id)
        assert "carta_morta_descartada" in [entry.what for entry in await before.operations.history(run_id)]
    async with Harness(store=store_at(tmp_path), settings=QUICK) as after:
        await after.run({"destinos": ["escavador_ninguem"], "timeout": 0.2})  # the first sweep is over by then
        assert not await after.broker.dead_letters("executador_x", limit=10)


class FlakyStore(SqliteStore):
    """Fails the first commits that it is asked for, before or after writing them."""

    def __init__(self, path: str, before: int = 0, after: int = 0) -> None:
        super().__init__(path)
        self.before, self.after = before, after

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        if self.before:
            self.before -= 1
            raise StoreUnavailable("the disk is away")
        committed = await super().commit(creations, changes)
        if changes and self.after:
            self.after -= 1
            raise StoreUnavailable("the disk went away before it could answer")
        return committed


@pytest.mark.parametrize("call", ["attend", "commit"])
async def test_a_store_that_is_back_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whether an idle engine missed it or one that had something to write."""
    monkeypatch.setattr(service, "_PAUSE_AFTER_FAILURE", 0.02)
    store, told = SqliteStore(str(tmp_path / "o.db")), Told()
    works = getattr(store, call)

    async def is_away(*_given: object) -> None:
        raise StoreUnavailable("the disk is away")

    async with Harness(settings=QUICK, store=store, telemetry=told) as oraculo:
        monkeypatch.setattr(store, call, is_away)
        submitting = asyncio.create_task(oraculo.submit({"destinos": ["executador_x"], "payload": {}}))
        await until(lambda: told.of(LoopFailed), saying="the absence to be told")
        if call == "commit":
            await until(lambda: oraculo.engine.parts.peers._is_store_away, saying="the absence to be noticed")
        assert told.of(StoreBack) == []
        monkeypatch.setattr(store, call, works)
        await until(lambda: told.of(StoreBack), saying="the return to be told")
        await submitting
        assert told.of(StoreBack) == [StoreBack("sqlite")]


async def test_a_store_that_is_away_is_waited_for(tmp_path: Path) -> None:
    store = FlakyStore(str(tmp_path / "o.db"), before=3)
    journal = Journal()
    async with Harness(recording_app(journal, ("escavador_a",)), store=store) as oraculo:
        store.before = 3
        assert (await oraculo.run({"destinos": ["escavador_a"]}))["status"] == "concluida"
    assert len(journal.seen) == 1


class Lost(SqliteStore):
    """Another was faster with one run, and then the store is away for a moment."""

    contested: str | None = None
    commits = 0

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        others = [change for change in changes if change.run.id != self.contested]
        if len(others) == len(changes) or self.commits > 1:
            return await super().commit(creations, changes)
        self.commits += 1
        if self.commits > 1:
            raise StoreUnavailable("the disk is away")
        committed = await super().commit(creations, others)
        return Committed(committed.created, committed.conflicts | {str(self.contested)})


async def test_what_is_committed_is_not_decided_again_because_of_what_is_not(tmp_path: Path) -> None:
    """Two runs in one batch: a late answer for one, and an answer for another that cannot be committed at first."""
    store = Lost(str(tmp_path / "o.db"))
    async with Harness(store=store) as oraculo:
        late, contested = [await oraculo.submit({"destinos": ["executador_x"]}) for _ in range(2)]
        await oraculo.operations.cancel(late)
        await oraculo.engine.parts.intake.drained()
        store.contested = contested
        bodies = [answer(run_id, tipo_evento="resultado_execucao") for run_id in (late, contested)]
        await publish_all(oraculo.broker, [Outgoing("resultados", msgspec.json.encode(body)) for body in bodies])
        await oraculo.ended(contested)
        assert store.commits == 2
        assert (await store.heads([late]))[late].late == 1


async def test_a_commit_whose_answer_was_lost_is_not_counted_twice(tmp_path: Path) -> None:
    store = FlakyStore(str(tmp_path / "o.db"), after=2)
    async with Harness(recording_app(Journal(), ("escavador_a", "escavador_b")), store=store) as oraculo:
        aggregate = await oraculo.run({"destinos": ["escavador_a", "escavador_b"]})
        assert aggregate["status"] == "concluida"
        assert aggregate["versao"] == 1


class FullStore(SqliteStore):
    """While it is full it writes nothing, though its check says that it is well: there is room for one mark."""

    is_full = False
    refusals = 0

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        if self.is_full:
            self.refusals += 1
            raise StoreRefuses("the disk is full")
        return await super().commit(creations, changes)


async def test_a_store_that_refuses_everything_is_waited_for_and_no_message_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(intake, pause, 0.02)
    store, broker = FullStore(str(tmp_path / "o.db")), MemoryBroker(SystemClock(), delivery_limit=1)
    async with Harness(store=store, broker=broker) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        await until(lambda: broker.queues(["escavador_a"]))
        store.is_full = True
        await oraculo.publish("resultados", answer(run_id))
        await until(lambda: store.refusals)
        troubles: set[str | None] = set()

        def is_refused_for_long() -> bool:
            troubles.add(oraculo.engine.parts.intake.trouble)
            return store.refusals > 20  # many more than it takes to give one input back

        await until(is_refused_for_long)
        assert troubles == {"waits for the store: the disk is full"}
        why = "nothing is decided now (waits for the store: the disk is full)"
        assert why in await oraculo.operations.explain(run_id)
        store.is_full = False
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        assert oraculo.engine.parts.intake.trouble is None
        assert (await broker.queues(["resultados"]))[0].dead_letters == 0


async def test_no_answer_is_blamed_for_a_file_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(intake, pause, 0.02)
    path, told, broker = str(tmp_path / "o.db"), Told(), MemoryBroker(SystemClock(), delivery_limit=1)
    settings = Settings(engine=EngineSettings(stop_grace=0.1))
    async with Harness(store=SqliteStore(path), broker=broker, settings=settings, telemetry=told) as oraculo:
        runs = [await oraculo.submit({"destinos": ["escavador_a"]}) for _ in range(5)]
        await until(lambda: not oraculo.engine.parts.outbox._in_flight, saying="the last note")
        damage(path, root_page(path, "tasks"))
        for run_id in runs:
            await oraculo.publish("resultados", answer(run_id))

        async def are_refused_for_long() -> bool:
            assert (await broker.queues(["resultados"]))[0].dead_letters == 0
            refusals = [one for one in told.records if isinstance(one, LoopFailed) and one.duty == "intake"]
            return len(refusals) > 50  # many more than it takes to give each back

        await until(are_refused_for_long)
        health = await oraculo.operations.health()
        assert not health.is_ready
        assert "waits for the store: SQLite file" in (health.parts["engine"] or "")
        assert "malformed" in (health.parts["engine"] or "")


async def test_an_engine_stops_while_it_waits_for_a_store_that_refuses(tmp_path: Path) -> None:
    store = FullStore(str(tmp_path / "o.db"))
    async with Harness(store=store, settings=Settings(engine=EngineSettings(stop_grace=0.1))) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        store.is_full = True
        await oraculo.publish("resultados", answer(run_id))
        await until(lambda: store.refusals > 1)
        await asyncio.wait_for(oraculo.engine.stop(), 5)


class FlakyBroker(MemoryBroker):
    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.refusals = 0
        self.published: list[Outgoing] = []

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if self.refusals and messages[0].queue != "resultados":
            self.refusals -= 1
            raise BrokerUnavailable("nobody home")
        link = await super().publish(messages)
        self.published += messages
        return link


async def test_a_broker_that_refuses_is_tried_again_under_the_same_identity() -> None:
    broker = FlakyBroker()
    journal = Journal()
    async with Harness(recording_app(journal, ("escavador_a",)), broker=broker) as oraculo:
        broker.refusals = 2
        assert (await oraculo.run({"destinos": ["escavador_a"]}))["status"] == "concluida"
    assert [context.tentativa for context in journal.seen] == [1]


async def test_what_the_broker_never_takes_says_so_at_its_deadline() -> None:
    broker = FlakyBroker()
    async with Harness(broker=broker) as oraculo:
        broker.refusals = 10_000
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "timeout": 0.3})
        assert "not yet confirmed by the broker" in await oraculo.operations.explain(run_id)
        aggregate = await oraculo.ended(run_id)
        broker.refusals = 0
    assert aggregate["falhas"]["escavador_a"]["motivo"].startswith("not sent in 0.3 s")


async def test_a_command_that_was_never_noted_is_found_and_sent_again(tmp_path: Path) -> None:
    """The engine dies between commit and publish: the commit alone must be enough."""
    store = store_at(tmp_path)
    broker = FlakyBroker()
    broker.refusals = 10_000
    dying = Harness(store=store, broker=broker)
    await dying.engine.start()
    run_id = await dying.submit({"destinos": ["escavador_a"]})
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # kill -9, as near as one process can come to it
    await asyncio.sleep(0)
    await store.close()
    async with Harness(recording_app(Journal(), ("escavador_a",)), store=store_at(tmp_path)) as after:
        assert (await after.ended(run_id))["status"] == "concluida"


async def test_two_engines_on_one_store_end_every_run_once(tmp_path: Path) -> None:
    """Each takes half of the answers; versions tell who was first, and the other decides again."""
    conflicts: list[int] = []

    class Counting:
        def emit(self, record: Record) -> None:
            conflicts.append(getattr(record, "conflicts", 0))

    broker = MemoryBroker(clock=SystemClock())
    one = Harness(store=store_at(tmp_path), broker=broker, settings=QUICK, telemetry=Counting())
    two = Harness(store=store_at(tmp_path), broker=broker, settings=QUICK, telemetry=Counting())
    worker = Harness(recording_app(Journal(), ("escavador_a",)), broker=broker).workers[0]
    await one.engine.start()
    await two.engine.start()
    await worker.start()
    request = {"destinos": [{"id": f"t{n}", "fila": "escavador_a"} for n in range(40)]}
    run_ids = await asyncio.gather(*(engine.submit(request) for engine in (one, two) for _ in range(20)))

    async def all_ended() -> bool:
        snapshots = await one.store.load(run_ids)
        return all(snapshot.head.status == "concluida" for snapshot in snapshots.values())

    await until(all_ended, within=60)
    snapshots = await one.store.load(run_ids)
    assert {snapshot.head.edition for snapshot in snapshots.values()} == {1}
    assert {snapshot.head.succeeded for snapshot in snapshots.values()} == {40}
    assert sum(conflicts) > 0, "the engines never met: the test proves nothing"
    for state in await broker.queues(["resultados"]):
        assert state.dead_letters == 0
    await worker.stop()
    await two.engine.stop()
    await one.engine.stop()


async def test_stopping_while_busy_loses_nothing(tmp_path: Path) -> None:
    queues = ("escavador_a", "escavador_b")
    async with Harness(recording_app(Journal(), queues), store=store_at(tmp_path)) as before:
        run_ids = await asyncio.gather(*(before.submit({"destinos": list(queues)}) for _ in range(200)))
    async with Harness(recording_app(Journal(), queues), store=store_at(tmp_path)) as after:
        for run_id in run_ids:
            aggregate = await after.ended(run_id)
            assert (aggregate["status"], aggregate["versao"]) == ("concluida", 1)


async def test_ended_runs_are_deleted_after_their_time(tmp_path: Path) -> None:
    day = Settings(store=StoreSettings(retention_days=1e-9))
    async with Harness(store=store_at(tmp_path)) as before:
        ended = (await before.run({"destinos": ["escavador_a"], "timeout": 0.05}))["correlation_id"]
        open_run = await before.submit({"destinos": ["escavador_a"]})
    async with Harness(store=store_at(tmp_path), settings=day) as after:
        await until(lambda: _gone(after, ended))
        assert await after.store.load([open_run])


async def _gone(oraculo: Harness, run_id: str) -> bool:
    return not await oraculo.store.load([run_id])


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """After which messages are to be tried again, which they are at once."""
    asked: list[float] = []
    retry = MemoryConsumer.retry

    async def at_once(self: MemoryConsumer, delivery: Delivery, delay: float, reason: str) -> None:
        asked.append(delay)
        await retry(self, delivery, 0.0, reason)

    monkeypatch.setattr(MemoryConsumer, "retry", at_once)
    return asked


async def test_a_message_that_breaks_the_engine_is_set_apart(
    monkeypatch: pytest.MonkeyPatch, delays: list[float]
) -> None:
    from oraculo.core import machine

    settings = Settings(engine=EngineSettings(poll=0.05), broker=BrokerSettings(delivery_limit=2))
    async with Harness(settings=settings) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a", "escavador_b"]})
        real = machine.apply

        def broken(run: Any, event: Any, now: float, changes: Any) -> Any:
            if getattr(event, "payload", b"") == b'{"veneno":1}':
                raise ZeroDivisionError("a bug")
            return real(run, event, now, changes)

        monkeypatch.setattr(machine, "apply", broken)
        await oraculo.publish("resultados", answer(run_id, tarefa="escavador_a", payload={"veneno": 1}))
        await oraculo.publish("resultados", answer(run_id, tarefa="escavador_b"))
        (letter,) = await until(lambda: oraculo.operations.dead_letters("resultados"), within=20)
        assert "ZeroDivisionError" in letter.reason
        assert (await oraculo.operations.run(run_id)).head.succeeded == 1
    assert delays == [1, 1]  # time does not mend it, so the pauses do not grow


async def test_a_message_that_is_given_back_slowly_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ may have to make a queue first in which it can wait."""
    is_made, began = asyncio.Event(), asyncio.Event()
    load = SqliteStore.load

    async def odd(store: SqliteStore, run_ids: Sequence[str]) -> Any:
        if "quebra" in run_ids:
            raise ValueError("odd")
        return await load(store, run_ids)

    async def slowly(consumer: MemoryConsumer, delivery: Delivery, delay: float, reason: str) -> None:
        began.set()
        await is_made.wait()
        await consumer.ack([delivery])

    monkeypatch.setattr(SqliteStore, "load", odd)
    monkeypatch.setattr(MemoryConsumer, "retry", slowly)
    async with Harness(store=store_at(tmp_path), settings=QUICK) as oraculo:
        await oraculo.publish("resultados", answer("quebra"))
        await asyncio.wait_for(began.wait(), 10)
        await asyncio.wait_for(oraculo.submit({"destinos": ["escavador_a"]}), 10)
        is_made.set()


async def test_answers_of_a_run_that_a_newer_version_wrote_wait_long_for_it(
    tmp_path: Path, delays: list[float]
) -> None:
    async with Harness(store=store_at(tmp_path), settings=QUICK) as newer:
        unreadable, other = [await newer.submit({"destinos": ["escavador_a"]}) for _ in range(2)]
    with closing(sqlite3.connect(tmp_path / "oraculo.db")) as connection, connection:
        connection.execute("UPDATE runs SET status = 'novo' WHERE id = ?", [unreadable])
    async with Harness(store=store_at(tmp_path), settings=QUICK) as oraculo:
        await oraculo.publish("resultados", answer(unreadable))
        await oraculo.publish("resultados", answer(other))
        (letter,) = await until(lambda: oraculo.operations.dead_letters("resultados"))
        assert (await oraculo.ended(other))["status"] == "concluida"
    assert "as a newer ORÁCULO writes it: run that version" in letter.reason
    assert delays[:8] == [1, 2, 4, 8, 16, 32, 64, 64]
    assert sum(delays[:-1]) > 14 * 60  # the last is refused: it comes to the dead letters instead


@pytest.mark.parametrize("word", ["UPDATE runs SET status = 'novo'", "UPDATE tasks SET cause = 'novo'"])
async def test_whoever_waits_for_a_run_that_a_newer_version_wrote_is_let_go_and_the_others_hear_of_theirs(
    tmp_path: Path, word: str
) -> None:
    async with Harness(store=store_at(tmp_path), settings=QUICK) as oraculo:
        unreadable, other = [await oraculo.submit({"destinos": ["escavador_a"], "timeout": 60}) for _ in range(2)]
        waiting = [asyncio.create_task(oraculo.operations.wait(run_id, 60)) for run_id in (unreadable, other)]
        await until(lambda: len(oraculo.engine.parts.runs.watchers.of_runs_there([unreadable, other])) == 2)
        with closing(sqlite3.connect(tmp_path / "oraculo.db")) as connection, connection:  # as another engine would
            connection.execute("UPDATE runs SET status = 'cancelada', ended_at = 1, version = version + 1")
            connection.execute(f"{word} WHERE n = (SELECT n FROM runs WHERE id = ?)", [unreadable])
        async with asyncio.timeout(10):
            let_go, aggregate = await asyncio.gather(*waiting)
        assert let_go is None
        assert msgspec.json.decode(aggregate or b"")["status"] == "cancelada"
