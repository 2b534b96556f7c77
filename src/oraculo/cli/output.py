"""How the command line speaks: lines for people, JSON for programs, one line on stderr for what went wrong."""

import errno
import io
import json
import os
import re
import sys
from contextlib import suppress
from typing import Any

import msgspec

SUCCEEDED = 0
NOT_SUCCEEDED = 1
BAD_USAGE = 2
INTERRUPTED = 130

_NOT_PLAIN = re.compile(r"[^\n -~]")
_DELETE = "\x7f"  # the one control character of ASCII that JSON may have as it is
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


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


class WrittenNumber(float):
    """A number that remembers how it was written: 1.10 is not to become 1.1, nor 1e400 what is no JSON."""

    def __new__(cls, text: str) -> "WrittenNumber":
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def read_json(text: str | bytes) -> Any:
    """For whoever prints it again. Raises ValueError."""
    return json.loads(text, parse_float=WrittenNumber)


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
        case WrittenNumber():
            return msgspec.Raw(value.text.encode())
        case dict():
            return {key: _as_written(each) for key, each in value.items()}
        case list() | tuple():
            return [_as_written(each) for each in value]
    return value


def print_line(text: str) -> None:
    print(clean(text))


def clean(value: object) -> str:
    """One line without control characters: what a worker wrote must not steer the terminal."""
    if value is None:
        return "-"
    text = " ".join(str(value).splitlines())
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def counted(number: int, noun: str) -> str:
    """Return `1 error` or `2 errors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def state_word(state: str) -> str:
    """Return a state of a check in English; `--json` keeps the wire's word."""
    return {"aviso": "warning", "erro": "error", "ignorada": "skipped"}.get(state, state)


def lost(summary: dict[str, Any]) -> str:
    """Return what became of the tasks that did not succeed: `1 error, 2 timeouts, 1 skipped`. Empty when all did."""
    words = {
        "erros": ("error", "errors"),
        "timeouts": ("timeout", "timeouts"),
        "ignoradas": ("skipped", "skipped"),
        "canceladas": ("cancelled", "cancelled"),
    }
    counts = [(summary.get(field, 0), *names) for field, names in words.items()]
    return ", ".join(f"{number} {one if number == 1 else many}" for number, one, many in counts if number)


def done(summary: dict[str, Any]) -> str:
    """Return how many tasks succeeded: `2 of 3`."""
    return f"{summary.get('concluidas', 0)} of {summary.get('total', 0)}"


def tally(summary: dict[str, Any]) -> str:
    """Return `2 of 3 (1 error)`."""
    return f"{done(summary)} ({missed})" if (missed := lost(summary)) else done(summary)
