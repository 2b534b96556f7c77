"""The simulated workers, as slow and as unreliable as the scenario says."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oraculo.errors import BrokerError, InvalidInput
from oraculo.ports.broker import Broker, Outgoing, publish_all
from oraculo.wire import naming
from oraculo.wire.message import decode_message
from oraculo.worker import App, Context, DoNotRetry

if TYPE_CHECKING:
    from oraculo.testing.simulation.world import World


def sdk_app(queues: Sequence[str], world: "World") -> App:
    app = App("simulated")

    async def work(payload: dict[str, Any], ctx: Context) -> dict[str, Any]:
        identity = (ctx.correlation_id, ctx.tarefa or "", ctx.tentativa)
        world.handler_begins(identity)
        if world.dice.random() < 0.3:
            ctx.progress(world.dice.random() * 100, "on the way")
        stand_in = world.scenario.stand_in(ctx.tarefa)
        await asyncio.sleep(world.dice.expovariate(1 / stand_in.latency))
        if world.dice.random() < stand_in.failure_rate:
            error = _failure(world, f"attempt {ctx.tentativa} failed in the simulation")
            payload = {"status": "erro", "erros": [f"{type(error).__name__}: {error}"]}
            world.handler_ends("", identity, payload | ({"repetir": False} if isinstance(error, DoNotRetry) else {}))
            raise error
        result = {"tarefa": ctx.tarefa}
        field = "dados" if ctx.queue.startswith("escavador") else "resultado"
        world.handler_ends("", identity, {"status": "ok", field: result})
        return result

    for queue in queues:
        app.queue(queue)(work)
    return app


def _failure(world: "World", text: str) -> Exception:
    is_final = world.scenario.final_rate and world.dice.random() < world.scenario.final_rate
    return DoNotRetry(text) if is_final else RuntimeError(text)


async def plain_worker(queue: str, broker: Broker, server: str, world: "World") -> None:
    """Run a worker that only uses the broker's client. It names its task in the payload, and never the attempt."""
    while True:
        try:
            consumer = await broker.consume(queue, prefetch=5)
            while deliveries := await consumer.take(5):
                for delivery in deliveries:
                    await asyncio.sleep(world.dice.expovariate(1 / world.scenario.latency))
                    await publish_all(broker, [Outgoing(naming.ANSWERS, _plain_answer(delivery.body, server, world))])
                    await consumer.ack([delivery])
        except (BrokerError, InvalidInput):
            await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)


def _plain_answer(body: bytes, server: str, world: "World") -> bytes:
    command = decode_message(body)
    failed = world.dice.random() < world.scenario.failure_rate
    payload: dict[str, Any] = {"tarefa": command.tarefa}
    payload |= {"status": "erro", "erros": [f"{world.dice.random()}"]} if failed else {"resultado": "ok"}
    world.handler_ends(server, (command.correlation_id, command.tarefa or "", command.tentativa), payload)
    return json.dumps(  # formatted unlike the SDK's JSON: a result is kept as it came
        {
            "correlation_id": command.correlation_id,
            "tipo_evento": naming.EXECUTED,
            "payload": payload,
            "timestamp": f"2026-01-01T00:00:00.{world.dice.randrange(10**6):06d}Z",
        }
    ).encode()
