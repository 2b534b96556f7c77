"""The workers of the crash test: quick, a little uneven, one of them unreliable."""

import asyncio
import hashlib
from typing import Any

from oraculo.worker import App, Context

app = App("crash")


def _chance(ctx: Context) -> int:
    return hashlib.sha256(f"{ctx.correlation_id}{ctx.tarefa}{ctx.tentativa}".encode()).digest()[0]


async def work(payload: dict[str, Any], ctx: Context) -> str:
    ctx.progress(50, "half way")
    await asyncio.sleep(_chance(ctx) / 10_000)
    if ctx.queue == "executador_relatorio" and (ctx.tentativa or 1) < 3 and _chance(ctx) < 80:
        raise RuntimeError("unreliable")
    return ctx.tarefa or ""


@app.executador("quebrado")
async def fail(payload: dict[str, Any]) -> None:
    raise RuntimeError("broken for good")


for queue in ("escavador_youtube", "escavador_blog", "executador_relatorio", "images-queue", "text-queue"):
    app.queue(queue)(work)
for queue in ("voiceover-queue", "captions-queue", "video-queue"):
    app.queue(queue)(work)
