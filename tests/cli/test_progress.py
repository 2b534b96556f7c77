"""What `runs watch` follows, and the board that it draws out of entries of a run's history."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from oraculo.cli import watch
from oraculo.cli.client import Unreachable
from oraculo.cli.progress import Board


def board(*ids: str) -> Board:
    tasks = [{"id": each, "fila": f"{each}-queue"} for each in ids]
    return Board({"correlation_id": "r", "pipeline": None, "tarefas": tasks})


def entry(event: str, task: str | None = "a", attempt: int | None = 1, detail: str | None = None) -> dict[str, Any]:
    return {"evento": event, "tarefa": task, "tentativa": attempt, "detalhe": detail}


def test_a_task_goes_from_waiting_to_done() -> None:
    said = board("a")
    (row,), _ = said.rows(9)
    assert (row.status, row.attempt, row.percent) == ("pendente", 0, None)
    said.apply(entry("tarefa_enviada"))
    assert (row.status, row.attempt) == ("em_execucao", 1)
    said.apply(entry("progresso", detail="12.5 % lendo 3 % do todo"))
    assert (row.percent, row.note) == (12.5, "lendo 3 % do todo")
    said.apply(entry("progresso", detail="só texto"))
    assert (row.percent, row.note) == (12.5, "só texto")
    said.apply(entry("tarefa_concluida"))
    assert (row.status, row.percent, row.note) == ("concluida", 100.0, "")


@pytest.mark.parametrize("percent", [0.0, 1e-05, 0.000123456, 7.0, 99.9999, 100.0])
def test_every_percentage_that_the_history_shows_is_drawn(percent: float) -> None:
    said = board("a")
    (row,), _ = said.rows(9)
    said.apply(entry("progresso", detail=f"{percent:g} % feito"))
    assert (row.percent, row.note) == (percent, "feito")


@pytest.mark.parametrize("text", ["10-20 % done", "1.2.3 % x", "e % x", "- %", "1e+999 % x"])
def test_a_text_that_begins_like_a_percentage_is_text(text: str) -> None:
    said = board("a")
    (row,), _ = said.rows(9)
    said.apply(entry("progresso", detail=text))
    assert (row.percent, row.note) == (None, text)


def test_a_failed_attempt_shows_why_and_the_next_begins_anew() -> None:
    said = board("a")
    (row,), _ = said.rows(9)
    said.apply(entry("progresso", detail="50 %"))
    said.apply(entry("tentativa_falhou", detail="boom"))
    assert (row.status, row.percent, row.note) == ("em_execucao", None, "boom")
    said.apply(entry("tarefa_enviada", attempt=2))
    assert (row.attempt, row.note) == (2, "")
    said.apply(entry("tarefa_erro", attempt=2, detail="for good"))
    assert (row.status, row.note) == ("erro", "for good")
    said.apply(entry("tarefa_reaberta", attempt=2))
    assert row.status == "pendente"


def test_what_concerns_no_task_changes_none() -> None:
    said = board("a")
    said.apply(entry("orquestracao_iniciada", task=None, attempt=None))
    assert said.tally() == {"pendente": 1}


def test_when_not_all_fit_those_in_work_come_first() -> None:
    said = board("a", "b", "c", "d")
    said.apply(entry("tarefa_concluida", task="a"))
    said.apply(entry("tarefa_enviada", task="c"))
    shown, hidden = said.rows(3)
    assert [row.id for row in shown] == ["c", "b", "d"]
    assert hidden == 1
    assert said.tally() == {"concluida": 1, "pendente": 2, "em_execucao": 1}


class Interrupted:
    """A quiet run's server, and the clock: the first connections are cut, each after some time without an event."""

    def __init__(self, cuts: int, after: float = 120) -> None:
        self._cuts = cuts
        self._after = after
        self._now = 0.0

    @contextmanager
    def live(self, _path: str, _after: int) -> Iterator[Iterator[Any]]:
        yield self._events()

    def _events(self) -> Iterator[Any]:
        if self._cuts:
            self._cuts -= 1
            self._now += self._after
            raise Unreachable("cut", was_reached=True)
        yield SimpleNamespace(event="fim", data="{}")

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def test_a_quiet_run_is_watched_through_every_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Interrupted(cuts=3)
    monkeypatch.setattr(watch, "time", server)
    assert list(watch._entries(server, "r")) == []
