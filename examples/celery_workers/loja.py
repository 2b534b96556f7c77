"""A Celery app as a team has it already: nothing in it knows of ORÁCULO.

celery -A loja worker
"""

import os
from typing import Any

from celery import Celery

app = Celery("loja", broker=os.environ.get("CELERY_BROKER_URL", "pyamqp://guest@localhost//"))
app.conf.task_default_queue = os.environ.get("LOJA_QUEUE", "celery")


@app.task(name="loja.precos")
def fetch_prices(produto: str, moeda: str = "BRL") -> dict[str, Any]:
    return {"produto": produto, "preco": 9.9, "moeda": moeda}


@app.task(name="loja.estoque", bind=True, max_retries=3)
def count_stock(self: Any, produto: str) -> dict[str, Any]:
    """Its own retries are its own affair: only the last failure is told."""
    if self.request.retries < 1:
        raise self.retry(exc=ConnectionError("the warehouse is away"), countdown=0.1)
    return {"produto": produto, "unidades": 3}


@app.task(name="loja.anuncio")
def write_advert(passo: dict[str, Any]) -> str:
    """Given the whole payload: the run's own and the results of the steps before."""
    price = passo["resultados"]["precos"]["resultado"]
    stock = passo["resultados"]["estoque"]["resultado"]
    return f"{passo['entrada']['titulo']}: {price['preco']} {price['moeda']}, {stock['unidades']} left"
