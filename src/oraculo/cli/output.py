"""How the command line speaks: tables for people, JSON for programs, one line on stderr for what went wrong."""

import errno
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

SUCCEEDED = 0
NOT_SUCCEEDED = 1
BAD_USAGE = 2
INTERRUPTED = 130

_NOT_PLAIN = re.compile(r"[^\n -~]")
_DELETE = "\x7f"  # the one control character of ASCII that JSON may have as it is
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

STATUS_STYLES = {
    "concluida": "green",
    "em_execucao": "cyan",
    "pendente": "dim",
    "parcial": "yellow",
    "erro": "red",
    "timeout": "red",
    "ignorada": "dim",
    "cancelada": "yellow",
    "ok": "green",
    "aviso": "yellow",
}

Row = Sequence[object]


def mend_streams() -> None:
    """One that was closed (`>&-`) leads nowhere: else a socket or a file would get its number, and what is told there.
    What the encoding of the output lacks is shown by its code."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(message: str) -> int:
    """Tells on stderr, and returns the exit status of bad usage."""
    note(f"oraculo: {message}")
    return BAD_USAGE


def give_up(error: OSError) -> int:
    """Tells that nothing more can be written, and returns the exit status. Raises what is not about the output."""
    if error.errno not in _UNWRITABLE or error.filename is not None:
        raise error
    # What is left in the buffer is written at the exit, and would fail again there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # whoever read it has seen enough
        return NOT_SUCCEEDED
    return complain(f"the output cannot be written: {error.strerror}")


def note(message: str) -> None:
    """Worth knowing, but not the data which was asked for. Where it cannot be written, all else goes on."""
    with suppress(OSError):
        print(clean(message), file=sys.stderr)


def exit_status(run_status: object) -> int:
    return SUCCEEDED if run_status == "concluida" else NOT_SUCCEEDED


class Written(float):
    """A number that remembers how it was written: 1.10 is not to become 1.1, nor 1e400 what is no JSON."""

    def __new__(cls, text: str) -> "Written":
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def read_json(text: str | bytes) -> Any:
    """For whoever prints it again. Raises ValueError."""
    return json.loads(text, parse_float=Written)


def print_json(document: object, *, indent: int | None = 2) -> None:
    try:
        text = msgspec.json.format(msgspec.json.encode(_as_written(document)), indent=indent or 0).decode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in the name of a file that is not UTF-8
        text = json.dumps(document, indent=indent)
    can_write_all = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    if not can_write_all or sys.stdout.isatty():  # what a worker wrote must not steer a terminal
        text = _NOT_PLAIN.sub(
            lambda char: char[0] if can_write_all and char[0].isprintable() else _escaped(char[0]), text
        )
    print(text)


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1] if char > _DELETE else f"\\u{ord(char):04x}"


def _as_written(value: object) -> object:
    match value:
        case Written():
            return msgspec.Raw(value.text.encode())
        case dict():
            return {key: _as_written(each) for key, each in value.items()}
        case list() | tuple():
            return [_as_written(each) for each in value]
    return value


def print_line(text: str) -> None:
    print(clean(text))


def print_table(columns: Sequence[str], rows: Sequence[Row], *, empty: str) -> None:
    """On a terminal a rich table; else plain columns that are never cut, for `grep` and `awk`."""
    texts = [[clean(cell) for cell in row] for row in rows]
    if not texts:
        note(empty)
    elif sys.stdout.isatty():
        _print_rich(columns, texts)
    else:
        _print_plain(columns, texts)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        # The first is what one copies into the next command: it is never cut.
        whole = max(len(row[0]) for row in rows) if number == 0 else None
        table.add_column(column, overflow="fold", min_width=whole)
    for row in rows:
        table.add_row(*(Text(cell, style=STATUS_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def clean(value: object) -> str:
    """One line without control characters: what a worker wrote must not steer the terminal."""
    if value is None:
        return "-"
    text = " ".join(str(value).splitlines())
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def moment(iso: str | None) -> str:
    """In the reader's own time zone, to the second; without the date when it is today's."""
    if iso is None:
        return "-"
    when, now = datetime.fromisoformat(iso).astimezone(), datetime.now().astimezone()
    return when.strftime("%H:%M:%S" if when.date() == now.date() else "%Y-%m-%d %H:%M:%S")


def seconds(milliseconds: int | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds / 1000:.1f} s"


def tally(summary: dict[str, Any]) -> str:
    """`2 of 3`, and what became of the others."""
    others = ("erros", "timeouts", "ignoradas", "canceladas")
    lost = ", ".join(f"{summary[word]} {word}" for word in others if summary.get(word))
    done = f"{summary.get('concluidas', 0)} of {summary.get('total', 0)}"
    return f"{done} ({lost})" if lost else done
