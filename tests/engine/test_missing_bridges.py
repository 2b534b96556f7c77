"""A step behind a bridge that runs nowhere: its explanation names the setting that makes one."""

from collections.abc import Sequence

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core import bridge as bridges
from oraculo.engine.service import Role
from oraculo.ports.broker import Capabilities, QueueState
from oraculo.ports.clock import SystemClock
from oraculo.testing.harness import Harness

CELERY = "no bridge to celery runs here (is ORACULO_CELERY_BROKER_URL set where engines run?)"
BULLMQ = "no bridge to bullmq runs here (is ORACULO_BULLMQ_URL set where engines run?)"


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

    name = bridges.CELERY
    trouble = None

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
    async with Harness(broker=broker(SystemClock()), role=role) as oraculo:
        told = await explanation(oraculo, "celery://app.tarefa", "bullmq://fila")
        assert (f"; {CELERY}; {BULLMQ}; " in told) is is_told
        assert "no bridge" not in await explanation(oraculo, "executador_x")


@pytest.mark.parametrize("role", Role)
async def test_a_bridge_that_another_engine_has_is_not_missed(role: Role) -> None:
    broker = Counting(SystemClock())
    async with Harness(broker=broker, role=role) as oraculo:
        await broker.consume(bridges.QUEUES[bridges.CELERY], prefetch=1)
        told = await explanation(oraculo, "celery://app.tarefa", "bullmq://fila")
        assert CELERY not in told
        assert BULLMQ in told


async def test_a_bridge_that_runs_here_is_not_missed() -> None:
    oraculo = Harness()
    oraculo.engine.bridges = [Idle()]
    async with oraculo:
        assert "no bridge" not in await explanation(oraculo, "celery://app.tarefa")
