"""A bare echo over a broker: no engine, no worker, no store. What it does is the most that anything built on the same
client can do here.

`python -m benchmarks.echo` answers, in a process of its own; `measure` asks.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Sequence

from oraculo.bootstrap import make_adapters
from oraculo.ports.broker import Broker, Consumer, Outgoing, publish_all
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings, load_settings

ASKED, ANSWERED = "bench-asked", "bench-answered"
THREE = (ASKED, "bench-asked-too", "bench-asked-as-well")
MESSAGES = 3000  # as many as the tasks of W2
BATCH = 500
BODY = b'{"correlation_id":"0123456789abcdef","tipo_evento":"iniciar_coleta","payload":{"fonte":"bench"}}'


async def answer(settings: Settings) -> None:
    broker = _broker(settings)
    await broker.start()
    await asyncio.gather(*(_answer_on(broker, queue) for queue in THREE))


async def _answer_on(broker: Broker, queue: str) -> None:
    consumer = await broker.consume(queue, prefetch=2000)
    while deliveries := await consumer.take(BATCH):
        await publish_all(broker, [Outgoing(ANSWERED, delivery.body) for delivery in deliveries])
        await consumer.ack(deliveries)


async def measure(settings: Settings) -> dict[str, float]:
    broker = _broker(settings)
    await broker.start()
    await broker.declare([*THREE, ANSWERED])
    consumer = await broker.consume(ANSWERED, prefetch=2000)
    one = [await _round_trip(broker, consumer, [ASKED]) for _ in range(300)]
    three = [await _round_trip(broker, consumer, THREE) for _ in range(300)]
    rates = [await _many(broker, consumer) for _ in range(3)]
    await broker.close()
    return {
        "p50 ms": statistics.median(one),
        "of three p50 ms": statistics.median(three),  # to three queues, as W1 does
        "messages/s": statistics.median(rates),
    }


async def _round_trip(broker: Broker, consumer: Consumer, queues: Sequence[str]) -> float:
    started = time.perf_counter()
    await publish_all(broker, [Outgoing(queue, BODY) for queue in queues])
    await _receive(consumer, len(queues))
    return (time.perf_counter() - started) * 1000


async def _many(broker: Broker, consumer: Consumer) -> float:
    started = time.perf_counter()
    receiving = asyncio.create_task(_receive(consumer, MESSAGES))
    waiting = deque([Outgoing(ASKED, BODY)] * MESSAGES)
    while waiting:
        await publish_all(broker, [waiting.popleft() for _ in range(min(BATCH, len(waiting)))])
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
