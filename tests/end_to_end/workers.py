"""The workers that run as processes of their own: each task takes a moment, so that there is a middle to break into."""

import asyncio
import os
from typing import Any

from oraculo.worker import App, Context

app = App("survival")


@app.queue("executador_x")
async def work(payload: dict[str, Any], ctx: Context) -> dict[str, Any]:
    await asyncio.sleep(float(os.environ.get("WORK_SECONDS", "0.02")))
    return {"tarefa": ctx.tarefa, "n": payload["n"]}
