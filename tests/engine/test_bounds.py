"""What is bounded, what is let go, and what must not stop the rest: a slow store, a slow receiver, a poison timer."""

import asyncio
import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.bootstrap import build
from oraculo.brokers.memory import MemoryBroker
from oraculo.core import machine
from oraculo.core.run import Changes, RunHead
from oraculo.core.webhook_rules import LOOPBACK
from oraculo.engine import dead_letters, inbox, operations
from oraculo.engine.watchers import Lookout
from oraculo.errors import (
    BrokerError,
    BrokerUnavailable,
    QueueDown,
    QueueFull,
    StoreError,
    StoreUnavailable,
)
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Committed, Creation, Snapshot, Store
from oraculo.ports.telemetry import DeadLettered, Record
from oraculo.settings import (
    BrokerSettings,
    EngineSettings,
    RunSettings,
    Settings,
    StoreSettings,
    WebhookSettings,
)
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from tests.engine.workers import Journal, answer, failing_app, recording_app
from tests.receipts import publish_but
from tests.servers.listener import listening
from tests.stores.started import started
from tests.waiting import until


class MoodyStore(SqliteStore):
    """Away while `away` is set; `forgetful` commits are written and said to have failed."""

    away = False
    forgetful = 0

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        if self.away:
            raise StoreUnavailable("the disk is away")
        committed = await super().commit(creations, changes)
        if creations and self.forgetful:
            self.forgetful -= 1
            raise StoreUnavailable("the disk went away before it could answer")
        return committed


async def test_a_request_that_was_refused_for_want_of_a_store_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_PATIENCE", 0.5)  # the engine tries after 0.3 s, and again after 0.7
    store = MoodyStore(MEMORY)
    async with Harness(recording_app(Journal(), ("escavador_a",)), store=store) as oraculo:
        store.away = True
        with pytest.raises(StoreUnavailable, match="not known to be committed"):
            await oraculo.submit({"destinos": ["escavador_a"], "correlation_id": "recusada"})
        assert "waits for the store" in ((await oraculo.operations.health()).parts["engine"] or "")
        store.away = False
        assert (await oraculo.run({"destinos": ["escavador_a"]}))["status"] == "concluida"
        assert await oraculo.store.load(["recusada"]) == {}
        assert (await oraculo.operations.health()).parts["engine"] is None


async def test_only_who_gave_an_idempotency_key_is_told_to_ask_again_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_PATIENCE", 0.1)
    store, body = MoodyStore(MEMORY), b'{"destinos": ["escavador_a"]}'
    async with Harness(store=store) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        store.away = True
        with pytest.raises(StoreUnavailable, match=r"ask again later, with the same Idempotency-Key$"):
            await oraculo.operations.submit(body, idempotency_key="chave-1")
        for asked in (oraculo.operations.submit(body), oraculo.operations.cancel(run_id)):
            with pytest.raises(StoreUnavailable, match=r"ask again later$"):
                await asked
        store.away = False


