"""Tables of runs, and of one run with its tasks or its aggregate."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from oraculo.cli import output
from oraculo.cli.table import Column, print_table
from oraculo.cli.times import duration, localized, moment, moments

_LONGEST_ANSWER = 160
_PHASES = {"na_fila": "in the queue", "em_trabalho": "at work"}


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    started, times = moments("started", [run["iniciada_em"] for run in runs])
    columns = (
        Column("id"),
        Column("status"),
        Column("tasks", rank=1),
        Column(started, rank=2),
        Column("took", rank=3),
        Column("pipeline", rank=4),
        Column("not succeeded", rank=5),
    )
    rows = [
        (
            run["correlation_id"],
            run["status"],
            output.done(run["resumo"]),
            time,
            duration(run["duracao_ms"]),
            run["pipeline"],
            output.lost(run["resumo"]) or None,
        )
        for run, time in zip(runs, times, strict=True)
    ]
    print_table(columns, rows, empty="no runs")


def print_run(run: Mapping[str, Any]) -> None:
    """Print the run in two lines, and a table of its tasks with answers and reasons."""
    output.print_line(headline(run))
    end = f"ended {moment(run['concluida_em'])}" if run["concluida_em"] else f"deadline {moment(run['prazo'])}"
    name = f"pipeline {run['pipeline']}, " if run["pipeline"] else ""
    output.print_line(f"{name}started {moment(run['iniciada_em'])}, {end}")
    tasks, answers = run["tarefas"], run.get("resultados", {})
    columns = (
        Column("task"),
        Column("status"),
        Column("attempts", rank=1),
        Column("queue", rank=2),
        Column("after", rank=3),
        Column("answer, reason or progress", prose=True),
    )
    rows = [
        (
            task["id"],
            task["status"],
            f"{task['tentativas']} of {task['max_tentativas']}",
            task["fila"],
            ", ".join(task["depende_de"]) or None,
            _detail(task, answers),
        )
        for task in tasks
    ]
    idle = {"queue"} if all(task["fila"] == task["id"] for task in tasks) else set()
    idle |= set() if any(task["depende_de"] for task in tasks) else {"after"}
    shown = [number for number, column in enumerate(columns) if column.name not in idle]
    print_table(
        [columns[number] for number in shown],
        [[row[number] for number in shown] for row in rows],
        empty="it has no tasks",
    )
    _note_cut_answers(answers)


def print_aggregate(aggregate: Mapping[str, Any]) -> None:
    """Print the aggregate: each answer, and each failure with its reason."""
    output.print_line(headline(aggregate))
    answers = [(task, "concluida", _short(answer)) for task, answer in aggregate["resultados"].items()]
    failures = [(task, fault["status"], localized(fault["motivo"])) for task, fault in aggregate["falhas"].items()]
    columns = (Column("task"), Column("status"), Column("answer or reason", prose=True))
    print_table(columns, [*answers, *failures], empty="it has no answers")
    _note_cut_answers(aggregate["resultados"])


def headline(run: Mapping[str, Any]) -> str:
    took = f" in {duration(run['duracao_ms'])}" if run.get("duracao_ms") is not None else ""
    return f"run {run['correlation_id']} {run['status']}: {output.tally(run['resumo'])}{took}"


def _detail(task: Mapping[str, Any], answers: Mapping[str, Any]) -> str | None:
    if task["id"] in answers:
        return _short(answers[task["id"]])
    progress = task["progresso"] or {}
    percent = progress.get("percentual")
    parts = [
        phase(task),
        None if percent is None or task["concluida_em"] else f"{percent:g} %",
        localized(task["motivo"]) if task["motivo"] else progress.get("mensagem"),
    ]
    return "; ".join(part for part in parts if part) or None


def phase(task: Mapping[str, Any]) -> str | None:
    """Return where an open task is: in the queue, at work, or before its next attempt. None when unknown."""
    if task["proxima_tentativa_em"]:
        return f"next attempt {moment(task['proxima_tentativa_em'])}"
    return _PHASES.get(task["fase"])


def _short(answer: object) -> str:
    text = json.dumps(answer, ensure_ascii=False)
    return text if len(text) <= _LONGEST_ANSWER else text[: _LONGEST_ANSWER - 1] + "…"


def _note_cut_answers(answers: Mapping[str, Any]) -> None:
    if any(_short(answer).endswith("…") for answer in answers.values()):
        output.note(f"answers are cut after {_LONGEST_ANSWER} characters; --json has them whole")
