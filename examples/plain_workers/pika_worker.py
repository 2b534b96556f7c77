"""A worker with no SDK: pika and nothing else. `python pika_worker.py amqp://localhost executador_relatorio`

ORÁCULO makes the queues, so this one only names them (`passive=True`) and waits until they are there. A command leaves
its queue when its answer is confirmed; one that cannot be read leaves it when it is confirmed in `<queue>.dlq`. To
reject it would do where ORÁCULO made the queue; a queue that somebody made without dead letters would drop it.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime

import pika
from pika.exceptions import AMQPError, ChannelClosedByBroker

NOT_FOUND = 404
DEAD_LETTERS = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000_000}  # as ORÁCULO makes it
WORK = ThreadPoolExecutor(1)  # one command at a time, also when a lost connection left one behind in it
PERSISTENT = pika.BasicProperties(delivery_mode=2, content_type="application/json")


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


def answer_queue_of(command: dict) -> str:
    name = command.get("responder_em")
    if name is None:
        return "resultados"
    if not isinstance(name, str) or not 0 < len(name.encode()) <= 255:
        raise ValueError(f"responder_em is not the name of a queue: {name!r}")
    return name


def answered_beside(connection: pika.BlockingConnection, command: dict) -> bytes:
    """In a thread, while the connection is kept alive: the server gives up on one that misses its heartbeats, and then
    a command of some minutes would come again and again, and never be answered."""
    done = WORK.submit(answer_to, command)
    while not wait([done], timeout=0.2).done:
        connection.process_data_events()
    return done.result()


def on_message(channel, queue: str, tag: int, body: bytes) -> None:
    try:
        command = json.loads(body)
        answer_queue = answer_queue_of(command)
        answer = answered_beside(channel.connection, command)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        print(f"not a command, so it goes to the dead letters: {error!r}", flush=True)
        channel.basic_publish("", f"{queue}.dlq", body, dead_letter(f"not a command: {error!r}"), mandatory=True)
    else:
        channel.basic_publish("", answer_queue, answer, PERSISTENT, mandatory=True)
    channel.basic_ack(tag)  # only now: the server has confirmed what was published


def dead_letter(reason: str) -> pika.BasicProperties:
    told = {"x-oraculo-reason": reason[:1000]}
    return pika.BasicProperties(delivery_mode=2, timestamp=int(time.time()), headers=told)


def ensure_dead_letters(connection: pika.BlockingConnection, name: str) -> None:
    """On channels of its own: the server closes one on which a queue was named that is not there."""
    try:
        with connection.channel() as channel:
            channel.queue_declare(name, passive=True)
    except ChannelClosedByBroker as error:
        if error.reply_code != NOT_FOUND:
            raise
        with connection.channel() as channel:
            channel.queue_declare(name, durable=True, arguments=DEAD_LETTERS)


def work(url: str, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, passive=True)
        ensure_dead_letters(connection, f"{queue}.dlq")
        channel.confirm_delivery()
        channel.basic_qos(prefetch_count=10)  # 1 where a command takes minutes: the rest is for other workers then
        channel.basic_consume(queue, lambda ch, method, _, body: on_message(ch, queue, method.delivery_tag, body))
        print(f"waiting for work on {queue}", flush=True)
        channel.start_consuming()  # returns when the server cancels it: the queue was deleted


def main(url: str, queue: str) -> None:
    while True:
        try:
            work(url, queue)
        except (AMQPError, OSError) as error:  # what was not acked comes again
            print(f"trying again soon: {error!r}", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # at once, whatever runs: what was not acked comes again
    given = dict(enumerate(sys.argv))
    main(
        given.get(1) or os.environ.get("ORACULO_BROKER_URL", "amqp://localhost"),
        given.get(2) or os.environ["FILA"],
    )