async def test_a_request_whose_caller_went_away_is_run_all_the_same() -> None:
    store = MoodyStore(MEMORY)
    async with Harness(recording_app(Journal(), ("escavador_a",)), store=store) as oraculo:
        store.away = True
        caller = asyncio.create_task(oraculo.submit({"destinos": ["escavador_a"], "correlation_id": "minha"}))
        await until(lambda: oraculo.operations._waiting == 1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        store.away = False
        await until(lambda: store.load(["minha"]))


async def test_what_waits_for_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_OUTSTANDING_BYTES", 50_000)
    store = MoodyStore(MEMORY)
    async with Harness(store=store) as oraculo:
        store.away = True
        request = {"destinos": ["escavador_a"], "payload": {"x": "x" * 20_000}}
        waiting = [asyncio.create_task(oraculo.submit(request)) for _ in range(2)]
        await until(lambda: oraculo.operations._waiting == 2)
        waiting[0].cancel()  # it is run all the same, and holds its place until then
        with pytest.raises(asyncio.CancelledError):
            await waiting.pop(0)
        with pytest.raises(StoreUnavailable, match="too many requests"):
            await oraculo.submit(request)
        store.away = False
        await asyncio.gather(*waiting)
        await until(lambda: oraculo.operations._waiting == 0)


async def test_a_creation_whose_answer_was_lost_is_its_callers_own() -> None:
    store = MoodyStore(MEMORY)
    async with Harness(recording_app(Journal(), ("escavador_a",)), store=store) as oraculo:
        store.forgetful = 1
        aggregate = await oraculo.run({"destinos": ["escavador_a"], "correlation_id": "minha"})
        assert (aggregate["status"], aggregate["versao"]) == ("concluida", 1)


async def test_whoever_waits_is_let_go_when_the_engine_stops() -> None:
    async with Harness() as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_ninguem"]})
        body = msgspec.json.encode({"destinos": ["escavador_ninguem"]})
        waiting = asyncio.create_task(oraculo.operations.submit(body, wait=300))

        async def follow() -> int:
            return sum([1 async for _ in oraculo.operations.follow(run_id)])

        following = asyncio.create_task(follow())
        await until(lambda: len(oraculo.engine.parts.runs.watchers) == 2)
        oraculo.engine.quiesce()
        submitted = await asyncio.wait_for(waiting, 5)
        assert submitted.aggregate is None
        assert await asyncio.wait_for(following, 5) >= 1
        with pytest.raises(StoreUnavailable, match="stopping"):
            await oraculo.submit({"destinos": ["escavador_a"]})


async def test_whoever_follows_a_run_that_is_gone_or_waits_for_it_is_let_go() -> None:
    """As after the whole of a store was deleted."""

    class Emptied(SqliteStore):
        is_empty = False

        async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
            return {} if self.is_empty else await super().heads(run_ids)

    store = Emptied(MEMORY)
    async with Harness(store=store, settings=Settings(engine=EngineSettings(poll=0.05))) as oraculo:
        run = await oraculo.operations.run(await oraculo.submit({"destinos": ["escavador_ninguem"]}))

        async def follow() -> int:
            return sum([1 async for _ in oraculo.operations.follow(run.id)])

        following = asyncio.create_task(follow())
        waiting = asyncio.create_task(oraculo.operations.wait(run.id, 60))
        await until(lambda: oraculo.engine.parts.runs.watchers.of_runs_there([run.id]))
        store.is_empty = True
        assert await asyncio.wait_for(following, 5) >= 1
        assert await asyncio.wait_for(waiting, 5) is None


async def test_whoever_waits_for_a_run_that_is_only_being_created_goes_on_waiting() -> None:
    """A look that began before the run was there found nothing."""

    class Slow(SqliteStore):
        asked = asyncio.Event()
        go_on = asyncio.Event()

        async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
            found = await super().heads(run_ids)
            if run_ids == ["r"] and not found:
                self.asked.set()
                await self.go_on.wait()
            return found

        async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
            if creations:
                await self.asked.wait()
            return await super().commit(creations, changes)

    store = Slow(MEMORY)
    async with Harness(store=store, settings=Settings(engine=EngineSettings(poll=0.05))) as oraculo:
        body = msgspec.json.encode({"destinos": ["escavador_ninguem"], "correlation_id": "r", "timeout": 0.5})
        submitting = asyncio.create_task(oraculo.operations.submit(body, wait=60))
        await until(lambda: oraculo.engine.parts.runs.watchers.of_runs_there(["r"]))
        store.go_on.set()
        assert (await submitting).aggregate is not None


async def test_nobody_looks_out_for_runs_that_nobody_waits_for() -> None:
    """An idle engine is idle, also beside others."""
    async with Harness() as oraculo:
        engine, looks = oraculo.engine, 0

        def is_sole() -> bool:
            nonlocal looks
            looks += 1
            return True

        lookout = Lookout(
            engine.parts.runs.watchers,
            oraculo.store,
            engine.parts.runs.plans,
            engine.parts.runs.results,
            is_sole,
            poll=0.0,
        )
        looking = asyncio.create_task(lookout.run())
        for _ in range(20):  # turns of the loop, of which each would be a look
            await asyncio.sleep(0)
        assert looks == 0
        with engine.parts.runs.watchers.watching("uma-execucao"):
            await until(lambda: looks)
        await asyncio.sleep(0)
        before = looks
        for _ in range(20):
            await asyncio.sleep(0)
        assert looks <= before + 1  # that it had begun
        looking.cancel()


async def test_a_receiver_that_drips_its_answer_does_not_hold_up_the_others() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.05)

    settings = Settings(
        webhook=WebhookSettings(timeout=0.3, max_attempts=1, concurrency=1, allow=LOOPBACK),
        engine=EngineSettings(note_linger=0.005),
    )
    async with listening(drip) as port, Harness(settings=settings) as oraculo:
        webhook = f"http://127.0.0.1:{port}/"
        run = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": webhook})

        async def given_up() -> bool:
            (delivery,) = (await oraculo.operations.run(run["correlation_id"])).head.deliveries
            return delivery.status == "nao_entregue" and delivery.error == "no answer in 0.3 s"

        await until(given_up)


