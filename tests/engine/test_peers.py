"""Several engines on one store and one broker: each run's care is one engine's first, and another's when that fails."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from oraculo.bootstrap import build
from oraculo.brokers.memory import MemoryBroker
from oraculo.core.events import RunDue
from oraculo.core.run import Changes
from oraculo.engine import pipelines
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.decide import intake
from oraculo.engine.inbox import Inbox, Wish
from oraculo.engine.send import publisher, sweep
from oraculo.engine.wiring import Role
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.pipeline.definition import Definition, decode_definition
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Committed, Creation, Due, Unsent
from oraculo.ports.telemetry import BatchCommitted, EnginesChanged, Silent
from oraculo.settings import EngineSettings, Settings, StoreSettings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from tests.engine import peers_stage as stage
from tests.engine.peers_stage import Group, OneServer, Slow, Unreachable, acquainted, die
from tests.engine.workers import Journal, answer, failing_app, recording_app
from tests.servers.fleet import Fleet
from tests.waiting import until

group = stage.group  # a fixture


# -- whose care a run is ---------------------------------------------------------------------------------------------


def peers_named(*names: str) -> list[Peers]:
    made = [Peers(SqliteStore(MEMORY), SystemClock(), Silent(), name, 1.0) for name in names]
    for one in made:
        one.engines = names
    return made


def test_every_run_has_one_first_engine_and_all_have_as_many() -> None:
    peers = peers_named("a", "b", "c")
    first: Counter[str] = Counter()
    for n in range(3000):
        ranks = [one.rank(f"run-{n}") for one in peers]
        assert sorted(ranks) == [0, 1, 2]
        first[peers[ranks.index(0)].name] += 1
    assert all(850 < count < 1150 for count in first.values())


def test_an_engine_that_leaves_moves_only_its_own_runs() -> None:
    before = peers_named("a", "b", "c")
    after = peers_named("a", "b")
    for n in range(300):
        run_id = f"run-{n}"
        if before[2].rank(run_id) != 0:
            assert [one.rank(run_id) == 0 for one in before[:2]] == [one.rank(run_id) == 0 for one in after]


async def test_engines_come_and_go(group: Group) -> None:
    one, other = group.member(), group.member()
    async with acquainted(one, other):
        assert list(one.engine.parts.peers.engines) == sorted(
            [one.engine.parts.peers.name, other.engine.parts.peers.name]
        )
        await other.stop()
        await until(lambda: one.engine.parts.peers.is_alone)
    changes = [len(record.engines) for record in group.told[0].records if isinstance(record, EnginesChanged)]
    assert changes == [2, 1]


# -- timers and unsent commands --------------------------------------------------------------------------------------


async def test_timers_are_shared_without_double_work(group: Group) -> None:
    one, other, third = group.member(), group.member(), group.member()
    async with acquainted(one, other, third):
        runs = [await one.submit({"destinos": ["nobody"], "timeout": 0.5}) for _ in range(150)]
        for run_id in runs:
            assert (await one.ended(run_id))["status"] == "timeout"
        # Each engine rang its own. Were all to ring all, two of three would conflict: 300.
        assert group.conflicts < 30
        rung = [sum(r.runs for r in told.records if isinstance(r, BatchCommitted)) for told in group.told[1:]]
        assert all(rung)


async def test_timers_of_an_engine_that_died_are_rung_by_another(group: Group) -> None:
    one, other = group.member(), group.member()
    async with acquainted(one, other):
        runs = [await one.submit({"destinos": ["nobody"], "timeout": 0.2}) for _ in range(20)]
        await die(other)
        for run_id in runs:
            assert (await one.ended(run_id))["status"] == "timeout"


async def test_commands_that_an_engine_cannot_send_are_sent_by_another(group: Group) -> None:
    journal = Journal()
    cut_off = group.member(broker=Unreachable(group.server))
    other = group.member(recording_app(journal, ("executador_x",)))
    async with acquainted(cut_off, other):
        runs = [await cut_off.submit({"destinos": ["executador_x"], "timeout": 30}) for _ in range(10)]
        for run_id in runs:
            assert (await cut_off.ended(run_id))["status"] == "concluida"
    assert len(journal.seen) == 10


async def test_an_engine_that_starts_leaves_what_others_are_sending_now(group: Group) -> None:
    """Commands that were committed and not yet confirmed look like lost ones."""
    journal = Journal()
    slow = Slow(group.server)
    one, other = group.member(broker=slow), group.member(recording_app(journal, ("executador_x",)), poll=30.0)
    await one.__aenter__()
    runs = [await one.submit({"destinos": ["executador_x"]}) for _ in range(10)]
    await other.__aenter__()
    await until(lambda: len(other.engine.parts.sweep._seen) == 10)
    assert journal.seen == []
    slow.gate.set()
    for run_id in runs:
        assert (await one.ended(run_id))["status"] == "concluida"
    await other.stop()
    await one.stop()
    assert len(journal.seen) == 10


# -- pipelines -------------------------------------------------------------------------------------------------------

PIPELINE = msgspec.json.encode({"name": "novo", "steps": [{"type": "A", "queue": "executador_x"}]})


async def test_a_pipeline_put_through_one_is_run_through_another_at_once(group: Group) -> None:
    journal = Journal()
    one, other = group.member(recording_app(journal, ("executador_x",))), group.member()
    async with acquainted(one, other):
        await one.operations.put_pipeline("novo", PIPELINE)
        assert (await other.run({"pipeline": "novo"}))["status"] == "concluida"


async def test_a_pipeline_put_through_one_is_run_by_message_through_another_at_once(group: Group) -> None:
    journal = Journal()
    front, engine = group.member(role=Role.FRONT), group.member(recording_app(journal, ("executador_x",)))
    async with acquainted(engine, front):
        await front.operations.put_pipeline("novo", PIPELINE)
        request = {
            "correlation_id": "by-message",
            "tipo_evento": "iniciar_orquestracao",
            "payload": {"pipeline": "novo"},
            "origem": "test",
            "destino": "orquestrador",
            "timestamp": "2026-01-01T00:00:00Z",
        }
        await front.publish("orquestrador", request)
        await until(lambda: journal.seen)
        assert (await engine.ended("by-message"))["status"] == "concluida"


async def test_of_the_pipelines_only_those_that_changed_are_read_again(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []

    def noted(body: bytes) -> Definition:
        decoded.append((definition := decode_definition(body)).name)
        return definition

    monkeypatch.setattr(pipelines, "decode_definition", noted)
    one, other = group.member(), group.member()
    async with acquainted(one, other):
        theirs = other.engine.parts.catalogue
        for name in ("a", "b", "c"):
            await one.operations.put_pipeline(name, b"steps: [{type: executador_x}]")
            await until(lambda name=name: name in theirs.pipelines)
        assert decoded == ["a", "b", "c"], "by the other: whoever put them knows them"
        await one.operations.delete_pipeline("a")
        await one.operations.put_pipeline("b", b"steps: [{type: executador_y}]")
        await until(lambda: theirs.pipelines["b"].steps[0].queue == "executador_y")
        await one.engine.parts.catalogue.refresh_stored(one.store)
        assert decoded == ["a", "b", "c", "b"]
        assert "a" not in theirs.pipelines


async def test_a_pipeline_deleted_through_one_is_gone_in_another(group: Group) -> None:
    one, other = group.member(), group.member()
    async with acquainted(one, other):
        await one.operations.put_pipeline("novo", PIPELINE)
        await until(lambda: "novo" in other.engine.parts.catalogue.pipelines)
        await one.operations.delete_pipeline("novo")
        await until(lambda: "novo" not in other.engine.parts.catalogue.pipelines)


async def test_a_pipeline_put_through_one_is_replaced_and_deleted_through_another_at_once(group: Group) -> None:
    one, other = group.member(), group.member()
    async with acquainted(one, other):
        assert (await one.operations.put_pipeline("novo", PIPELINE))[1]
        assert not (await other.operations.put_pipeline("novo", PIPELINE))[1]
        await one.operations.put_pipeline("outro", PIPELINE.replace(b"novo", b"outro"))
        await other.operations.delete_pipeline("outro")
        assert (await one.operations.put_pipeline("outro", PIPELINE.replace(b"novo", b"outro")))[1]


# -- what must not hold up the others --------------------------------------------------------------------------------


class Narrow(SqliteStore):
    """A store that works, but cannot do more than so many runs at once, and one run not at all."""

    most = 3
    impossible = ""

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        ids = [one.changes.run.id for one in creations] + [change.run.id for change in changes]
        if len(ids) > self.most or self.impossible in ids:
            raise StoreUnavailable("no answer in time")
        return await super().commit(creations, changes)


async def test_a_batch_that_is_too_much_for_the_store_is_done_in_parts(tmp_path: Path) -> None:
    store = Narrow(str(tmp_path / "oraculo.db"))
    async with Harness(store=store) as oraculo:
        runs = await asyncio.gather(*(oraculo.submit({"destinos": ["nobody"], "timeout": 60}) for _ in range(20)))
        assert len(await store.heads(runs)) == 20


async def test_one_run_that_the_store_cannot_do_holds_up_no_other(tmp_path: Path) -> None:
    store = Narrow(str(tmp_path / "oraculo.db"))
    async with Harness(store=store) as oraculo:
        store.impossible = "giant"
        giant = asyncio.create_task(oraculo.submit({"destinos": ["nobody"], "correlation_id": "giant"}))
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(giant, 25)
        assert await asyncio.wait_for(oraculo.submit({"destinos": ["nobody"]}), 10)


async def test_an_answer_that_the_store_cannot_do_is_given_back_though_a_note_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_FIRST_PAUSE", 0.01)
    store, broker = Narrow(str(tmp_path / "oraculo.db")), MemoryBroker(SystemClock(), delivery_limit=1)
    settings = Settings(engine=EngineSettings(note_linger=5.0))
    async with Harness(store=store, broker=broker, settings=settings) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        await until(lambda: len(oraculo.engine.parts.runs.inbox), saying="the note that the command was sent")
        store.impossible = run_id
        await oraculo.publish("resultados", answer(run_id))
        await until(lambda: broker.dead_letters("resultados", limit=1), saying="the end of its deliveries")


async def test_callers_who_gave_up_leave_nothing_behind() -> None:
    inbox = Inbox(0.05)
    loop = asyncio.get_running_loop()
    wishes = [Wish(f"run-{n}", RunDue(), loop.create_future()) for n in range(10)]
    inbox.put(wishes)
    for wish in wishes[:7]:
        wish.done.cancel()
    inbox.forget_withdrawn()
    assert len(inbox) == 3


async def test_own_timers_are_rung_though_another_leaves_many_behind(group: Group) -> None:
    """The other is noted as alive and rings nothing."""
    one = group.member()
    async with one:
        name = "zz-mute"
        one.engine.parts.peers.engines = [one.engine.parts.peers.name, name]
        one.engine.parts.peers.is_well = lambda: False  # keeps what it knows of the others
        mine, theirs = [], []
        for n in range(6000):
            (theirs if one.engine.parts.peers.rank(f"run-{n}") else mine).append(f"run-{n}")
        request = {"destinos": ["nobody"], "timeout": 1.0}
        await asyncio.gather(*(one.submit({**request, "correlation_id": run_id}) for run_id in theirs))
        await one.submit({**request, "correlation_id": mine[0], "timeout": 1.2})
        started = asyncio.get_running_loop().time()
        assert (await one.ended(mine[0], wait=10))["status"] == "timeout"
        assert asyncio.get_running_loop().time() - started < 6


async def test_a_timer_whose_run_is_gone_is_not_rung_without_end() -> None:
    looks = 0

    class Orphaned(SqliteStore):
        async def due(self, now: float, limit: int) -> Sequence[Due]:
            nonlocal looks
            looks += 1
            return [Due("gone")]

    async with Harness(store=Orphaned(MEMORY)):
        await until(lambda: looks)
        before = looks
        await asyncio.sleep(0.5)  # the time in which it would be looked at hundreds of times
        assert looks - before < 10


class FullQuarantine(Unreachable):
    """The same server, where dead letters have no room until there is some."""

    def __init__(self, server: OneServer) -> None:
        super().__init__(server)
        self.room = asyncio.Event()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if any(message.reason for message in messages):
            await self.room.wait()
        return await OneServer.publish(self, messages)


async def test_commands_are_swept_though_the_quarantine_is_full(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MAX_WAITING", 4)
    monkeypatch.setattr(sweep, "_PAGE", 1)  # the dead letters are unsent too, and come before the command
    journal, broker = Journal(), FullQuarantine(group.server)
    apps = failing_app("executador_x", failures=None, for_good=True), recording_app(journal, ("escavador_a",))
    one, front = group.member(*apps, broker=broker), group.member(role=Role.FRONT, broker=Unreachable(group.server))
    async with acquainted(one, front):
        for n in range(4):
            failed = {"destinos": ["executador_x"], "correlation_id": f"a-{n}"}
            assert (await one.run(failed))["status"] == "erro"
        await until(lambda: one.engine.parts.outbox._lines.dead_letters.load >= 1, saying="a quarantine that is full")
        run_id = await front.submit({"destinos": ["escavador_a"], "correlation_id": "b"})
        assert (await one.ended(run_id, wait=10))["status"] == "concluida"
        assert one.engine.parts.outbox._lines.dead_letters.load >= 1
        broker.room.set()


async def test_commands_of_others_are_left_while_the_broker_takes_nothing(group: Group) -> None:
    other, cut_off = group.member(), group.member(broker=Unreachable(group.server), poll=30.0)
    looks, look = 0, cut_off.store.unsent

    async def counted(limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        nonlocal looks
        looks += 1
        return await look(limit, after)

    cut_off.store.unsent = counted  # type: ignore[method-assign]
    async with acquainted(other, cut_off):
        await until(lambda: looks, saying="the sweep of the start")
        before = looks
        await cut_off.submit({"destinos": ["nobody"], "timeout": 0.5})
        await until(lambda: cut_off.engine.parts.outbox.trouble, saying="that the broker takes nothing")
        await cut_off.engine.parts.sweep.look()
        assert looks == before
        await other.stop()
        await cut_off.engine.parts.peers.attend()
        await cut_off.engine.parts.sweep.look()
        assert looks > before, "alone, it looks all the same"


@pytest.mark.parametrize("at_its_start", [False, True])
async def test_commands_that_an_api_is_still_sending_are_not_sent_again_by_the_engine_beside_it(
    group: Group, at_its_start: bool
) -> None:
    """Which is the only one, and does not know it."""
    slow = Slow(group.server)
    engine, front = group.member(poll=30.0), group.member(role=Role.FRONT, broker=slow)
    engine.engine.parts.peers.has_apis_beside = True  # before it starts, which is a sweep too
    async with acquainted(engine, front):
        await front.submit({"destinos": ["nobody"]})
        for _ in range(3):
            await engine.engine.parts.sweep.look(is_start=at_its_start)
        slow.gate.set()
        await front.engine.parts.outbox.flushed()
        [state] = await group.server.queues(["nobody"])
        assert state.ready == 1
        engine.engine.parts.peers.has_apis_beside = False


async def test_an_engine_in_trouble_does_not_say_that_it_lives(group: Group) -> None:
    one, other = group.member(), group.member()
    async with acquainted(one, other):
        other.engine.parts.intake.trouble = "waits for the store: it is broken"
        await until(lambda: one.engine.parts.peers.is_alone, within=10)


async def test_memory_queues_and_a_shared_store_go_for_one_engine_only(fleet: Fleet) -> None:
    url = f"{fleet.url('redis')}?namespace=t{uuid.uuid4().hex[:10]}"
    first, second = (build(Settings(store=StoreSettings(url=url))).engine for _ in range(2))
    await first.start()
    with pytest.raises(StoreError, match="lives inside one process"):
        await second.start()
    await second.stop()
    await first.stop()
