"""A step behind a bridge that runs nowhere, or cannot work: its explanation says so. Queues of ours that the bridge to
BullMQ reads as well are such a step's too."""

from collections.abc import Sequence

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine.wiring import Role
from oraculo.pipeline import bridges
from oraculo.pipeline.bridges import Bridge, ForeignQueue
from oraculo.ports.broker import Capabilities
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock
from oraculo.settings import BullmqSettings, CelerySettings, Settings
from oraculo.testing.harness import Harness
from tests.waiting import until

CELERY = "no bridge to celery runs here (is ORACULO_CELERY_BROKER_URL set where engines run?)"
BULLMQ = "no bridge to bullmq runs here (is ORACULO_BULLMQ_URL set where engines run?)"
ALLOWED = Settings(celery=CelerySettings(tasks_allow=("*",)), bullmq=BullmqSettings(queues_allow=("*",)))
MAPPED = msgspec.structs.replace(ALLOWED, bullmq=BullmqSettings(queues=("images-queue",), queues_allow=("*",)))
BEHIND_BULLMQ = ["bullmq://images-queue", "images-queue"]


class Counting(MemoryBroker):
    """Shared, as a server's queues are: an API may stand beside its engines."""

    capabilities = Capabilities(durable=True, shared=True, priorities=True, counts_consumers=True)


class Uncounted(Counting):
    """As NATS, which does not tell who listens."""

    capabilities = Capabilities(durable=True, shared=True, priorities=True, counts_consumers=False)

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        return [msgspec.structs.replace(state, consumers=None) for state in await super().queues(names)]


class Idle:
    """A bridge of this very engine."""

    def __init__(self, name: str = bridges.CELERY, trouble: str | None = None) -> None:
        self.name = name
        self.trouble = trouble
        self.shortfall: str | None = None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def explanation(oraculo: Harness, *destinations: str) -> str:
    return await oraculo.operations.explain(await oraculo.submit({"destinos": destinations, "payload": {}}))


@pytest.mark.parametrize(
    ("broker", "role", "is_told"),
    [
        (Counting, Role.WHOLE, True),
        (Counting, Role.FRONT, True),
        (Uncounted, Role.WHOLE, True),
        (Uncounted, Role.FRONT, False),  # which never has a bridge, and cannot know of those of engines
    ],
)
async def test_a_bridge_that_nobody_has_is_told_with_its_setting(
    broker: type[Counting], role: Role, is_told: bool
) -> None:
    async with Harness(broker=broker(SystemClock()), role=role, settings=ALLOWED) as oraculo:
        told = await explanation(oraculo, "celery://app.tarefa", "bullmq://fila")
        assert (f"; {CELERY}; {BULLMQ}; " in told) is is_told
        assert "no bridge" not in await explanation(oraculo, "executador_x")


@pytest.mark.parametrize("role", Role)
async def test_a_bridge_that_another_engine_has_is_not_missed(role: Role) -> None:
    broker = Counting(SystemClock())
    async with Harness(broker=broker, role=role, settings=ALLOWED) as oraculo:
        await broker.consume(bridges.QUEUES[bridges.CELERY], prefetch=1)
        told = await explanation(oraculo, "celery://app.tarefa", "bullmq://fila")
        assert CELERY not in told
        assert BULLMQ in told


async def test_a_bridge_that_runs_here_is_not_missed() -> None:
    oraculo = Harness(settings=ALLOWED)
    oraculo.engine.parts.bridges.running = [Idle()]
    async with oraculo:
        assert "no bridge" not in await explanation(oraculo, "celery://app.tarefa")


@pytest.mark.parametrize("destination", BEHIND_BULLMQ)
async def test_a_bridge_that_nobody_has_is_missed_by_every_queue_that_it_would_read(destination: str) -> None:
    async with Harness(broker=Counting(SystemClock()), settings=MAPPED) as oraculo:
        assert BULLMQ in await explanation(oraculo, destination)
        assert "no bridge" not in await explanation(oraculo, "text-queue")