async def test_a_timer_that_breaks_the_engine_is_set_apart_and_the_others_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0
    real = machine.apply

    def broken(run: Any, event: Any, now: float, changes: Any) -> Any:
        nonlocal tries
        if run.id == "veneno" and type(event).__name__ == "RunDue":
            tries += 1
            raise ZeroDivisionError("a bug")
        return real(run, event, now, changes)

    async with Harness(settings=Settings(engine=EngineSettings(poll=0.02))) as oraculo:
        monkeypatch.setattr(machine, "apply", broken)
        await oraculo.submit({"destinos": ["escavador_a"], "correlation_id": "veneno", "timeout": 0.05})
        await until(lambda: tries)
        aggregate = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.2})
        assert aggregate["status"] == "timeout"
        assert tries <= 2


@pytest.mark.parametrize("queue", ["resultados", "orquestrador", "nome ruim!", "y.dlq", "x" * 300])
async def test_a_reply_queue_that_cannot_be_one_is_refused_in_the_envelope_too(queue: str) -> None:
    async with Harness() as oraculo:
        message = answer("r1", tipo_evento="iniciar_orquestracao", payload={"destinos": ["escavador_a"]})
        await oraculo.publish("orquestrador", message | {"responder_em": queue})
        (letter,) = await until(lambda: oraculo.operations.dead_letters("orquestrador"))
        assert "responder_em" in letter.reason
        assert await oraculo.store.load(["r1"]) == {}


REAL = "redis://127.0.0.1:9/0"  # nobody is there, and nobody has to be for a store to be opened


@pytest.mark.parametrize(
    ("first", "second", "holder"),
    [
        ("memory://", "memory://", "another process"),
        (REAL, "memory://", "another process"),
        ("memory://", REAL, "a process on memory://"),
    ],
)
async def test_one_process_alone_may_serve_from_a_file_whose_messages_are_in_memory(
    tmp_path: Path, first: str, second: str, holder: str
) -> None:
    one, other = (store_beside(broker, tmp_path) for broker in (first, second))
    async with started(one):
        with pytest.raises(StoreError, match=f"o.db is in use by {holder}, .*give ORACULO_STORE_URL another file"):
            await other.start()
        async with started(SqliteStore(str(tmp_path / "o.db"))) as looking_in:  # as `oraculo doctor` does
            assert await looking_in.check()
    async with started(other):
        pass


async def test_any_number_of_processes_may_serve_from_a_file_whose_broker_is_a_real_one(tmp_path: Path) -> None:
    async with started(store_beside(REAL, tmp_path)), started(store_beside(REAL, tmp_path)) as other:
        assert await other.check()


async def test_a_folder_without_locks_is_for_those_who_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    async with started(store_beside(REAL, tmp_path)) as store:
        assert await store.check()
    with pytest.raises(StoreError, match=r"o\.db\.lock cannot be locked: No locks available"):
        await store_beside("memory://", tmp_path).start()


def store_beside(broker: str, folder: Path) -> Store:
    """The one of an engine that has this broker."""
    urls = {"broker": BrokerSettings(url=broker), "store": StoreSettings(url=f"sqlite:///{folder}/o.db")}
    return build(Settings(**urls)).store


async def test_a_message_that_the_broker_refuses_does_not_hold_up_the_others() -> None:
    class Picky(MemoryBroker):
        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            refusal = BrokerError("no such messages here")
            take = super().publish
            return await publish_but(take, messages, lambda one: refusal if one.queue == "escavador_ruim" else None)

    app = recording_app(Journal(), ("escavador_a",))
    async with Harness(app, broker=Picky(clock=SystemClock())) as oraculo:
        aggregate = await oraculo.run({"destinos": ["escavador_ruim", "escavador_a"], "timeout": 1})
    assert list(aggregate["resultados"]) == ["escavador_a"]
    assert aggregate["falhas"]["escavador_ruim"]["motivo"].startswith("not sent in 1 s")


