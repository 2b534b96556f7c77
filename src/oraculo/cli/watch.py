"""`oraculo runs watch`: a run's history as it happens, as a live table, as lines or as JSON."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from oraculo.cli import output
from oraculo.cli.client import Refused, ServerClient, Unreachable, run_path
from oraculo.cli.progress import Board, TaskRow
from oraculo.cli.run_table import phase
from oraculo.cli.table import Column, fit, remark
from oraculo.cli.times import clock, duration, localized
from oraculo.errors import OraculoError

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions
    from rich.text import Text

_END = "fim"
_PATIENCE = 30.0  # seconds that a server may be away, for a restart
_PAUSE = 0.5
_LOOK_EVERY = 1.0  # seconds
_MOST_LOOKED_AT = 500  # tasks of a run whose phases are read; a wider run takes too long
_BAR_WIDTH = 10
_COLUMNS = (
    Column("task"),
    Column("status"),
    Column("attempt", rank=2),
    Column("progress", rank=1),
    Column("note", cut=True),
)
_OTHER_LINES = 7  # of the screen, beside the tasks


class Printer(Protocol):
    def entry(self, entry: dict[str, Any]) -> None: ...
    def end(self, run: dict[str, Any]) -> None: ...


def watch_run(server: ServerClient, run: dict[str, Any], *, as_json: bool = False) -> str:
    """Show what happens until the run ends, and return its status."""
    run_id = run["correlation_id"]
    if as_json:
        return _follow(server, run_id, _Json())
    if not sys.stdout.isatty():
        return _follow(server, run_id, _Lines())
    with _LiveTable(server, run) as table:
        return _follow(server, run_id, table)


@contextmanager
def live_table(server: ServerClient, run_id: str) -> Iterator[None]:
    """Draw the run's tasks on a terminal while the caller waits for its end. The drawing is removed at the end."""

    def follow() -> None:
        with suppress(Exception):  # the caller sees faults too, and closes the connection of this thread
            _follow(server, run_id, table)

    try:
        table = _LiveTable(server, server.get(run_path(run_id)), transient=True)
    except OraculoError:
        yield
        return
    with table:
        threading.Thread(target=follow, daemon=True).start()
        yield


def _follow(server: ServerClient, run_id: str, printer: Printer) -> str:
    for entry in _entries(server, run_id):
        printer.entry(entry)
    run = server.get(run_path(run_id))
    printer.end(run)
    return str(run["status"])


def _entries(server: ServerClient, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the history from the start to the run's end, and reconnect where a connection broke."""
    seen, alone_since = 0, None
    while True:
        try:
            with server.live(run_path(run_id, "/eventos"), seen) as events:
                alone_since = None
                for event in events:
                    if event.event == _END:
                        return
                    entry: dict[str, Any] = json.loads(event.data)
                    seen = entry["seq"]
                    yield entry
        except (Unreachable, Refused) as error:
            alone_since = alone_since or time.monotonic()
            is_final = isinstance(error, Refused) and error.status < 500
            if is_final or time.monotonic() - alone_since > _PATIENCE:
                raise
        time.sleep(_PAUSE)


class _Json:
    """Prints one JSON object a line: each entry, then the ended run."""

    def entry(self, entry: dict[str, Any]) -> None:
        output.print_json(entry, indent=None)
        sys.stdout.flush()

    def end(self, run: dict[str, Any]) -> None:
        output.print_json({"evento": _END, "orquestracao": run}, indent=None)


class _Lines:
    def entry(self, entry: dict[str, Any]) -> None:
        attempt = f"attempt {entry['tentativa']}" if entry["tentativa"] else None
        parts = (entry["evento"], entry["tarefa"], attempt, entry["detalhe"] and localized(entry["detalhe"]))
        output.print_line(f"{clock(entry['timestamp'])} " + "  ".join(str(part) for part in parts if part))
        sys.stdout.flush()

    def end(self, run: dict[str, Any]) -> None:
        output.print_line(_ending(run))


class _LiveTable:
    """A live table of the tasks. The history has no phases, so the run is read again every second."""

    def __init__(self, server: ServerClient, run: dict[str, Any], *, transient: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live

        self._server = server
        self._board = Board(run)
        self._ending: str | None = None
        self._over = threading.Event()
        self._console = Console()
        self._live = Live(
            get_renderable=lambda: drawing(self._board, self._console.size, self._ending),
            console=self._console,
            refresh_per_second=8,
            transient=transient,
        )

    def __enter__(self) -> "_LiveTable":
        self._live.start(refresh=True)
        if len(self._board) <= _MOST_LOOKED_AT:
            threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        self._live.stop()

    def entry(self, entry: dict[str, Any]) -> None:
        self._board.apply(entry)

    def end(self, run: dict[str, Any]) -> None:
        self._over.set()
        self._ending = _ending(run)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            with suppress(Exception):  # the next look may work; the history shows the run's end
                for task in self._server.get(run_path(self._board.run_id))["tarefas"]:
                    self._board.show_phase(task["id"], task["tentativas"], phase(task))


def _ending(run: dict[str, Any]) -> str:
    tally, took = output.tally(run["resumo"]), duration(run["duracao_ms"])
    return f"run {run['correlation_id']} {run['status']}: {tally} in {took}"


def drawing(board: Board, size: "ConsoleDimensions", ending: str | None = None) -> "Text":
    """Return a table of the tasks for a screen of that size, with the number of tasks in each status below it."""
    from rich.text import Text

    rows, hidden = board.rows(max(3, size.height - _OTHER_LINES))
    fitted = fit(_COLUMNS, [[output.clean(cell) for cell in _cells(row)] for row in rows], size.width)
    counts = ", ".join(f"{count} {status}" for status, count in board.tally().items())
    counts += f"; {output.counted(hidden, 'task')} not shown" if hidden else ""
    lines = [Text(output.clean(f"{board.name} · {board.run_id}"), style="italic"), *fitted.lines]
    lines += [Text(line, style="dim") for line in (remark(fitted, "oraculo runs show ID"), ending or counts) if line]
    return Text("\n").join(lines)


def _cells(row: TaskRow) -> Iterator[object]:
    yield row.id
    yield row.status
    yield row.attempt or None
    yield None if row.percent is None else f"{_bar(row.percent)} {row.percent:.0f} %"
    yield "; ".join(part for part in (row.phase, row.note) if part) or None


def _bar(percent: float) -> str:
    full = int(_BAR_WIDTH * percent / 100)
    return "━" * full + "┄" * (_BAR_WIDTH - full)
