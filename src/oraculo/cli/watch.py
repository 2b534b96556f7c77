"""`oraculo runs watch`: a run's history as it happens, drawn as a table or told line by line."""

import sys
import time
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from oraculo.cli import output
from oraculo.cli.client import Refused, Server, Unreachable, run_path
from oraculo.cli.progress import Board, TaskRow

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_END = "fim"
_PATIENCE = 30.0  # seconds of a server's absence, a restart say, that a watcher sits out
_PAUSE = 0.5
_BAR_WIDTH = 24
_OTHER_LINES = 6  # of the screen, beside the tasks


class Teller(Protocol):
    def entry(self, entry: dict[str, Any]) -> None: ...
    def end(self, run: dict[str, Any]) -> None: ...


def watch_run(server: Server, run_id: str, *, as_json: bool = False) -> str:
    """Tells what happens until the run ends. Returns its status."""
    board = Board(server.get(run_path(run_id)))
    if as_json:
        return _follow(server, run_id, _Json())
    if not sys.stdout.isatty():
        return _follow(server, run_id, _Lines())
    from rich.live import Live

    with Live(_drawing(board), refresh_per_second=8) as live:
        return _follow(server, run_id, _Picture(board, live))


def _follow(server: Server, run_id: str, teller: Teller) -> str:
    for entry in _entries(server, run_id):
        teller.entry(entry)
    run = server.get(run_path(run_id))
    teller.end(run)
    return str(run["status"])


def _entries(server: Server, run_id: str) -> Iterator[dict[str, Any]]:
    """The history from its start to the run's end, through broken connections: each goes on where the last was cut."""
    seen, alone_since = 0, None
    while True:
        met_at = inf
        try:
            with server.live(run_path(run_id, "/eventos"), seen) as events:
                met_at = time.monotonic()
                for event in events:
                    alone_since = None
                    if event.event == _END:
                        return
                    entry: dict[str, Any] = output.read_json(event.data)
                    seen = entry["seq"]
                    yield entry
        except (Unreachable, Refused) as error:
            if time.monotonic() - met_at > _PAUSE:  # else it is cut as soon as it is made, by something in between
                alone_since = None
            alone_since = alone_since or time.monotonic()
            is_final = isinstance(error, Refused) and error.status < 500
            if is_final or time.monotonic() - alone_since > _PATIENCE:
                raise
        time.sleep(_PAUSE)


class _Json:
    """One object a line: each entry, then the run as it ended."""

    def entry(self, entry: dict[str, Any]) -> None:
        output.print_json(entry, indent=None)
        sys.stdout.flush()

    def end(self, run: dict[str, Any]) -> None:
        output.print_json({"evento": _END, "orquestracao": run}, indent=None)


class _Lines:
    def entry(self, entry: dict[str, Any]) -> None:
        attempt = f"attempt {entry['tentativa']}" if entry["tentativa"] else None
        told = (entry["evento"], entry["tarefa"], attempt, entry["detalhe"])
        clock = output.moment(entry["timestamp"]).rpartition(" ")[2]
        output.print_line(f"{clock} " + "  ".join(str(part) for part in told if part))
        sys.stdout.flush()

    def end(self, run: dict[str, Any]) -> None:
        output.print_line(_ending(run))


class _Picture:
    def __init__(self, board: Board, live: "Live") -> None:
        self._board = board
        self._live = live

    def entry(self, entry: dict[str, Any]) -> None:
        self._board.apply(entry)
        self._live.update(_drawing(self._board, self._live.console.height))

    def end(self, run: dict[str, Any]) -> None:
        from rich.text import Text

        table = _drawing(self._board, self._live.console.height)
        table.caption = Text(output.clean(_ending(run)), style=output.STATUS_STYLES.get(run["status"], ""))
        self._live.update(table)


def _ending(run: dict[str, Any]) -> str:
    tally, took = output.tally(run["resumo"]), output.seconds(run["duracao_ms"])
    return f"run {run['correlation_id']} {run['status']}: {tally} in {took}"


def _drawing(board: Board, height: int = 24) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows, hidden = board.rows(max(3, height - _OTHER_LINES))
    title = Text(output.clean(f"{board.name} · {board.run_id}"))
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("tarefa", "status", "tentativa", "progresso", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(*_cells(row))
    counts = ", ".join(f"{count} {status}" for status, count in board.tally().items())
    table.caption = f"{counts}; {hidden} not shown" if hidden else counts
    return table


def _cells(row: TaskRow) -> Iterator[Any]:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    yield Text(output.clean(row.id))
    yield Text(row.status, style=output.STATUS_STYLES.get(row.status, ""))
    yield Text(str(row.attempt or "-"))
    pulsing = row.status == "em_execucao" and row.percent is None
    yield ProgressBar(total=100, completed=row.percent or 0, width=_BAR_WIDTH, pulse=pulsing)
    yield Text(output.clean(row.note) if row.note else "", overflow="ellipsis", no_wrap=True)