async def test_a_quarantine_that_is_full_does_not_hold_up_the_commands() -> None:
    class Full(MemoryBroker):
        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            if any(message.reason for message in messages):
                raise BrokerUnavailable("no room for dead letters")
            return await super().publish(messages)

    settings = Settings(runs=RunSettings(max_attempts=1))
    apps = (failing_app("executador_x", failures=None), recording_app(Journal(), ("escavador_a",)))
    async with Harness(*apps, broker=Full(clock=SystemClock()), settings=settings) as oraculo:
        assert (await oraculo.run({"destinos": ["executador_x"]}))["status"] == "erro"
        assert (await oraculo.run({"destinos": ["escavador_a"]}))["status"] == "concluida"
        oraculo.engine.settings = msgspec.structs.replace(settings, engine=EngineSettings(stop_grace=0.1))


async def test_a_queue_that_takes_its_time_to_refuse_holds_up_no_other_but_once() -> None:
    class Slow(MemoryBroker):
        def __init__(self) -> None:
            super().__init__(clock=SystemClock())
            self.gate = asyncio.Event()
            self.tried = asyncio.Event()

        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            down = QueueDown("no answer")
            take = super().publish
            receipts = await publish_but(take, messages, lambda each: down if each.queue == "executador_x" else None)
            if any(receipt.error for receipt in receipts):
                self.tried.set()
                await self.gate.wait()
            return receipts

    broker = Slow()
    async with Harness(recording_app(Journal(), ("escavador_a",)), broker=broker) as oraculo:
        waiting = await oraculo.submit({"destinos": ["executador_x"], "timeout": 60})
        await broker.tried.wait()
        broker.gate.set()  # the first time it holds up what is behind it
        await until(lambda: oraculo.engine.parts.health.queues.refusing, saying="that it is known")
        broker.gate.clear()
        broker.tried.clear()
        await broker.tried.wait()  # by the sweep
        for _ in range(3):
            assert (await oraculo.run({"destinos": ["escavador_a"], "timeout": 5}))["status"] == "concluida"
        assert "; queue executador_x does not take the command (no answer)" in await oraculo.operations.explain(waiting)
        broker.gate.set()
        await oraculo.operations.cancel(waiting)


async def test_a_dead_letter_that_its_full_quarantine_takes_at_last_is_told_once() -> None:
    class Full(MemoryBroker):
        refusals = 0

        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            if self.refusals < 3 and any(message.reason for message in messages):
                self.refusals += 1
                return [Receipt(error=QueueFull("no room"))] * len(messages)
            return await super().publish(messages)

    class Told:
        def __init__(self) -> None:
            self.letters: list[DeadLettered] = []

        def emit(self, record: Record) -> None:
            if isinstance(record, DeadLettered):
                self.letters.append(record)

    settings = Settings(runs=RunSettings(max_attempts=1), engine=EngineSettings(poll=0.02))
    broker, told = Full(clock=SystemClock()), Told()
    app = failing_app("executador_x", failures=None)
    async with Harness(app, broker=broker, settings=settings, telemetry=told) as oraculo:
        run = await oraculo.run({"destinos": ["executador_x"]})
        await until(lambda: oraculo.operations.dead_letters("executador_x"), saying="the dead letter")
    assert broker.refusals == 3
    assert [letter.run_id for letter in told.letters] == [run["correlation_id"]]


async def test_of_a_redrive_only_a_few_large_runs_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand runs of a megabyte took another one."""

    class Counting(SqliteStore):
        most = 0

        async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
            self.most = max(self.most, len(run_ids))
            return await super().load(run_ids)

    monkeypatch.setattr(dead_letters, "_PAGE_BYTES", 5_000)
    app = failing_app("executador_x", failures=None, for_good=True)
    store, settings = Counting(MEMORY), Settings(engine=EngineSettings(poll=0.02))
    async with Harness(app, store=store, settings=settings) as oraculo:
        request = {"destinos": ["executador_x"], "payload": {"texto": "x" * 1000}}
        ids = [await oraculo.submit(request) for _ in range(30)]
        await until_letters(oraculo, 30)
        app.broken = False  # type: ignore[attr-defined]
        store.most = 0
        assert (await oraculo.operations.redrive("executador_x")).reopened == 30
        assert 0 < store.most < 5
        assert {(await oraculo.ended(run_id))["status"] for run_id in ids} == {"concluida"}


async def until_letters(oraculo: Harness, count: int) -> None:
    async def are_there() -> bool:
        return len(await oraculo.operations.dead_letters("executador_x", limit=count)) == count

    await until(are_there, saying="the dead letters")
