"""Starts a run from any Celery client.

ORACULO_PIPELINES=examples/celery_workers ORACULO_CELERY_TASKS_ALLOW='loja.*' oraculo serve   # knows the pipeline
celery -A oraculo.celery_app worker
python start_a_run.py amqp://localhost
"""

import sys

from celery import Celery

QUEUE = "orquestrador_core"  # with the ORACULO_PREFIX before it, if there is one


def main(broker: str, queue: str = QUEUE) -> None:
    celery = Celery("orquestrador_core", broker=broker)
    sent = celery.send_task("iniciar_pipeline", ("anuncio", {"titulo": "Oferta"}), queue=queue)
    print(sent.id)  # is the run's correlation_id


if __name__ == "__main__":
    main(*sys.argv[1:])
