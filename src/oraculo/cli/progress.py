"""The state of a run's tasks, computed from the entries of its history."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

# The number as `f"{percent:g}"` writes one from 0 to 100; "10-20 % done" is a worker's own text.
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?(?:e-[0-9]+)?) % ?(.*)", re.DOTALL)

# The status that a task has after an entry of this kind; the other kinds leave it as it is.
STATUS_AFTER = {
    "tarefa_enviada": "em_execucao",
    "progresso": "em_execucao",
    "tarefa_concluida": "concluida",
    "tarefa_erro": "erro",
    "tarefa_timeout": "timeout",
    "tarefa_ignorada": "ignorada",
    "tarefa_cancelada": "cancelada",
    "tarefa_reaberta": "pendente",
    "resposta_tardia_aceita": "concluida",
}
OPEN = ("pendente", "em_execucao")


class TaskRow(msgspec.Struct):
    id: str
    queue: str
    status: str = "pendente"
    attempt: int = 0
    percent: float | None = None
    note: str = ""
    phase: str | None = None  # of an open task, as the server last reported it

    def apply(self, entry: Mapping[str, Any]) -> None:
        event, detail = entry["evento"], entry["detalhe"] or ""
        self.status = STATUS_AFTER.get(event, self.status)
        self.attempt = max(self.attempt, entry["tentativa"] or 0)
        if event in STATUS_AFTER or event == "tentativa_falhou":
            self.phase = None
        if event == "progresso":
            self._take_progress(detail)
        elif event in STATUS_AFTER:
            self.percent = 100.0 if self.status == "concluida" else None
            self.note = detail
        elif event == "tentativa_falhou":
            self.percent, self.note = None, detail

    def _take_progress(self, detail: str) -> None:
        found = _PERCENT.fullmatch(detail)
        if found is None:
            self.note = detail
        else:
            self.percent, self.note = float(found[1]), found[2]


class Board:
    """The tasks of a run as the API lists them, brought up to date by its history from the start."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        self.run_id: str = run["correlation_id"]
        self.name: str = run["pipeline"] or "fan-out"
        self._rows = {task["id"]: TaskRow(task["id"], task["fila"]) for task in run["tarefas"]}

    def apply(self, entry: Mapping[str, Any]) -> None:
        if (row := self._rows.get(entry["tarefa"])) is not None:
            row.apply(entry)

    def __len__(self) -> int:
        return len(self._rows)

    def show_phase(self, task: str, attempt: int, phase: str | None) -> None:
        """Set a task's phase, unless its history has a later attempt."""
        row = self._rows[task]
        if row.status in OPEN and attempt >= row.attempt:
            row.phase = phase

    def rows(self, limit: int) -> tuple[Sequence[TaskRow], int]:
        """Return up to `limit` tasks, those in work first, and the number of the others."""
        rows = list(self._rows.values())
        if len(rows) <= limit:
            return rows, 0
        rows.sort(key=lambda row: (row.status != "em_execucao", row.status not in OPEN))
        return rows[:limit], len(rows) - limit

    def tally(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for row in self._rows.values():
            counts[row.status] = counts.get(row.status, 0) + 1
        return counts
