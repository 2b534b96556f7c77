"""The queues that pipelines send to are declared: each when it is new, and all of them to a broker that came back."""

import json
from collections.abc import Sequence

import pytest

from oraculo.errors import BrokerError, QueueDown
from oraculo.ports.registry import Registry
from oraculo.ports.telemetry import LoopFailed
from oraculo.settings import EngineSettings, Settings
from oraculo.testing.harness import Harness
from oraculo.wire import naming
from tests.brokers.failover_stage import Named
from tests.engine import broker_stage as stage
from tests.engine.broker_stage import Durable, Told, forget, sent_by
from tests.waiting import until

QUICK = Settings(engine=EngineSettings(poll=0.02))
impatient = stage.impatient  # a fixture

REFUSED = LoopFailed("pipelines", "the queue 'escavador_youtube' is refused: not allowed")


class Ledger(Named):
    """Notes what it is asked to declare."""

    def __init__(self) -> None:
        super().__init__("ledger")
        self.asked: list[str] = []
        self.refused: set[str] = set()
        self.without_leader: set[str] = set()

    async def declare(self, queues: Sequence[str]) -> None:
        self.asked += queues
        if self.refused & set(queues):
            raise BrokerError("not allowed")
        if self.without_leader & set(queues):
            raise QueueDown("no leader")
        self._expect_here()
        await super().declare(queues)


class DurableLedger(Ledger, Durable):
    pass


def pipeline(*queues: str) -> bytes:
    return json.dumps({"name": "novo", "steps": [{"type": queue} for queue in queues]}).encode()


async def test_the_start_declares_all_and_a_new_pipeline_its_own() -> None:
    broker = Ledger()
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        assert {"orquestrador", "resultados", "escavador_youtube"} <= set(broker.asked)
        broker.asked.clear()
        await oraculo.operations.put_pipeline("novo", pipeline("executador_a"))
        await oraculo.operations.put_pipeline("novo", pipeline("executador_a", "executador_b"))
        await looks(oraculo)
        assert broker.asked == ["executador_a", "executador_a", "executador_b"]


async def test_a_start_is_not_held_up_by_a_queue_that_cannot_be_made_now() -> None:
    broker = Ledger()
    broker.without_leader, told = {"escavador_youtube"}, Told()
    async with Harness(settings=QUICK, broker=broker, telemetry=told):
        assert not told.of(LoopFailed)
        broker.without_leader.clear()
        await until(lambda: broker.queues(["escavador_youtube"]), saying="the queue, once it can be made")


async def test_a_start_is_not_held_up_by_a_queue_that_is_refused_which_is_told() -> None:
    broker, told = Ledger(), Told()
    broker.refused = {"escavador_youtube"}
    async with Harness(settings=QUICK, broker=broker, telemetry=told):
        assert told.of(LoopFailed) == [REFUSED]
        assert await broker.queues(["executador_relatorio"]), "the others are there"
        assert not await broker.queues(["escavador_youtube"])


async def test_a_refused_queue_and_one_that_cannot_be_made_now_keep_no_other_from_being_made() -> None:
    broker = Ledger()
    broker.refused, broker.without_leader = {"escavador_youtube"}, {"escavador_blog"}
    async with Harness(settings=QUICK, broker=broker):
        assert await broker.queues(["executador_relatorio"])
        broker.without_leader.clear()
        await until(lambda: broker.queues(["escavador_blog"]), saying="the queue, once it can be made")


async def test_no_engine_starts_whose_own_queue_is_refused() -> None:
    broker = Ledger()
    broker.refused = {"resultados"}
    with pytest.raises(BrokerError, match="not allowed"):
        async with Harness(settings=QUICK, broker=broker):
            pass


async def test_a_broker_that_comes_after_the_start_and_refuses_a_queue_is_looked_after_as_any_other() -> None:
    broker, told = DurableLedger(), Told()
    broker.away, broker.refused = "not there yet", {"escavador_youtube"}
    async with Harness(settings=QUICK, broker=broker, telemetry=told) as oraculo:
        broker.come_back()
        await until(lambda: REFUSED in told.of(LoopFailed), saying="the refusal to be told")
        run_id = await oraculo.submit({"destinos": ["executador_a"]})
        await until(lambda: sent_by(oraculo, run_id, ["ledger"]), saying="the command to be sent")
        forget(broker, "executador_a")
        await until(lambda: broker.queues(["executador_a"]), saying="the command to be sent again")


async def looks(oraculo: Harness, count: int = 3) -> None:
    """Until the pipelines were looked at so often."""
    catalogue, seen = oraculo.engine.parts.catalogue, [0]
    refresh = catalogue.refresh_stored

    async def counted(store: Registry) -> bool:
        seen[0] += 1
        return await refresh(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "refresh_stored", counted)
        await until(lambda: seen[0] > count, saying="the pipelines to be looked at")


async def test_what_could_not_be_declared_is_when_the_broker_is_back() -> None:
    broker = Ledger()
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        await broker.leave()
        await oraculo.operations.put_pipeline("novo", pipeline("executador_a"))
        await looks(oraculo)
        assert not await broker.queues(["executador_a"])
        broker.come_back()
        await until(lambda: broker.queues(["executador_a"]), saying="the queue of the new pipeline")


@pytest.mark.parametrize("what", ["was away", "lost its memory"])
async def test_a_broker_that_may_be_another_gets_all_queues_again(what: str) -> None:
    broker = DurableLedger()
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        if what == "was away":
            await broker.leave()
            await looks(oraculo)
            broker.come_back()
        if what == "lost its memory":
            await until(lambda: broker.queues([naming.MEMORY]), saying="the mark")
            forget(broker, "escavador_youtube")
        else:
            broker._server.queues.pop("escavador_youtube")  # type: ignore[union-attr]
        await until(lambda: broker.queues(["escavador_youtube"]), saying="the queue again")
        broker.asked.clear()
        await looks(oraculo)
        assert set(broker.asked) <= {naming.MEMORY}  # once is enough


async def test_a_queue_that_is_refused_keeps_no_other_from_being_declared_again() -> None:
    broker = Ledger()
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        await oraculo.operations.put_pipeline("novo", pipeline("executador_a", "executador_z"))
        broker.refused = {"executador_a"}
        broker.asked.clear()
        oraculo.engine.parts.queues.of_pipelines._declared.clear()  # as after a loss
        await looks(oraculo)
        for queue in ("escavador_youtube", "executador_z"):
            assert broker.asked.count(queue) == 2, "with the others, which failed, and alone"


async def test_a_queue_that_is_refused_is_not_asked_for_at_every_look() -> None:
    broker = Ledger()
    async with Harness(settings=QUICK, broker=broker) as oraculo:
        broker.refused = {"executador_a"}
        await oraculo.operations.put_pipeline("novo", pipeline("executador_a"))
        await looks(oraculo)
        assert broker.asked.count("executador_a") == 3  # by the one who put it, with others, and alone
