"""How commands go to the broker: in batches that a slow link can carry in time; and why some are not taken is told."""

import asyncio
from collections.abc import Sequence

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.queue_health import QueueHealth
from oraculo.core.run import RunHead
from oraculo.engine.queues.known import KnownQueues
from oraculo.engine.send import publisher
from oraculo.engine.send.publisher import Entry, Key, PublishLine
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueFull, StoreUnavailable
from oraculo.ports.broker import Broker, Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import CommandsPublished, PublishFailed, Silent, Telemetry
from oraculo.settings import EngineSettings, RunSettings, Settings
from oraculo.testing.harness import Harness
from tests.engine.broker_stage import Told
from tests.engine.workers import Journal, failing_app, recording_app
from tests.receipts import publish_but
from tests.waiting import until


class Moody(MemoryBroker):
    """`fault`: why a message for `executador_ruim` is not taken; others are. BrokerUnavailable: none is."""

    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.fault: BrokerError | None = None
        self.refusals = 0
        self.batches: list[list[int]] = []  # the sizes of the messages

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self.batches.append([len(message.body) for message in messages])
        if self.fault is not None and any(message.queue == "executador_ruim" for message in messages):
            self.refusals += 1
            if type(self.fault) is BrokerUnavailable:
                raise self.fault
        return await publish_but(super().publish, messages, self._fault_of)

    def _fault_of(self, message: Outgoing) -> BrokerError | None:
        return self.fault if message.queue == "executador_ruim" else None


@pytest.fixture
def moody() -> Moody:
    return Moody()


class Wanting:
    """Wants all entries sent, and forgets their outcome."""

    async def still_wanted(self, entries: Sequence[Entry], have_waited: bool) -> Sequence[Entry]:
        return entries

    def holds_back(self) -> bool:
        return False

    def confirmed(self, keys: Sequence[Key], brokers: Sequence[str], started: float) -> None:
        pass

    def refused(self, refused: Sequence[tuple[Entry, BrokerError]]) -> None:
        pass


def line_to(broker: Broker, telemetry: Telemetry, refusing: QueueHealth | None = None) -> PublishLine:
    return PublishLine(
        broker, Wanting(), QueueHealth(60.0) if refusing is None else refusing, KnownQueues(), SystemClock(), telemetry
    )


