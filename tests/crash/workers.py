"""The workers of the crash test: quick, a little uneven, one of them unreliable."""

import asyncio
import hashlib
import os
from typing import Any

from oraculo.worker import App, Context

app = App("crash")


def _chance(ctx: Context) -> int:
    return hashlib.sha256(f"{ctx.correlation_id}{ctx.tarefa}{ctx.tentativa}".encode()).digest()[0]


def _note(ctx: Context) -> None:
    """One line for each command that was begun, in a file that outlives the process."""
    with open(os.environ["CRASH_JOURNAL"], "a") as journal:
        journal.write(f"{ctx.correlation_id} {ctx.tarefa} {ctx.tentativa}\n")


async def work(payload: dict[str, Any], ctx: Context) -> str:
    _note(ctx)
    ctx.progress(50, "half way")
    await asyncio.sleep(_chance(ctx) / 10_000)
    if ctx.queue == "executador_relatorio" and (ctx.tentativa or 1) < 3 and _chance(ctx) < 80:
        raise RuntimeError("unreliable")
    return ctx.tarefa or ""


@app.executador("quebrado")
async def fail(payload: dict[str, Any], ctx: Context) -> None:
    _note(ctx)
    raise RuntimeError("broken for good")


for queue in ("escavador_youtube", "escavador_blog", "executador_relatorio", "images-queue", "text-queue"):
    app.queue(queue)(work)
for queue in ("voiceover-queue", "captions-queue", "video-queue"):
    app.queue(queue)(work)
