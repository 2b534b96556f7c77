"""What is printed can be trusted: no worker's text steers the terminal, no column is cut in a pipe."""

import errno
import io
import json
import os
import sys

import pytest

from oraculo.cli import output


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    output.note("oraculo: engine e1 is running")
    assert output.complain("it is wrong") == output.BAD_USAGE


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert output.clean("red\x1b[31m\nnext\x07") == "red\ufffd[31m next\ufffd"
    assert output.clean(None) == "-"


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({"total": 3, "concluidas": 3}, "3 of 3"),
        ({"total": 3, "concluidas": 1, "erros": 1, "timeouts": 1}, "1 of 3 (1 error, 1 timeout)"),
        ({"total": 9, "erros": 2, "timeouts": 2, "ignoradas": 1, "canceladas": 4}, None),
    ],
)
def test_what_became_of_tasks_is_counted_in_english(summary: dict[str, int], said: str | None) -> None:
    assert output.tally(summary) == (said or "0 of 9 (2 errors, 2 timeouts, 1 skipped, 4 cancelled)")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_is_json_whatever_the_terminal_can_write(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    output.print_json({"texto": "ação", "grande": 10**30})
    stream.flush()
    assert json.loads(raw.getvalue().decode(encoding)) == {"texto": "ação", "grande": 10**30}


def test_json_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    document = {"texto": "ação 漢😀 \x1b[31m \x9b31m \u202e \x7f \U000e0001", "vazio": ""}
    output.print_json(document)
    assert "\x9b" in capsys.readouterr().out, "whoever reads a pipe gets it as it is"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.print_json(document)
    printed = terminal.getvalue()
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert "ação 漢😀" in printed
    assert json.loads(printed) == document


@pytest.mark.parametrize(("status", "code"), [("concluida", 0), ("parcial", 1), ("erro", 1), ("timeout", 1)])
def test_only_concluida_is_success(status: str, code: int) -> None:
    assert output.exit_status(status) == code
