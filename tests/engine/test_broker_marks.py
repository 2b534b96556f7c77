"""A broker that has forgotten everything and does not say so: what it had taken is sent again, once."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.engine.cluster import broker_marks
from oraculo.engine.cluster.broker_watch import BrokerWatch
from oraculo.engine.ports import Ports
from oraculo.engine.wiring import Role, make_engine
from oraculo.errors import BrokerError, StoreUnavailable
from oraculo.ports.broker import Broker, Outgoing, Receipt, publish_all
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.ports.telemetry import CommandsTakenBack, LoopFailed
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from oraculo.wire.naming import QueueNames
from tests.engine import broker_stage as stage
from tests.engine.broker_stage import QUICK, Durable, Told, sent_by
from tests.engine.workers import failing_app
from tests.waiting import until

SLOW = Settings(engine=EngineSettings(poll=30))
QUEUE = "executador_a"
REQUEST = {"destinos": [QUEUE], "payload": {}, "timeout": 30}
NAMES = QueueNames()
EARLIER_MARK = "oraculo.memoria"
EARLIER_BODY = (
    b'{"correlation_id":"memoria","tipo_evento":"memoria","payload":{},"timestamp":"1970-01-01T00:00:00Z",'
    b'"nota":"as long as it is here, this broker has forgotten nothing; leave it"}'
)

impatient = stage.impatient  # a fixture


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_marks, "LOOK_EVERY", 0.02)


class Lasting(Durable):
    """A server that outlives engines, until it forgets."""

    looks = 0

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        self.looks += 1
        return await super().queues(names)

    async def close(self) -> None:
        pass

    async def forget(self) -> None:
        await self.remove([QUEUE, NAMES.memory])


class Marked(Lasting):
    """Knows how often its mark was looked for before it was left."""

    looked_for, looked_for_before = 0, -1

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        self.looked_for += names == [NAMES.memory]
        return await super().queues(names)

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if any(message.queue == NAMES.memory for message in messages):
            self.looked_for_before = self.looked_for
        return await super().publish(messages)


class Busy(Lasting):
    """Counts no messages for a while, as RabbitMQ does where a queue has no leader."""

    counts = True

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        found = await super().queues(names)
        return found if self.counts else [msgspec.structs.replace(state, ready=0) for state in found]


class Selective(Lasting):
    """Its owner lets nobody make a mark."""

    async def declare(self, queues: Sequence[str]) -> None:
        if NAMES.memory in queues:
            raise BrokerError("ACCESS_REFUSED")
        await super().declare(queues)


class Halting(SqliteStore):
    """Does not say what a broker had taken."""

    is_away = True

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        if self.is_away:
            raise StoreUnavailable("the disk is away")
        return await super().held_by(via, limit, after, dead_letters=dead_letters)


async def is_marked(broker: Broker) -> bool:
    return any(state.ready for state in await broker.queues([NAMES.memory]))


async def waiting(broker: Broker) -> int:
    return sum(state.ready for state in await broker.queues([QUEUE]))


async def sent_one(oraculo: Harness, broker: Durable) -> str:
    run_id = await oraculo.submit(REQUEST)
    await until(lambda: sent_by(oraculo, run_id, [broker.name]))
    await until(lambda: is_marked(broker))
    return run_id


async def test_what_it_took_is_sent_again_once() -> None:
    broker, told = Lasting("rabbitmq"), Told()
    async with Harness(settings=QUICK, broker=broker, telemetry=told) as oraculo:
        await sent_one(oraculo, broker)
        await broker.forget()
        await until(lambda: is_marked(broker))
        await until(lambda: not oraculo.engine.parts.broker_watch._losses, saying="the last look")
        await until(lambda: waiting(broker))
        assert await waiting(broker) == 1
    assert told.of(CommandsTakenBack) == [CommandsTakenBack("rabbitmq", 1)]


async def test_an_engine_that_dies_before_all_is_taken_back_leaves_it_to_the_next(tmp_path: Path) -> None:
    broker, path = Lasting("rabbitmq"), str(tmp_path / "oraculo.db")
    async with Harness(settings=QUICK, broker=broker, store=SqliteStore(path)) as before:
        await sent_one(before, broker)
    await broker.forget()
    async with Harness(settings=QUICK, broker=broker, store=Halting(path)) as dying:
        await until(lambda: dying.engine.parts.broker_watch._losses)
        several = broker.looks + 5
        await until(lambda: broker.looks > several)
    assert not await is_marked(broker)
    async with Harness(settings=QUICK, broker=broker, store=SqliteStore(path)):
        await until(lambda: is_marked(broker))
        await until(lambda: waiting(broker))


async def test_of_a_new_broker_nothing_is_missed() -> None:
    """Dead letters of its first moments would come twice: of these it is not known exactly when they were sent."""
    broker, told, app = Lasting("rabbitmq"), Told(), failing_app("executador_falho", failures=None, for_good=True)
    async with Harness(app, settings=QUICK, broker=broker, telemetry=told) as oraculo:
        assert (await oraculo.run({"destinos": ["executador_falho"], "timeout": 30}))["status"] == "erro"
        await until(lambda: is_marked(broker))
        await until(lambda: oraculo.operations.dead_letters("executador_falho"))
        several = broker.looks + 5
        await until(lambda: broker.looks > several)
        assert not oraculo.engine.parts.broker_watch._losses
    assert not told.of(CommandsTakenBack)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_broker_to_which_nothing_was_given_has_its_mark_before_anything_is_sent(is_begun: bool) -> None:
    """Else an engine that is killed in its first second leaves the mark half made, and the next one sends all again."""
    broker = Lasting("rabbitmq")
    if is_begun:
        await broker.start()
        await broker.declare([NAMES.memory])
    async with Harness(settings=SLOW, broker=broker):
        assert await is_marked(broker)


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_an_api_sent_before_the_first_engine_is_not_sent_again(tmp_path: Path, is_late: bool) -> None:
    """Nor when the broker is there after the API."""
    broker, told, path = Lasting("rabbitmq"), Told(), str(tmp_path / "oraculo.db")
    broker.away = "not up yet" if is_late else None
    ports = Ports(broker, SqliteStore(path), SystemClock(), SystemEntropy(), Told())
    front = make_engine(QUICK, ports, role=Role.FRONT)
    await front.start()
    await front.operations.submit(msgspec.json.encode(REQUEST))
    broker.away = None
    await broker.start()
    await until(lambda: waiting(broker))
    await front.stop()
    async with Harness(settings=QUICK, broker=broker, store=SqliteStore(path), telemetry=told):
        several = broker.looks + 10
        await until(lambda: broker.looks > several)
        assert await waiting(broker) == 1
    assert not told.of(CommandsTakenBack)


async def test_a_new_broker_that_was_away_at_the_start_has_its_mark_at_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(_: broker_marks.BrokerMarks) -> None: ...

    monkeypatch.setattr(broker_marks.BrokerMarks, "begin", nothing)
    broker = Marked("rabbitmq")
    async with Harness(settings=QUICK, broker=broker):
        await until(lambda: broker.looked_for_before > 0)
    assert broker.looked_for_before == 1


async def test_nothing_is_sent_again_by_a_restart_alone(tmp_path: Path) -> None:
    broker, path, told = Lasting("rabbitmq"), str(tmp_path / "oraculo.db"), Told()
    for _ in range(2):
        async with Harness(settings=QUICK, broker=broker, store=SqliteStore(path), telemetry=told) as oraculo:
            await sent_one(oraculo, broker)
    assert await waiting(broker) == 2
    assert not told.of(CommandsTakenBack)


async def test_the_mark_that_an_earlier_version_left_is_known(tmp_path: Path) -> None:
    broker, path, told = Lasting("rabbitmq"), str(tmp_path / "oraculo.db"), Told()
    async with Harness(settings=QUICK, broker=broker, store=SqliteStore(path)) as oraculo:
        await sent_one(oraculo, broker)
    await broker.remove([NAMES.memory])
    await broker.declare([EARLIER_MARK])
    await publish_all(broker, [Outgoing(EARLIER_MARK, EARLIER_BODY)])
    looks = broker.looks
    async with Harness(settings=QUICK, broker=broker, store=SqliteStore(path), telemetry=told):
        await until(lambda: broker.looks > looks + broker_marks.LOOKS + 2)
    frozen = (
        "brokers in use have this mark; without it each is taken for one that came back empty, and whoever upgrades "
        "gets all open commands sent twice: look for the old mark too before it is changed"
    )
    assert NAMES.memory == EARLIER_MARK, frozen
    assert not told.of(CommandsTakenBack), frozen
    assert await waiting(broker) == 1, frozen


async def test_a_broker_that_is_emptied_again_before_it_has_its_mark_is_noticed() -> None:
    broker, store = Lasting("rabbitmq"), Halting(MEMORY)
    async with Harness(settings=QUICK, broker=broker, store=store) as oraculo:
        await until(lambda: oraculo.engine.parts.broker_watch._losses)
        run_id = await oraculo.submit(REQUEST)
        await until(lambda: sent_by(oraculo, run_id, ["rabbitmq"]))
        await broker.forget()
        looks = broker.looks
        await until(lambda: broker.looks > looks + 1)
        store.is_away = False
        await until(lambda: is_marked(broker))
        await until(lambda: waiting(broker))


async def test_what_is_sent_after_the_mark_was_missed_is_not_sent_again() -> None:
    broker, store, told = Lasting("rabbitmq"), Halting(MEMORY), Told()
    async with Harness(settings=QUICK, broker=broker, store=store, telemetry=told) as oraculo:
        await until(lambda: oraculo.engine.parts.broker_watch._losses)
        run_id = await oraculo.submit(REQUEST)
        await until(lambda: sent_by(oraculo, run_id, ["rabbitmq"]))
        store.is_away = False
        await until(lambda: is_marked(broker))
    assert not told.of(CommandsTakenBack)


async def test_a_broker_that_cannot_count_for_a_while_has_forgotten_nothing() -> None:
    broker, told = Busy("rabbitmq"), Told()
    async with Harness(settings=QUICK, broker=broker, telemetry=told) as oraculo:
        [memory] = oraculo.engine.parts.broker_marks._marks
        await sent_one(oraculo, broker)
        await until(lambda: not memory.is_in_haste)
        broker.counts, broker.looks = False, 0
        await until(lambda: broker.looks > 2 * broker_marks.LOOKS)
        broker.counts, broker.looks = True, 0
        await until(lambda: broker.looks > 2)
    assert not told.of(CommandsTakenBack)


async def test_a_broker_that_is_away_is_not_looked_at() -> None:
    broker = Lasting("rabbitmq")
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        await until(lambda: is_marked(broker))
        broker.away, broker.looks = "pulled out", 0
        await oraculo.engine.parts.broker_marks._marks[0].look()
        assert not broker.looks


async def test_where_no_mark_may_be_left_that_is_told_and_nothing_is_sent_again(tmp_path: Path) -> None:
    broker, path, told = Selective("rabbitmq"), str(tmp_path / "oraculo.db"), Told()
    for _ in range(2):
        async with Harness(settings=QUICK, broker=broker, store=SqliteStore(path), telemetry=told) as oraculo:
            run_id = await oraculo.submit(REQUEST)
            await until(lambda: sent_by(oraculo, run_id, ["rabbitmq"]))  # noqa: B023 - it is awaited here
            await until(lambda: told.of(LoopFailed))
    blind = LoopFailed("broker marks", "should rabbitmq come back empty, that is not noticed: ACCESS_REFUSED")
    assert told.of(LoopFailed) == [blind, blind]
    assert await waiting(broker) == 2


async def test_of_several_engines_one_takes_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOKS", "MORE_LOOKS"):
        monkeypatch.setattr(broker_marks, name, 10_000)  # nobody waits in vain for the engine that has begun
    noted, note_loss = list[BrokerWatch](), BrokerWatch.note_loss

    def note(watch: BrokerWatch, name: str, at: float | None = None) -> None:
        noted.append(watch)
        note_loss(watch, name, at)

    monkeypatch.setattr(BrokerWatch, "note_loss", note)
    broker, path = Lasting("rabbitmq"), str(tmp_path / "oraculo.db")
    one, other = (Harness(settings=QUICK, broker=broker, store=SqliteStore(path)) for _ in range(2))
    async with one, other:
        await until(lambda: len(one.engine.parts.peers.engines) == len(other.engine.parts.peers.engines) == 2)
        await sent_one(one, broker)
        noted.clear()
        await broker.forget()
        await until(lambda: is_marked(broker))
        await until(lambda: waiting(broker))
    assert len(noted) == 1


async def test_of_several_brokers_only_what_the_forgetful_one_took_is_sent_again() -> None:
    first, second, told = Lasting("first"), Lasting("second"), Told()
    async with Harness(settings=QUICK, broker=FailoverBroker([first, second]), telemetry=told) as oraculo:
        await sent_one(oraculo, first)
        await until(lambda: is_marked(second))
        await second.forget()
        await until(lambda: is_marked(second))
        assert not told.of(CommandsTakenBack)
        await first.forget()
        await until(lambda: is_marked(first))
        await until(lambda: waiting(first))
    assert told.of(CommandsTakenBack) == [CommandsTakenBack("first", 1)]


async def test_a_broker_inside_the_process_needs_no_mark() -> None:
    async with Harness(settings=QUICK, store=SqliteStore(MEMORY)) as oraculo:
        assert "broker marks" not in oraculo.engine.parts.duties
