"""The `oraculo.worker.App` whose handlers the tests run in Celery workers."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from oraculo.worker import App, Context, DoNotRetry

app = App("em-celery")


@app.escavador("youtube")
async def collect(payload: dict[str, Any], ctx: Context) -> dict[str, Any]:
    await asyncio.sleep(0)
    ctx.progress(50, "half way")
    return {"payload": payload, "tarefa": ctx.tarefa, "pid": os.getpid()}


@app.executador("relatorio")
def report(payload: dict[str, Any]) -> dict[str, Any]:
    return {"arquivo": "relatorio.pdf", "pid": os.getpid()}


@app.executador("falha")
def fail(payload: dict[str, Any]) -> None:
    raise DoNotRetry("no paper") if payload.get("final") else ValueError("no ink")


@app.executador("espera")
def wait(payload: dict[str, Any]) -> str:
    """Write the process id to a file, and return once another file exists."""
    with Path(payload["mark"]).open("a") as marks:
        marks.write(f"{os.getpid()}\n")
    while not Path(payload["path"]).exists():
        time.sleep(0.02)
    return "it came"


@app.executador("espera_async")
async def wait_async(payload: dict[str, Any]) -> None:
    await asyncio.sleep(60)


@app.queue("executador_um", concurrency=1)
def one_at_a_time(payload: dict[str, Any]) -> dict[str, float]:
    began = time.time()
    time.sleep(0.2)
    return {"began": began, "ended": time.time()}
