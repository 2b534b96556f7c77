"""`oraculo dlq`: messages in quarantine, why they are there, and what to do with them."""

import json
import shlex
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from oraculo.cli import output
from oraculo.cli.client import Refused, Server, queue_path
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from oraculo.cli.queues import print_queues
from oraculo.cli.table import Column, print_table
from oraculo.cli.times import moment, moments
from oraculo.errors import BrokerUnavailable, NotFound
from oraculo.ports.broker import LETTER_SEPARATOR

app = typer.Typer(no_args_is_help=True, help="Dead letters: list, show, redrive, discard.")

_PAGE = 100

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue they came from, without .dlq.")]
LetterId = Annotated[str, typer.Argument(metavar="ID", help="As `dlq list QUEUE` shows it.")]
LetterIds = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Only these; all unless given.")]
OptionalQueue = Annotated[str | None, typer.Argument(metavar="[QUEUE]", help="The queue they came from.")]


@app.command("list")
def list_letters(
    queue: OptionalQueue = None, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List the queues that have dead letters; with QUEUE, its dead letters, oldest first."""
    with Server(url, api_key) as server:
        if queue is None:
            _list_queues(server, as_json)
        else:
            _list_letters(server, queue, as_json)


def _list_queues(server: Server, as_json: bool) -> None:
    told = server.get("/filas")
    queues = [each for each in told["filas"] if each["dlq"]]
    empty = _empty("no dead letters", _warned(_away(told), "listed"))
    if as_json:
        output.print_json({"filas": queues})
        return
    print_queues(queues, empty=empty)


def _list_letters(server: Server, queue: str, as_json: bool) -> None:
    empty = _empty(f"queue {queue} has no dead letters", _warned(_brokers_away(server), "listed"))
    letters = list(_letters(server, queue))
    if as_json:
        output.print_json({"fila": queue, "mensagens": letters})
        return
    since, times = moments("since", [each["timestamp"] for each in letters])
    columns = (
        Column("id"),
        Column(since, rank=2),
        Column("run", rank=3),
        Column("task", rank=1),
        Column("reason", cut=True),
    )
    rows = [
        (each["id"], time, each["correlation_id"], each["tarefa"], each["motivo"])
        for each, time in zip(letters, times, strict=True)
    ]
    print_table(columns, rows, empty=empty, whole=f"oraculo dlq show {shlex.quote(queue)} ID")


def _brokers_away(server: Server) -> dict[str, Any]:
    """Where the server cannot tell, as when its broker does not let it list the queues, the command is not held up."""
    try:
        return _away(server.get("/filas"))
    except Refused:
        return {}


def _away(told: dict[str, Any]) -> dict[str, Any]:
    """Of several brokers those that are away, and why: what they hold is in no answer of the server. The only one tells
    what it has, if it can."""
    brokers = told.get("brokers", ())
    return {each["nome"]: each["problema"] for each in brokers if len(brokers) > 1 and not each["ok"]}


def _warned(away: dict[str, Any], done: str) -> bool:
    for name in away:
        output.note(f"broker {name} is away: its dead letters are not {done}")
    return bool(away)


def _empty(words: str, is_part: bool) -> str:
    return f"{words} at the brokers that work" if is_part else words


def _letters(server: Server, queue: str) -> Iterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        page = server.get(queue_path(queue), limit=_PAGE, cursor=cursor)
        yield from page["mensagens"]
        cursor = page.get("cursor")
        if not cursor:
            return


@app.command()
def show(
    queue: Queue, letter_id: LetterId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Show one dead letter with its reason and its body."""
    with Server(url, api_key) as server:
        _expect_broker_of(letter_id, _brokers_away(server))
        letter = next((each for each in _letters(server, queue) if each["id"] == letter_id), None)
        if letter is None:
            raise NotFound(f"queue '{queue}' has no dead letter with the id {letter_id}")
        if as_json:
            output.print_json(letter)
            return
        for name, value in (
            ("id", letter["id"]),
            ("reason", letter["motivo"]),
            ("since", moment(letter["timestamp"])),
            ("deliveries", letter["entregas"]),
            ("run", letter["correlation_id"]),
            ("task", letter["tarefa"]),
            ("body", _body(letter)),
        ):
            output.print_line(f"{name}: {output.clean(value)}")


def _expect_broker_of(letter_id: str, away: dict[str, Any]) -> None:
    """As the server does for one that is to be sent again or discarded."""
    for name, why in away.items():
        if letter_id.startswith(name + LETTER_SEPARATOR):
            raise BrokerUnavailable(f"broker {name}, whose dead letter it is, is away: {why}")


def _body(letter: dict[str, Any]) -> str:
    if letter.get("corpo") is None:  # it is no JSON: that is why it is here
        return str(letter.get("corpo_texto"))
    return json.dumps(letter["corpo"], ensure_ascii=False)


@app.command()
def redrive(
    queue: Queue, ids: LetterIds = None, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Try dead letters again: all of QUEUE, or those named. A failed task's run is opened again."""
    body = msgspec.json.encode({"ids": ids} if ids else {})
    with Server(url, api_key) as server:
        if not ids:
            _warned(_brokers_away(server), "sent again")
        done = server.post(queue_path(queue, "/reenviar"), body)
        if as_json:
            output.print_json(done)
            return
        output.print_line(
            f"queue {queue}: {output.counted(done['reabertas'], 'task')} opened again, "
            f"{output.counted(done['reenviadas'], 'message')} sent again, "
            f"{output.counted(done['obsoletas'], 'obsolete one')} deleted"
        )


@app.command()
def discard(
    queue: Queue, letter_id: LetterId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Delete one dead letter for good."""
    with Server(url, api_key) as server:
        server.delete(queue_path(queue, f"/{quote(letter_id, safe='')}"))
    if as_json:
        output.print_json({"fila": queue, "id": letter_id, "descartada": True})
    else:
        output.print_line(f"queue {queue}: dead letter {letter_id} discarded")
