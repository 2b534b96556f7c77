"""A worker with no SDK: redis-py and nothing else. `python redis_worker.py redis://localhost:6379/0 escavador_youtube`

A queue is a stream of the same name, with a consumer group of the same name and the JSON in field `body`. What was
handled is acked and deleted. The name of the consumer stays the same over a restart, so that the worker finds what it
had taken and not finished; give each worker of a queue its own, as the third argument.
"""

import contextlib
import json
import socket
import sys
import time
from datetime import UTC, datetime

import redis

MOST_DELIVERIES = 20


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
    if not isinstance(target, str):
        raise TypeError(f"responder_em must be a string, got {target!r}")
    return target


def make_queue(client: redis.Redis, queue: str) -> None:
    """From id 0: what was published before the first worker came is for it too."""
    try:
        client.xgroup_create(queue, queue, id="0", mkstream=True)
    except redis.ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):  # it is there already
            raise


def settle(client: redis.Redis, queue: str, entry: bytes, target: str, fields: dict) -> None:
    """The command leaves its queue once its answer is in another: not in one transaction, which Redis goes on with when
    a part of it fails."""
    client.xadd(target, fields)
    with client.pipeline(transaction=True) as step:
        step.xack(queue, queue, entry)
        step.xdel(queue, entry)
        step.execute()


def bury(client: redis.Redis, queue: str, entry: bytes, fields: dict, why: Exception) -> None:
    settle(client, queue, entry, f"{queue}.dlq", {**fields, "reason": f"{type(why).__name__}: {why}"})


def work(client: redis.Redis, queue: str, entry: bytes, fields: dict, deliveries: int = 1) -> None:
    try:
        if deliveries > MOST_DELIVERIES:
            raise ValueError(f"delivered {deliveries} times")
        command = json.loads(fields.get(b"body", b""))
        target = answer_queue(command)
        answer = answer_to(command)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # no command: never dropped
        return bury(client, queue, entry, fields, error)
    try:
        settle(client, queue, entry, target, {"body": answer})
    except redis.ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        bury(client, queue, entry, fields, error)  # responder_em names something else than a queue


def read(client: redis.Redis, queue: str, name: str, after: str) -> list:
    """What was taken before is read one by one: each look counts as a delivery of all that it shows."""
    try:
        found = client.xreadgroup(queue, name, {queue: after}, count=10 if after == ">" else 1, block=2000)
    except redis.ResponseError as error:
        if not str(error).startswith(
            ("NOGROUP", "UNBLOCKED")
        ):  # all was flushed, or the server is back without its data
            raise
        make_queue(client, queue)
        return []
    return [entry for _, entries in (found or ()) for entry in entries]


def serve(client: redis.Redis, queue: str, name: str) -> None:
    make_queue(client, queue)
    while unfinished := read(client, queue, name, "0"):  # what this worker had taken before it stopped
        for entry, fields in unfinished:
            for about in client.xpending_range(queue, queue, entry, entry, 1, consumername=name):
                work(client, queue, entry, fields or {}, about["times_delivered"])  # else another has claimed it
    print(f"waiting for work on {queue}", flush=True)
    while True:
        for entry, fields in read(client, queue, name, ">"):
            work(client, queue, entry, fields)


def main(url: str, queue: str, name: str = f"plain-{socket.gethostname()}") -> None:
    while True:
        try:
            with redis.Redis.from_url(url, protocol=2, socket_timeout=10) as client:  # longer than a read waits
                serve(client, queue, name)
        except redis.RedisError as error:  # away, full, or a replica by now: it finds again what it had taken
            print(f"trying again soon: {error}", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
