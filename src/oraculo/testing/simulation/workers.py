"""The workers of a simulation: as slow and as unreliable as the scenario says."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from oraculo.core import naming
from oraculo.core.message import decode_message
from oraculo.errors import BrokerError, InvalidInput
from oraculo.ports.broker import Broker, Outgoing
from oraculo.testing.simulation.scenario import Scenario
from oraculo.worker import App, Context


class Factory(Protocol):
    @property
    def scenario(self) -> Scenario: ...
    @property
    def dice(self) -> random.Random: ...


def sdk_app(queues: Sequence[str], world: Factory) -> App:
    app = App("simulated")

    async def work(payload: dict[str, Any], ctx: Context) -> dict[str, Any]:
        if world.dice.random() < 0.3:
            ctx.progress(world.dice.random() * 100, "on the way")
        stand_in = world.scenario.stand_in(ctx.tarefa)
        await asyncio.sleep(world.dice.expovariate(1 / stand_in.latency))
        if world.dice.random() < stand_in.failure_rate:
            raise RuntimeError(f"attempt {ctx.tentativa} failed in the simulation")
        return {"tarefa": ctx.tarefa}

    for queue in queues:
        app.queue(queue)(work)
    return app


async def plain_worker(queue: str, broker: Broker, world: Factory) -> None:
    """A worker with nothing but the broker's client: it names its task in the payload, and never the attempt."""
    while True:
        try:
            consumer = await broker.consume(queue, prefetch=5)
            while deliveries := await consumer.take(5):
                for delivery in deliveries:
                    await asyncio.sleep(world.dice.expovariate(1 / world.scenario.latency))
                    await broker.publish([Outgoing(naming.ANSWERS, _plain_answer(delivery.body, world))])
                    await consumer.ack([delivery])
        except (BrokerError, InvalidInput):
            await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)


def _plain_answer(body: bytes, world: Factory) -> bytes:
    command = decode_message(body)
    failed = world.dice.random() < world.scenario.failure_rate
    payload: dict[str, Any] = {"tarefa": command.tarefa}
    payload |= {"status": "erro", "erros": [f"{world.dice.random()}"]} if failed else {"resultado": "ok"}
    return msgspec.json.encode(
        {
            "correlation_id": command.correlation_id,
            "tipo_evento": naming.EXECUTED,
            "payload": payload,
            "timestamp": f"2026-01-01T00:00:00.{world.dice.randrange(10**6):06d}Z",
        }
    )
