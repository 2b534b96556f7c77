"""`oraculo queues`: messages, consumers and dead letters of each queue."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from oraculo.cli import output
from oraculo.cli.client import ServerClient
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from oraculo.cli.table import Column, print_table
from oraculo.errors import NotFound
from oraculo.wire.naming import nearest

app = typer.Typer(no_args_is_help=True, help="Queues: list, show.")

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="As `queues list` shows it.")]


@app.command("list")
def list_queues(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the queues: messages waiting, consumers and dead letters."""
    with ServerClient(url, api_key) as server:
        answer = server.get("/filas")
        if as_json:
            output.print_json(answer)
            return
        print_queues(answer["filas"], empty="no queues")
        for broker in answer.get("brokers", ()):
            if not broker["ok"]:
                output.note(f"broker {broker['nome']} is away: {broker['problema']}")


@app.command()
def show(queue: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show one queue."""
    with ServerClient(url, api_key) as server:
        queues = {each["fila"]: each for each in server.get("/filas")["filas"]}
        if queue not in queues:
            raise NotFound(f"there is no queue '{queue}'{nearest(queue, queues)}")
        if as_json:
            output.print_json(queues[queue])
            return
        for name, value in zip(_NAMES, _row(queues[queue]), strict=True):
            output.print_line(f"{name}: {output.clean(value)}")
        if queues[queue]["dlq"]:
            output.note(f"see the reasons of its dead letters with: oraculo dlq list {queue}")


_NAMES = ("queue", "waiting", "in work", "consumers", "dead letters")


def print_queues(queues: Sequence[Mapping[str, Any]], *, empty: str) -> None:
    ranks = (0, 1, 3, 2, 0)
    columns = [Column(name, rank=rank) for name, rank in zip(_NAMES, ranks, strict=True)]
    print_table(columns, [_row(queue) for queue in queues], empty=empty)


def _row(queue: Mapping[str, Any]) -> Sequence[object]:
    """Return the cells of a queue; None for a number that the broker does not count."""
    return tuple(queue[field] for field in ("fila", "mensagens", "em_processamento", "consumidores", "dlq"))
