"""A worker with no SDK: pika and nothing else. `python pika_worker.py amqp://localhost executador_relatorio`

ORÁCULO makes the queues, so this one only names them (`passive=True`) and waits until they are there. A command leaves
its queue when its answer is confirmed; one that cannot be read is rejected, and RabbitMQ moves it to `<queue>.dlq`.
"""

import json
import os
import sys
import time
from datetime import UTC, datetime

import pika
from pika.exceptions import AMQPError

PERSISTENT = pika.BasicProperties(delivery_mode=2, content_type="application/json")


def handle(command: dict) -> dict:
    """The work itself. An exception here is an answer too."""
    return {"status": "ok", "resultado": {"recebido": command["payload"]}}


def answer_to(command: dict) -> dict:
    try:
        payload = handle(command)
    except Exception as error:  # noqa: BLE001 - whatever went wrong, the orchestrator is told
        payload = {"status": "erro", "erros": [str(error)]}
    event = "resultado_coleta" if command["tipo_evento"] == "iniciar_coleta" else "resultado_execucao"
    echoed = {field: command[field] for field in ("correlation_id", "tarefa", "tentativa") if field in command}
    return echoed | {"tipo_evento": event, "payload": payload, "timestamp": datetime.now(UTC).isoformat()}


def on_message(channel, method, _properties, body: bytes) -> None:
    try:
        command = json.loads(body)
        answer, answer_queue = answer_to(command), command.get("responder_em", "resultados")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"not a command, so it goes to the dead letters: {error!r}", flush=True)
        channel.basic_reject(method.delivery_tag, requeue=False)
        return
    channel.basic_publish("", answer_queue, json.dumps(answer).encode(), PERSISTENT, mandatory=True)
    channel.basic_ack(method.delivery_tag)  # only now: the server has confirmed the answer


def work(url: str, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, passive=True)
        channel.confirm_delivery()
        channel.basic_qos(prefetch_count=10)
        channel.basic_consume(queue, on_message)
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
    given = dict(enumerate(sys.argv))
    main(
        given.get(1) or os.environ.get("ORACULO_BROKER_URL", "amqp://localhost"),
        given.get(2) or os.environ["FILA"],
    )
