"""What type checkers know of the SDK: `make check` runs mypy on this file, and nobody runs it.

A line with `type: ignore` must be an error: mypy refuses an ignore that nothing needs.
"""

from typing import Any, TypedDict, assert_type

from oraculo.worker import Answer, App, Client, Context

app = App("tipos")


class Pedido(TypedDict):
    fonte: str


@app.escavador("youtube", concurrency=3)
async def collect(payload: Pedido, ctx: Context) -> list[str]:
    assert_type(ctx.correlation_id, str)
    assert_type(payload["fonte"], str)
    return ["a"]


@app.executador("relatorio")
def report(payload: dict[str, Any]) -> Answer:
    return Answer({"arquivo": "relatorio.pdf"})


@app.queue("images-queue")
def plain(payload: dict[str, Any]) -> int:
    return len(payload)


async def decorated_functions_keep_their_types(ctx: Context) -> None:
    assert_type(await collect({"fonte": "x"}, ctx), list[str])
    assert_type(report({}), Answer)
    assert_type(plain({}), int)
    plain("x")  # type: ignore[arg-type]
    report()  # type: ignore[call-arg]


async def runs_are_asked_for(client: Client) -> None:
    assert_type(await client.submit({"tipo": "coleta_completa"}), str)
    await client.submit("coleta_completa")  # type: ignore[arg-type]
