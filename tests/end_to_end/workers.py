"""The workers that run as processes of their own: each task takes a moment, and the last of them wait while the file
`WORK_HELD` is there, so that there is a middle to break into. The one that `WORK_DEADLY` names ends its process."""

import asyncio
import os
from pathlib import Path
from typing import Any

from oraculo.worker import App, Context

HELD_FROM = int(os.environ.get("WORK_HELD_FROM", "750"))  # of a thousand

app = App("survival")


@app.queue("executador_x")
async def work(payload: dict[str, Any], ctx: Context) -> dict[str, Any]:
    if str(payload["n"]) == os.environ.get("WORK_DEADLY"):
        os._exit(9)
    await asyncio.sleep(float(os.environ.get("WORK_SECONDS", "0.02")))
    while payload["n"] >= HELD_FROM and Path(os.environ.get("WORK_HELD", "nothing")).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)
    return {"tarefa": ctx.tarefa, "n": payload["n"]}
