"""A worker with no SDK: nats-py and nothing else. `python nats_worker.py nats://localhost:4222 executador_relatorio`

A queue is a subject with a stream of its own (work-queue retention: what is acked is gone) and one durable pull
consumer that all its workers share. Stream and consumer have the queue's name, with `=` for each dot.
"""

import asyncio
import json
import os
import re
import signal
import sys
from datetime import UTC, datetime

import nats
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType
from nats.js.errors import NoStreamResponseError, NotFoundError

MOST_DELIVERIES = 20
QUEUE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


async def make_queue(jetstream: JetStreamContext, queue: str) -> None:
    """Only what is missing, exactly as ORÁCULO makes it; in any order with it."""
    for subject in (queue, f"{queue}.dlq"):
        stream = subject.replace(".", "=")
        try:
            await jetstream.stream_info(stream)
        except NotFoundError:
            kept = {"retention": RetentionPolicy.WORK_QUEUE, "storage": StorageType.FILE, "num_replicas": 1}
            await jetstream.add_stream(name=stream, subjects=[subject], **kept)
    name = queue.replace(".", "=")
    terms = ConsumerConfig(
        name=name,
        durable_name=name,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=60,
        max_deliver=-1,  # a limit here would keep a message for ever and tell nobody: count below instead
        max_ack_pending=-1,
        max_waiting=4096,
    )
    try:
        await jetstream.consumer_info(name, name)
    except NotFoundError:
        await jetstream.add_consumer(name, terms)


def handle(command: dict) -> dict:
    """The work itself. An exception here is an answer too."""
    return {"status": "ok", "resultado": {"recebido": command["payload"]}}


def answer_to(command: dict) -> bytes:
    """As JSON: a result that JSON cannot hold is a failure of the work, too."""
    event = "resultado_coleta" if command["tipo_evento"] == "iniciar_coleta" else "resultado_execucao"
    answer = {"correlation_id": command["correlation_id"], "tipo_evento": event}
    answer |= {field: command[field] for field in ("tarefa", "tentativa") if field in command}
    answer["timestamp"] = datetime.now(UTC).isoformat()
    try:
        return json.dumps(answer | {"payload": handle(command)}, allow_nan=False).encode()
    except Exception as error:  # noqa: BLE001 - whatever went wrong, the orchestrator is told
        return json.dumps(answer | {"payload": {"status": "erro", "erros": [str(error)]}}).encode()


def answer_queue(command: dict) -> str:
    target = command.get("responder_em") or "resultados"
    if not QUEUE.fullmatch(target):
        raise ValueError(f"responder_em must be the name of a queue, got {target!r}")
    return target


async def publish(jetstream: JetStreamContext, queue: str, body: bytes) -> None:
    """The orchestrator has made the queue of its answers; where it has not, this does."""
    try:
        await jetstream.publish(queue, body)
    except NoStreamResponseError:
        await make_queue(jetstream, queue)
        await jetstream.publish(queue, body)


async def answered_beside(command: dict, message: Msg, lease: float) -> bytes:
    """In a thread, while the server is told that somebody is at it: else it delivers the command again, as if to a
    worker that died, and it runs twice."""
    done = asyncio.create_task(asyncio.to_thread(answer_to, command))
    while not (await asyncio.wait([done], timeout=lease / 3))[0]:
        await message.in_progress()
    return done.result()


async def work(jetstream: JetStreamContext, queue: str, message: Msg, lease: float) -> None:
    try:
        if message.metadata.num_delivered > MOST_DELIVERIES:
            raise ValueError(f"delivered {message.metadata.num_delivered} times")
        command = json.loads(message.data)
        answer = await answered_beside(command, message, lease)
        await publish(jetstream, answer_queue(command), answer)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = {"Oraculo-Reason": f"not a command: {error!r} in the JSON".replace("%", "%25")}
        await jetstream.publish(f"{queue}.dlq", message.data, headers=reason)
    await message.ack()  # only now: its answer is confirmed, or it rests in the dead-letter queue


async def insist_on_queue(jetstream: JetStreamContext, queue: str) -> float:
    """The server may go away again, or its JetStream not be there yet. Returns how many seconds it waits for an ack."""
    name = queue.replace(".", "=")
    while True:
        try:
            await make_queue(jetstream, queue)
            return (await jetstream.consumer_info(name, name)).config.ack_wait or 30
        except nats.errors.Error as error:
            print(f"trying again soon: {error!r}", flush=True)
        await asyncio.sleep(1)


async def main(url: str, queue: str) -> None:
    client = await nats.connect(url, max_reconnect_attempts=-1)  # else it is closed for good after two minutes
    jetstream = client.jetstream()
    lease = await insist_on_queue(jetstream, queue)
    name = queue.replace(".", "=")
    subscription = await jetstream.pull_subscribe_bind(consumer=name, stream=name)
    print(f"waiting for work on {queue}", flush=True)
    while True:
        try:
            # No longer: a request that was lost with its connection is waited out, and until then nothing comes. A
            # heartbeat would not help, for nats-py does not end a request whose heartbeats stay away.
            messages = await subscription.fetch(1, timeout=5)  # more where they take little: the lease runs for all
        except TimeoutError:  # nothing came; nats-py raises its own kind of it, or Python's
            continue
        except nats.errors.Error as error:  # the queue is gone, say: the server is back without its data
            print(f"trying again soon: {error!r}", flush=True)
            await asyncio.sleep(1)
            lease = await insist_on_queue(jetstream, queue)
            continue
        for message in messages:
            try:
                await work(jetstream, queue, message, lease)
            except nats.errors.Error as error:  # the server went away, say: what was not acked comes again
                print(f"not settled: {error!r}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # at once, whatever runs: what was not acked comes again
    asyncio.run(main(*sys.argv[1:3]))
