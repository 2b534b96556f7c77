"""Workers for the tests of the engine: they keep a journal of what they did."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from oraculo.worker import App, Context, DoNotRetry

VIDEO_QUEUES = ("images-queue", "text-queue", "voiceover-queue", "captions-queue", "video-queue")


@dataclass
class Journal:
    """`lines` holds (what, task) in the order in which it happened: `start` and `end` of each task."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    seen: list[Context] = field(default_factory=list)

    def position(self, what: str, task: str) -> int:
        return self.lines.index((what, task))


def recording_app(journal: Journal, queues: tuple[str, ...], *, pause: float = 0.0) -> App:
    app = App("recording")

    async def work(payload: dict[str, Any], ctx: Context) -> dict[str, Any]:
        journal.seen.append(ctx)
        journal.lines.append(("start", ctx.tarefa or ""))
        await asyncio.sleep(pause)
        journal.lines.append(("end", ctx.tarefa or ""))
        return {"tarefa": ctx.tarefa, "recebido": payload}

    for queue in queues:
        app.queue(queue)(work)
    return app


def failing_app(queue: str, *, failures: int | None, journal: Journal | None = None, for_good: bool = False) -> App:
    """Fails the first `failures` attempts; None: always, while `app.broken` is true."""
    app = App("failing")
    app.broken = True  # type: ignore[attr-defined]

    @app.queue(queue)
    async def work(payload: dict[str, Any], ctx: Context) -> str:
        if journal is not None:
            journal.seen.append(ctx)
        fails = app.broken if failures is None else (ctx.tentativa or 1) <= failures  # type: ignore[attr-defined]
        if fails:
            raise (DoNotRetry if for_good else RuntimeError)(f"broken at attempt {ctx.tentativa}")
        return "mended"

    return app


def answer(run_id: str, **fields: Any) -> dict[str, Any]:
    """What a worker without the SDK publishes: the required fields, and whatever the test adds."""
    message = {
        "correlation_id": run_id,
        "tipo_evento": "resultado_coleta",
        "payload": {"status": "ok"},
        "timestamp": "2026-01-01T00:00:00Z",
    }
    return message | fields
