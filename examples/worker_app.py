"""A worker with one collector and one processor.

Serve it with `oraculo worker examples.worker_app:app`, or run this file: it sends itself one command for each queue
over a broker in memory, and prints the answers.
"""

import asyncio
from typing import Any

import msgspec

from oraculo.worker import Answer, App, Context, DoNotRetry, Worker

app = App("exemplo")


@app.escavador("youtube")
async def collect(payload: dict[str, Any]) -> list[dict[str, str]]:
    """What it returns is sent as `dados`."""
    term = payload.get("parametros", {}).get("termo")
    if not term:
        raise DoNotRetry("parametros.termo is missing")
    return [{"titulo": f"{term} {number}"} for number in (1, 2, 3)]


class Report(msgspec.Struct):
    titulo: str
    itens: list[str] = []


@app.executador("relatorio", concurrency=2)
def write_report(report: Report, ctx: Context) -> Answer:
    """A plain function runs in a thread. The payload is read as a `Report`, and what does not fit is refused."""
    for number, item in enumerate(report.itens, start=1):
        ctx.progress(100 * number / len(report.itens), f"wrote {item}")
    return Answer({"resultado": "ok", "arquivo": f"relatorio-{report.titulo.lower()}.pdf"})


async def demonstrate() -> None:
    from oraculo.brokers.memory import MemoryBroker
    from oraculo.ports.broker import Outgoing
    from oraculo.ports.clock import SystemClock

    commands = {
        "escavador_youtube": {"parametros": {"termo": "gatos"}},
        "executador_relatorio": {"titulo": "Gatos", "itens": ["capa", "texto"]},
    }
    broker = MemoryBroker(clock=SystemClock())
    await broker.start()
    for queue, payload in commands.items():
        message = {
            "correlation_id": "demo",
            "tipo_evento": "iniciar_coleta" if queue.startswith("escavador") else "iniciar_execucao",
            "payload": payload,
            "timestamp": "2025-10-14T12:00:00Z",
        }
        await broker.publish([Outgoing(queue, msgspec.json.encode(message))])
    answers = await broker.consume("resultados", prefetch=10)
    async with Worker(app, broker):
        awaited = len(commands)
        while awaited:
            for delivery in await answers.take(10):
                print(delivery.body.decode())
                awaited -= b'"progresso"' not in delivery.body
    await broker.close()


if __name__ == "__main__":
    asyncio.run(demonstrate())
