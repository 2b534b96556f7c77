"""Functions that print: lines for people, JSON for programs, and one line on stderr for what went wrong."""

import json
import os
import sys
from contextlib import suppress
from typing import Any

SUCCEEDED = 0
NOT_SUCCEEDED = 1
BAD_USAGE = 2
INTERRUPTED = 130

_DELETE = "\x7f"  # the one control character of ASCII that `json` leaves as it is


def complain(message: str) -> int:
    """Print what is wrong on stderr, and return the exit status of bad usage."""
    note(f"oraculo: {message}")
    return BAD_USAGE


def stop_writing() -> int:
    """Return the exit status for a pipe whose reader has seen enough, as `head` has."""
    # Python flushes its buffer at the exit, and would fail again there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return NOT_SUCCEEDED


def note(message: str) -> None:
    """Print a remark on stderr. A server whose stderr cannot be written goes on."""
    with suppress(OSError):
        print(clean(message), file=sys.stderr)


def exit_status(run_status: object) -> int:
    return SUCCEEDED if run_status == "concluida" else NOT_SUCCEEDED


def print_json(document: object, *, indent: int | None = 2) -> None:
    is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    text = json.dumps(document, indent=indent, ensure_ascii=not is_utf8)
    if sys.stdout.isatty():  # a worker's text must not steer a terminal
        text = "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)
    print(text)


def _escaped(char: str) -> str:
    return "\\u007f" if char == _DELETE else json.dumps(char)[1:-1]


def print_line(text: str) -> None:
    print(clean(text))


def clean(value: object) -> str:
    """Return the value as one line without control characters: a worker's text must not steer a terminal."""
    if value is None:
        return "-"
    text = " ".join(str(value).splitlines())
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def counted(number: int, noun: str) -> str:
    """Return `1 error` or `2 errors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def state_word(state: str) -> str:
    """Return the state of a check in English. `--json` keeps the wire's word."""
    return {"aviso": "warning", "erro": "error", "ignorada": "skipped"}.get(state, state)


def lost(summary: dict[str, Any]) -> str:
    """Return the tasks that did not succeed, counted: `1 error, 2 timeouts, 1 skipped`. Empty when all did."""
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
