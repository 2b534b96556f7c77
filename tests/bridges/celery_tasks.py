"""A Celery app as its users have it: it imports nothing of ORÁCULO."""

import os
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from celery import Celery

app = Celery("loja", broker=os.environ["CELERY_BROKER"])
app.conf.update(
    task_default_queue=os.environ["CELERY_QUEUE"],
    task_default_queue_type=os.environ.get("CELERY_QUEUE_TYPE", "classic"),
    broker_connection_retry_on_startup=True,
    # By default kombu looks only every 100 s for what a dead worker held.
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("CELERY_VISIBILITY", "3600")),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    task_create_missing_queues=False,
    worker_prefetch_multiplier=1,
    worker_detect_quorum_queues=True,
    task_serializer=os.environ.get("CELERY_SERIALIZER", "json"),
    result_serializer=os.environ.get("CELERY_SERIALIZER", "json"),
    accept_content=["json", os.environ.get("CELERY_SERIALIZER", "json")],
    task_queue_max_priority=int(os.environ.get("CELERY_MAX_PRIORITY", "0")) or None,
)


class Peculiar(Exception):
    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} is wrong {number} times")
        self.unpicklable = lambda: number


@app.task(name="loja.somar")
def add(a: int, b: int = 0) -> dict[str, int]:
    return {"soma": a + b}


@app.task(name="loja.eco")
def echo(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"args": args, "kwargs": kwargs}


@app.task(name="loja.anotar")
def write_down(path: str, text: str) -> None:
    with Path(path).open("a") as lines:
        lines.write(f"{text}\n")


@app.task(name="loja.falhar")
def fail(text: str = "não há estoque") -> None:
    raise ValueError(text)


@app.task(name="loja.peculiar")
def fail_peculiarly() -> None:
    raise Peculiar("the price", 2)


@app.task(name="loja.objeto")
def return_object() -> object:
    return object()


@app.task(name="loja.tipos")
def return_types() -> dict[str, Any]:
    return {"quando": datetime(2025, 10, 14, 12, tzinfo=UTC), "preço": Decimal("9.90"), "nome": "coração"}


@app.task(name="loja.grande")
def return_much(size: int) -> str:
    return "x" * size


@app.task(name="loja.sem_resultado", ignore_result=True)
def ignore_result() -> str:
    return "answered all the same"


@app.task(name="loja.insistir", bind=True, max_retries=3)
def insist(self: Any, failures: int) -> dict[str, int]:
    if self.request.retries < failures:
        raise self.retry(exc=ConnectionError("the bank is away"), countdown=0.1)
    return {"tentativas": self.request.retries + 1}


@app.task(name="loja.adiar", bind=True)
def put_off(self: Any) -> str:
    if self.request.retries == 0:
        raise self.retry(countdown=0.1)
    return "now"


@app.task(name="loja.trocar", bind=True)
def replace(self: Any, a: int, b: int) -> Any:
    raise self.replace(add.s(a=a, b=b))


@app.task(name="loja.morrer")
def die() -> None:
    os._exit(9)


@app.task(name="loja.limite", time_limit=1)
def exceed_the_limit() -> None:
    time.sleep(60)


@app.task(name="loja.esperar")
def wait_for(path: str, mark: str = "") -> str:
    return _wait_for(path, mark)


@app.task(name="loja.esperar_e_confirmar", acks_late=True)
def wait_and_ack_late(path: str, mark: str = "") -> str:
    return _wait_for(path, mark)


def _wait_for(path: str, mark: str) -> str:
    """Write the process id to `mark`, and return once `path` exists."""
    if mark:
        with Path(mark).open("a") as marks:
            marks.write(f"{os.getpid()}\n")
    while not Path(path).exists():
        time.sleep(0.02)
    return "it came"