async def test_a_batch_is_bounded_by_its_bytes(moody: Moody, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a link that needs longer for all of them than a broker has to confirm them would never carry any."""
    monkeypatch.setattr(publisher, "PUBLISHED_BYTES", 100)
    await moody.start()
    line = line_to(moody, Silent())
    for number, size in enumerate((60, 40, 1, 500, 100)):
        line.add((f"r{number}", 0, 1, False), Outgoing("executador_a", b"x" * size))
    running = asyncio.create_task(line.run())
    await asyncio.wait_for(line.flushed(), 5)
    running.cancel()
    assert moody.batches == [[60, 40], [1], [500], [100]]
    await moody.close()


@pytest.mark.parametrize("fault", [QueueFull("full"), BrokerError("not for you"), BrokerUnavailable("away")])
async def test_what_is_not_published_is_told(moody: Moody, fault: BrokerError) -> None:
    moody.fault, told = fault, Told()
    await moody.start()
    line = line_to(moody, told)
    line.add(("r", 0, 1, False), Outgoing("executador_ruim", b""))
    running = asyncio.create_task(line.run())
    await until(lambda: told.of(PublishFailed), saying="it to be told")
    running.cancel()
    assert told.of(PublishFailed)[0] == PublishFailed(1, str(fault))
    await moody.close()


async def test_a_queue_that_takes_again_is_no_longer_in_doubt_though_another_of_the_batch_is_full(
    moody: Moody,
) -> None:
    moody.fault = QueueFull("full")
    await moody.start()
    refusing, now = QueueHealth(60.0), asyncio.get_running_loop().time()
    refusing.note(["executador_bom"], "was full", now)
    line = line_to(moody, Silent(), refusing)
    for queue in ("executador_bom", "executador_ruim"):
        line.add((queue, 0, 1, False), Outgoing(queue, b""))
    running = asyncio.create_task(line.run())
    await asyncio.wait_for(line.flushed(), 5)
    running.cancel()
    assert refusing.reasons(now) == {"executador_ruim": "full"}
    await moody.close()


async def test_however_often_a_broker_was_tried_the_next_try_is_not_far(
    moody: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(publisher, "_LONGEST_PAUSE", 0.004)
    moody.fault = BrokerUnavailable("away")
    await moody.start()
    line = line_to(moody, Silent())
    line.add(("r", 0, 1, False), Outgoing("executador_ruim", b""))
    running = asyncio.create_task(line.run())
    await until(lambda: moody.refusals >= 20, saying="many tries")
    moody.fault = None
    await asyncio.wait_for(line.flushed(), 5)
    running.cancel()
    await moody.close()


@pytest.fixture
def nothing_cached() -> Settings:
    """As if other engines had ended the runs: the copies that the commands were made of are not told."""
    return Settings(engine=EngineSettings(poll=0.05, cached_tasks=1))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (BrokerError("not for you"), "queue executador_ruim does not take the command"),
        (BrokerUnavailable("no room"), "the broker cannot be used"),
    ],
)
async def test_a_run_says_why_a_command_is_not_taken(moody: Moody, fault: BrokerError, told: str) -> None:
    moody.fault = fault
    engine = EngineSettings(poll=0.05, stop_grace=0.2)  # a stop would wait for the broker in vain
    async with Harness(settings=Settings(engine=engine), broker=moody) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_bom", "executador_ruim"], "payload": {}, "timeout": 1})

        async def is_told() -> bool:
            return f"; {told} ({fault})" in await oraculo.operations.explain(run_id)

        await until(is_told)
        aggregate = await oraculo.ended(run_id)
    assert f"did not take the command ({fault})" in aggregate["falhas"]["executador_ruim"]["motivo"]


async def test_commands_of_runs_that_ended_while_the_broker_was_away_are_not_sent(
    moody: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that it was tried with, nor those that waited behind them."""
    monkeypatch.setattr(publisher, "PUBLISHED_TOGETHER", 2)
    moody.fault = BrokerUnavailable("not now")
    journal = Journal()
    async with Harness(
        recording_app(journal, ("executador_ruim",)), settings=Settings(engine=EngineSettings(poll=0.05)), broker=moody
    ) as oraculo:
        ends = [await oraculo.submit({"destinos": ["executador_ruim"], "payload": {}}) for _ in range(6)]
        await until(lambda: moody.refusals > 0, saying="a try")
        kept = ends.pop(3)
        for run_id in ends:
            await oraculo.operations.cancel(run_id)
        moody.fault = None
        assert (await oraculo.ended(kept))["status"] == "concluida"
        last = (await oraculo.run({"destinos": ["executador_ruim"], "payload": {}}))["correlation_id"]
    assert [context.correlation_id for context in journal.seen] == [kept, last], "they are sent in order"


async def test_nor_are_those_of_runs_that_ended_elsewhere(
    moody: Moody, nothing_cached: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "PUBLISHED_TOGETHER", 2)
    moody.fault = BrokerUnavailable("not now")
    journal = Journal()
    app = recording_app(journal, ("executador_ruim",))
    async with Harness(app, settings=nothing_cached, broker=moody) as oraculo:
        ends = [await oraculo.submit({"destinos": ["executador_ruim"], "payload": {}}) for _ in range(6)]
        await until(lambda: moody.refusals > 0, saying="a try")
        kept = ends.pop(3)
        for run_id in ends:
            await oraculo.operations.cancel(run_id)
        refusals = moody.refusals
        await until(lambda: moody.refusals > refusals, saying="a try after all were lined up")
        moody.fault = None
        assert (await oraculo.ended(kept))["status"] == "concluida"
        last = (await oraculo.run({"destinos": ["executador_ruim"], "payload": {}}))["correlation_id"]
    assert [context.correlation_id for context in journal.seen] == [kept, last]


async def test_when_it_cannot_be_told_whether_a_run_ended_its_commands_are_sent(
    moody: Moody, nothing_cached: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody.fault = BrokerUnavailable("not now")
    async with Harness(
        recording_app(Journal(), ("executador_ruim",)), settings=nothing_cached, broker=moody
    ) as oraculo:

        async def heads(run_ids: Sequence[str]) -> dict[str, RunHead]:
            raise StoreUnavailable("nor the store")

        run_id = await oraculo.submit({"destinos": ["executador_ruim"], "payload": {}})
        await until(lambda: moody.refusals > 0, saying="a try")
        monkeypatch.setattr(oraculo.store, "heads", heads)
        moody.fault = None
        assert (await oraculo.ended(run_id))["status"] == "concluida"


async def test_when_nothing_is_left_to_send_no_trouble_is_told(moody: Moody) -> None:
    """Else engines that share a store would leave to each other what is unsent, until one has something of its own."""
    moody.fault = BrokerUnavailable("not now")
    async with Harness(settings=Settings(engine=EngineSettings(poll=0.05)), broker=moody) as oraculo:
        run_id = await oraculo.submit({"destinos": ["executador_ruim"], "payload": {}})
        await until(lambda: oraculo.engine.parts.health.queues.no_queue_takes is not None, saying="the trouble")
        await oraculo.operations.cancel(run_id)
        await until(lambda: oraculo.engine.parts.health.queues.no_queue_takes is None, saying="the end of it")
        assert moody.fault is not None


async def test_dead_letters_do_not_count_as_commands() -> None:
    told = Told()
    settings = Settings(runs=RunSettings(max_attempts=2, backoff=0.01), engine=EngineSettings(poll=0.02))
    async with Harness(failing_app("executador_x", failures=None), settings=settings, telemetry=told) as oraculo:
        await oraculo.run({"destinos": ["executador_x"]})
        await until(lambda: oraculo.operations.dead_letters("executador_x"), saying="the dead letter")
    assert sum(record.count for record in told.records if isinstance(record, CommandsPublished)) == 2


async def test_a_command_that_is_too_large_fails_its_task_at_once_and_nothing_else(moody: Moody) -> None:
    moody.fault = MessageTooLarge("9 bytes are more than 8", 9, 8)
    app = recording_app(Journal(), ("executador_bom", "executador_ruim"))
    async with Harness(app, settings=Settings(engine=EngineSettings(poll=0.02)), broker=moody) as oraculo:
        request = {"destinos": ["executador_bom", "executador_ruim"], "payload": {}, "timeout": 60}
        aggregate = await oraculo.run(request, wait=10)
        assert aggregate["falhas"]["executador_ruim"] == {
            "status": "erro",
            "motivo": "its command is too large for memory: 9 bytes are more than 8; raise that limit or, if it is a "
            "command, lower ORACULO_LIMITS_PAYLOAD_BYTES",
            "tentativas": 1,
        }
        assert aggregate["status"] == "parcial"
        assert not oraculo.engine.parts.health.queues.refusing, "its queue takes others"
        refusals = moody.refusals
        assert (await oraculo.run({"destinos": ["executador_bom"]}))["status"] == "concluida"
        assert moody.refusals == refusals, "it is not tried again"
        assert [state.dead_letters for state in await moody.queues(["executador_ruim"])] == [0]
        moody.fault = None
        await oraculo.operations.repeat(aggregate["correlation_id"])
        assert (await oraculo.ended(aggregate["correlation_id"]))["status"] == "concluida"


async def test_a_dead_letter_that_is_too_large_is_tried_again_like_any_other() -> None:
    class Narrow(Moody):
        letters = 0

        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            letters = sum(message.reason is not None for message in messages)
            self.letters += letters
            if letters and self.letters < 3:
                raise MessageTooLarge("too large", 9, 8)
            return await super().publish(messages)

    settings = Settings(runs=RunSettings(max_attempts=1), engine=EngineSettings(poll=0.02))
    app = failing_app("executador_x", failures=None)
    async with Harness(app, broker=Narrow(), settings=settings) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_x"]})
        assert "too large" not in aggregate["falhas"]["executador_x"]["motivo"]
        await until(lambda: oraculo.operations.dead_letters("executador_x"), saying="the dead letter")
