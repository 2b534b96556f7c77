"""`oraculo dlq`: list, show, redrive and discard dead letters."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
import typer

from oraculo.cli import output
from oraculo.cli.bulk import Yes, bulk, confirm
from oraculo.cli.client import Refused, ServerClient, queue_path
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from oraculo.cli.prefixes import whole_dead_letter_id
from oraculo.cli.queues import print_queues
from oraculo.cli.table import Column, print_table
from oraculo.cli.times import moment, moments
from oraculo.errors import InvalidInput, NotFound

app = typer.Typer(no_args_is_help=True, help="Dead letters: list, show, redrive, discard.")

T = TypeVar("T")

_PAGE = 100

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue that the dead letters came from, without .dlq.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="As `dlq list QUEUE` shows it.")]
OptionalId = Annotated[str | None, typer.Argument(metavar="[ID]", help="As `dlq list QUEUE` shows it.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Only these dead letters; all unless given.")]
OptionalQueue = Annotated[
    str | None, typer.Argument(metavar="[QUEUE]", help="The queue that the dead letters came from.")
]


@app.command("list")
def list_dead_letters(
    queue: OptionalQueue = None, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List the queues that have dead letters; with QUEUE, its dead letters, oldest first."""
    with ServerClient(url, api_key) as server:
        if queue is None:
            _list_queues(server, as_json)
        else:
            _list_dead_letters(server, queue, as_json)


def _list_queues(server: ServerClient, as_json: bool) -> None:
    answer = server.get("/filas")
    queues = [each for each in answer["filas"] if each["dlq"]]
    empty = _empty("no dead letters", _warned(_away(answer), "listed"))
    if as_json:
        output.print_json({"filas": queues})
        return
    print_queues(queues, empty=empty)


def _list_dead_letters(server: ServerClient, queue: str, as_json: bool) -> None:
    empty = _empty(f"queue {queue} has no dead letters", _warned(_brokers_away(server), "listed"))
    letters = [each if as_json else _without_body(each) for each in _dead_letters(server, queue)]
    if cut := sum(each.get("corpo_cortado", False) for each in letters):
        output.note(f"the server cuts bodies over 1 MiB: that of {output.counted(cut, 'dead letter')} here")
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


def _without_body(letter: dict[str, Any]) -> dict[str, Any]:
    """Return the letter without its body, which may be large."""
    return {name: value for name, value in letter.items() if name not in ("corpo", "corpo_texto")}


def _brokers_away(server: ServerClient) -> dict[str, Any]:
    """Return the brokers that are away, with the reasons; none when the server may not list its queues."""
    try:
        return _away(server.get("/filas"))
    except Refused:
        return {}


def _away(answer: dict[str, Any]) -> dict[str, Any]:
    """Return those of several brokers that are away, with the reasons: no answer has their dead letters."""
    brokers = answer.get("brokers", ())
    return {each["nome"]: each["problema"] for each in brokers if len(brokers) > 1 and not each["ok"]}


def _warned(away: dict[str, Any], done: str) -> bool:
    for name in away:
        output.note(f"broker {name} is away: its dead letters are not {done}")
    return bool(away)


def _empty(words: str, is_part: bool) -> str:
    return f"{words} at the brokers that work" if is_part else words


def _dead_letters(server: ServerClient, queue: str) -> Iterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        page = server.get(queue_path(queue), limit=_PAGE, cursor=cursor)
        yield from page["mensagens"]
        cursor = page.get("cursor")
        if not cursor:
            return


@app.command()
def show(queue: Queue, letter_id: Id, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show one dead letter with its reason and its body."""
    with ServerClient(url, api_key) as server:
        _warned(_brokers_away(server), "shown")
        letters = {each["id"]: each for each in _dead_letters(server, queue) if each["id"].startswith(letter_id)}
        letter = letters.get(whole_dead_letter_id(letter_id, letters))
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
        if letter.get("corpo_cortado"):
            output.note(f"the body has {letter['corpo_bytes']:,} bytes; the server shows its beginning only")


def _body(letter: dict[str, Any]) -> str:
    if letter.get("corpo") is None:  # it is not JSON
        return str(letter.get("corpo_texto"))
    return json.dumps(letter["corpo"], ensure_ascii=False)


@app.command()
def redrive(
    queue: Queue, ids: Ids = None, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Send dead letters again: all of QUEUE, or those named. A failed task's run is opened again."""
    with ServerClient(url, api_key) as server:
        if ids:
            done = _with_whole_ids(server, queue, ids, lambda whole: _redrive(server, queue, whole))
        else:
            _warned(_brokers_away(server), "sent again")
            done = _redrive(server, queue, None)
        if as_json:
            output.print_json(done)
            return
        output.print_line(
            f"queue {queue}: {output.counted(done['reabertas'], 'task')} opened again, "
            f"{output.counted(done['reenviadas'], 'message')} sent again, "
            f"{output.counted(done['obsoletas'], 'obsolete one')} deleted"
        )


def _redrive(server: ServerClient, queue: str, ids: Sequence[str] | None) -> dict[str, Any]:
    done: dict[str, Any] = server.post(queue_path(queue, "/reenviar"), msgspec.json.encode({"ids": ids} if ids else {}))
    return done


def _with_whole_ids(server: ServerClient, queue: str, ids: Sequence[str], call: Callable[[Sequence[str]], T]) -> T:
    """Call with the ids. When the server does not know one, call again with the ids that they are prefixes of."""
    try:
        return call(ids)
    except Refused as error:
        if error.status != 404:
            raise
        known = [each["id"] for each in _dead_letters(server, queue)]
        whole = [whole_dead_letter_id(each, known) for each in ids]
        if whole == list(ids):
            raise
    return call(whole)


@app.command()
def discard(
    queue: Queue,
    letter_id: OptionalId = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Discard all that QUEUE has now.")] = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Delete one dead letter for good, or with --all every one of QUEUE."""
    if all_of_them == (letter_id is not None):
        raise InvalidInput.at("ID", "give the id of a dead letter, or --all")
    with ServerClient(url, api_key) as server:
        if letter_id is None:
            _discard_all(server, queue, yes, as_json)
            return
        ids = _with_whole_ids(server, queue, [letter_id], lambda whole: _discard(server, queue, whole))
    if as_json:
        output.print_json({"fila": queue, "id": ids[0], "descartada": True})
    else:
        output.print_line(f"queue {queue}: dead letter {ids[0]} discarded")


def _discard(server: ServerClient, queue: str, ids: Sequence[str]) -> Sequence[str]:
    for each in ids:
        server.delete(queue_path(queue, f"/{quote(each, safe='')}"))
    return ids


def _discard_all(server: ServerClient, queue: str, yes: bool, as_json: bool) -> None:
    """Discard the dead letters that are listed now; later ones stay."""
    _warned(_brokers_away(server), "discarded")
    ids = [letter["id"] for letter in _dead_letters(server, queue)]
    if ids:
        confirm(f"Discard {output.counted(len(ids), 'dead letter')} of queue {queue} for good?", yes)
    done = bulk("discarding", ids, lambda each: _discard(server, queue, [each]))
    if as_json:
        output.print_json({"fila": queue, "descartadas": len(done.succeeded), "recusadas": done.refused})
    else:
        output.print_line(f"queue {queue}: {output.counted(len(done.succeeded), 'dead letter')} discarded")
    done.end()
