"""A bare echo over a broker: no engine, no worker, no store. What it does is the most that anything built on the same
client can do here.

`python -m benchmarks.echo` answers, in a process of its own; `measure` asks.
"""

import asyncio
import statistics
import time
from collections import deque

from oraculo.bootstrap import make_adapters
from oraculo.ports.broker import Broker, Consumer, Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings, load_settings

ASKED, ANSWERED = "bench-asked", "bench-answered"
MESSAGES = 3000  # as many as the tasks of W2
BATCH = 500
BODY = b'{"correlation_id":"0123456789abcdef","tipo_evento":"iniciar_coleta","payload":{"fonte":"bench"}}'


async def answer(settings: Settings) -> None:
    broker = _broker(settings)
    await broker.start()
    consumer = await broker.consume(ASKED, prefetch=2000)
    while deliveries := await consumer.take(BATCH):
        await broker.publish([Outgoing(ANSWERED, delivery.body) for delivery in deliveries])
        await consumer.ack(deliveries)


async def measure(settings: Settings) -> dict[str, float]:
    broker = _broker(settings)
    await broker.start()
    await broker.declare([ASKED, ANSWERED])
    consumer = await broker.consume(ANSWERED, prefetch=2000)
    spans = [await _one(broker, consumer) for _ in range(300)]
    rates = [await _many(broker, consumer) for _ in range(3)]
    await broker.close()
    return {"p50 ms": statistics.median(spans), "messages/s": statistics.median(rates)}


async def _one(broker: Broker, consumer: Consumer) -> float:
    started = time.perf_counter()
    await broker.publish([Outgoing(ASKED, BODY)])
    await _receive(consumer, 1)
    return (time.perf_counter() - started) * 1000


async def _many(broker: Broker, consumer: Consumer) -> float:
    started = time.perf_counter()
    receiving = asyncio.create_task(_receive(consumer, MESSAGES))
    waiting = deque([Outgoing(ASKED, BODY)] * MESSAGES)
    while waiting:
        await broker.publish([waiting.popleft() for _ in range(min(BATCH, len(waiting)))])
    await receiving
    return MESSAGES / (time.perf_counter() - started)


async def _receive(consumer: Consumer, count: int) -> None:
    while count:
        deliveries = await consumer.take(BATCH)
        await consumer.ack(deliveries)
        count -= len(deliveries)


def _broker(settings: Settings) -> Broker:
    [(_, broker)] = make_adapters(settings, SystemClock())
    return broker


if __name__ == "__main__":
    import uvloop

    uvloop.run(answer(load_settings()))
