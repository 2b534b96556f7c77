"""Tables on a terminal lose and falsify nothing: what has no room is named, and no id is ever broken."""

import io
import sys

import pytest

from oraculo.cli.table import Column, Fitted, fit, print_table

RUN = "0193f0aa-1111-7222-8333-444455556666"
COLUMNS = (Column("id"), Column("status"), Column("took", rank=1), Column("pipeline", rank=2))
ROWS = [[RUN, "em_execucao", "1 min 3 s", "promotional-video-full"], [RUN, "erro", "-", "-"]]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal_of_60(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    return terminal


def lines(fitted: Fitted) -> list[str]:
    return [line.plain for line in fitted.lines]


def test_a_column_that_has_no_room_is_left_out_by_its_rank_and_named() -> None:
    assert fit(COLUMNS, ROWS, 100).missing == []
    assert fit(COLUMNS, ROWS, 80).missing == ["pipeline"]
    narrow = fit(COLUMNS, ROWS, 55)
    assert narrow.missing == ["took", "pipeline"]
    assert lines(narrow) == [f"{'id':36}  status", f"{RUN}  em_execucao", f"{RUN}  erro"]


def test_what_may_not_be_left_out_is_whole_on_the_narrowest_terminal() -> None:
    assert lines(fit(COLUMNS, ROWS, 20))[1] == f"{RUN}  em_execucao"


def test_prose_is_wrapped_between_words_and_no_id_in_it_is_broken() -> None:
    columns = (Column("task"), Column("reason", prose=True))
    row = ["escavador_youtube", f"run {RUN} was refused by the worker, three times in a row"]
    for width in (80, 60, 45):
        laid = lines(fit(columns, [row], width))
        assert all(len(line) <= width for line in laid)
        assert " ".join(" ".join(laid).split()).endswith(" ".join(row))
        assert any(RUN in line for line in laid)
    assert lines(fit(columns, [row], 45))[:3] == ["task", "  reason", "escavador_youtube"], "prose stands below"


def test_a_cut_value_says_so_and_stays_on_its_line() -> None:
    columns = (Column("id"), Column("reason", cut=True))
    fitted = fit(columns, [["7", "failed " * 30], ["8", "gone"]], 40)
    assert fitted.shortened == "reason"
    assert [len(line) <= 40 for line in lines(fitted)] == [True] * 3
    assert lines(fitted)[1].endswith("…")
    assert fit(columns, [["8", "gone"]], 40).shortened is None


def test_the_moment_of_the_next_attempt_is_whole_at_80_columns() -> None:
    """In the drawing of `watch`, where another column goes for it."""
    note = "next attempt 14:03:05 CET"
    columns = (Column("task"), Column("status"), Column("attempt", rank=2), Column("progress", rank=1))
    row = ["executador_relatorio", "em_execucao", "2", "━━━━━━━━━━ 100 %", note]
    fitted = fit((*columns, Column("note", cut=True)), [row], 80)
    assert lines(fitted)[1].endswith(note)
    assert fitted.missing == ["attempt"]


def test_wide_characters_take_two_cells() -> None:
    fitted = fit((Column("task"), Column("status")), [["漢字漢字", "ok"], ["abc", "ok"]], 80)
    assert lines(fitted)[1:] == ["漢字漢字  ok", "abc       ok"]


def test_a_table_in_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table((Column("a", rank=1), Column("b", cut=True)), [("x" * 300, "y" * 300), ("y", None)], empty="none")
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["a", "b"]
    assert first.split() == ["x" * 300, "y" * 300]
    assert second.split() == ["y", "-"]


def test_a_terminal_learns_what_is_left_out_and_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of_60(monkeypatch)
    print_table(COLUMNS, ROWS, empty="none", whole="oraculo runs show ID")
    assert "left out: pipeline; all with: oraculo runs show ID" in terminal.getvalue().splitlines()[-1]


def test_what_a_worker_wrote_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of_60(monkeypatch)
    print_table((Column("id"), Column("reason", prose=True)), [("1", "[bold]why[/bold] \x1b[31m")], empty="none")
    assert "[bold]why[/bold] \ufffd[31m" in terminal.getvalue()