@pytest.mark.parametrize("destination", BEHIND_BULLMQ)
async def test_a_bridge_that_cannot_work_is_told_for_every_queue_that_it_reads(destination: str) -> None:
    oraculo = Harness(settings=MAPPED)
    oraculo.engine.parts.bridges.running = [Idle(bridges.BULLMQ, "cannot reach 127.0.0.1:1")]
    async with oraculo:
        told = "; ponte bullmq cannot be used (cannot reach 127.0.0.1:1); "
        assert told in await explanation(oraculo, destination)
        assert "ponte" not in await explanation(oraculo, "text-queue")


@pytest.mark.parametrize("destination", BEHIND_BULLMQ)
async def test_how_it_is_where_a_bridge_hands_on_is_told(destination: str) -> None:
    oraculo = Harness(settings=MAPPED)
    oraculo.engine.parts.bridges.running, oraculo.engine.parts.bridges.foreign_queues = (
        [Idle(bridges.BULLMQ)],
        [Watching()],
    )
    told = ", and nobody listens on the queue of bullmq://images-queue)"
    async with oraculo:
        run_id = await oraculo.submit({"destinos": [destination, "text-queue"], "payload": {}})

        async def explained() -> bool:
            return told in await oraculo.operations.explain(run_id)

        await until(explained, saying=told)
        oraculo.engine.parts.bridges.running = [Idle(bridges.BULLMQ, "cannot reach 127.0.0.1:1")]
        assert not await explained(), "it cannot tell now"
        oraculo.engine.parts.bridges.running, oraculo.engine.parts.bridges.foreign_queues = (
            [],
            [Watching(bridges.CELERY)],
        )
        assert not await explained(), "another system does not know"


class Watching:
    """The queues behind a bridge, which nobody serves."""

    def __init__(self, name: str = bridges.BULLMQ) -> None:
        self.name = name
        self.is_open = True

    async def state_of(self, destination: Bridge) -> ForeignQueue | None:
        return ForeignQueue(f"the queue of {destination.url}", 3, listening=0)

    async def stop(self) -> None:
        self.is_open = False


@pytest.mark.parametrize("destination", BEHIND_BULLMQ)
async def test_an_api_beside_engines_says_what_waits_behind_their_bridges(destination: str) -> None:
    broker, queues = Counting(SystemClock()), Watching()
    oraculo = Harness(broker=broker, settings=MAPPED, role=Role.FRONT)
    oraculo.engine.parts.bridges.foreign_queues = [queues]
    async with oraculo:
        for queue in (bridges.QUEUES[bridges.BULLMQ], "images-queue"):
            await broker.consume(queue, prefetch=1)  # as the engine's bridge does
        run_id = await oraculo.submit({"destinos": [destination], "payload": {}})

        async def explained() -> bool:
            told = await oraculo.operations.explain(run_id)
            return ", and nobody listens on the queue of bullmq://images-queue)" in told

        await until(explained, saying="what waits behind the bridge")
        assert queues.is_open
    assert not queues.is_open


@pytest.mark.parametrize("destination", BEHIND_BULLMQ)
async def test_what_a_bridge_handed_on_is_not_missed_in_its_queue(
    destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.core.explain._SLOW", 0.0)
    broker = Counting(SystemClock())
    async with Harness(broker=broker, settings=MAPPED) as oraculo:

        async def of_taken(target: str) -> str:
            """The explanation, once it is noted that the command was sent, and somebody has taken and settled it."""
            run_id = await oraculo.submit({"destinos": [target], "payload": {}})
            consumer = await broker.consume(bridges.queue_of(target), prefetch=1)
            await consumer.ack(await consumer.take(1))

            async def of_sent() -> str:
                sentence = await oraculo.operations.explain(run_id)
                return sentence if ", sent " in sentence else ""

            return await until(of_sent, saying="the command to be noted as sent")

        assert "no longer in queue text-queue" in await of_taken("text-queue")
        assert "no longer" not in await of_taken(destination)
