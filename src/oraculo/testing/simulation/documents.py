"""Comparison of the documents that users see of a run with what is expected."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from oraculo.testing.simulation.expected_run import ExpectedRun, ExpectedTask, first_difference
from oraculo.testing.simulation.timeline import is_shown_as

LISTED_STRAYS = 100  # late and repeated answers that a history lists; the rest is only counted

Document = dict[str, msgspec.Raw]
read_document = msgspec.json.Decoder(Document).decode


def run_fault(run: ExpectedRun, view: Document) -> str | None:
    """Return the first difference between a run's document and what is expected."""
    found = {key: read(raw) for key, raw in view.items() if key not in ("resultados", "tarefas")}
    expected: dict[str, Any] = {
        "status": run.status,
        "versao": run.edition,
        "pipeline": run.asked.name,
        "prioridade": run.asked.priority,
        "resumo": run.summary(),
    }
    if run.late + run.repeated < LISTED_STRAYS:
        expected |= {"respostas_tardias": run.late, "respostas_repetidas": run.repeated}
    return (
        first_difference(expected, found)
        or _moment_fault("iniciada_em", run.created_at, found)
        or _moment_fault("prazo", run.deadline, found)
        or _moment_fault("concluida_em", run.ended_at, found)
        or _deliveries_fault(run, found["entregas"])
        or tasks_fault(run, view)
        or (None if run.is_open else aggregate_fault(run, view))
    )


def tasks_fault(run: ExpectedRun, view: Document) -> str | None:
    found = read(view["tarefas"])
    if [each["id"] for each in found] != list(run.tasks):
        return f"its tasks are {[each['id'] for each in found]}, and must be {list(run.tasks)}"
    faults = (_task_fault(task, each) for task, each in zip(run.tasks.values(), found, strict=True))
    return next((f"task '{each['id']}': {fault}" for each, fault in zip(found, faults, strict=True) if fault), None)


def _task_fault(task: ExpectedTask, found: Mapping[str, Any]) -> str | None:
    expected = {
        "fila": task.step.queue,
        "status": task.status,
        "tentativas": task.attempts,
        "max_tentativas": task.allowed,
        "depende_de": list(task.step.depends_on),
        "opcional": task.step.optional,
        "na_dlq": task.has_dead_letter,
    }
    if (fault := first_difference(expected, found)) is not None:
        return fault
    if (found["proxima_tentativa_em"] is None) is not (task.retry_between is None):
        return f"proxima_tentativa_em is {found['proxima_tentativa_em']}"
    if task.reason not in (found["motivo"] or ""):
        return f"motivo is {found['motivo']!r}, and lacks {task.reason!r}"
    return _moment_fault("prazo", task.deadline, found) or _moment_fault("concluida_em", task.ended_at, found)


def _deliveries_fault(run: ExpectedRun, found: Sequence[Mapping[str, Any]]) -> str | None:
    shown = [(one["canal"], one["status"], one["versao"], one["tentativas"]) for one in found]
    expected = [(one.channel, one.status, one.edition, one.attempts) for one in run.deliveries]
    return None if shown == expected else f"entregas are {shown}, and must be {expected}"


def aggregate_fault(run: ExpectedRun, view: Document) -> str | None:
    found = {key: read(raw) for key, raw in view.items() if key not in ("resultados", "tarefas")}
    took, duration = found["duracao_ms"], max(0, round(((run.ended_at or 0.0) - run.created_at) * 1000))
    return (
        first_difference({"status": run.status, "versao": run.edition, "resumo": run.summary()}, found)
        or _moment_fault("iniciada_em", run.created_at, found)
        or _moment_fault("concluida_em", run.ended_at, found)
        or (None if abs(took - duration) <= 1 else f"duracao_ms is {took}, not {duration}")
        or _results_fault(run, read_document(view["resultados"]))
        or _failures_fault(run, found["falhas"])
    )


def _results_fault(run: ExpectedRun, found: Document) -> str | None:
    expected = {name: task.results for name, task in run.tasks.items() if task.has_succeeded}
    if found.keys() != expected.keys():
        return f"resultados are of {sorted(found)}, and must be of {sorted(expected)}"
    for name, payloads in expected.items():
        if bytes(found[name]) not in payloads:
            return f"the result of '{name}' is {bytes(found[name])!r}, and came as {sorted(payloads)}"
    return None


def _failures_fault(run: ExpectedRun, found: Mapping[str, Any]) -> str | None:
    expected = {name: task for name, task in run.tasks.items() if not task.has_succeeded}
    if found.keys() != expected.keys():
        return f"falhas are of {sorted(found)}, and must be of {sorted(expected)}"
    for name, task in expected.items():
        if fault := first_difference({"status": task.status, "tentativas": task.attempts}, found[name]):
            return f"of the failure of '{name}', {fault}"
        if task.reason not in (found[name]["motivo"] or ""):
            return f"the motivo of '{name}' is {found[name]['motivo']!r}, and lacks {task.reason!r}"
    return None


def _moment_fault(name: str, expected: float | None, found: Mapping[str, Any]) -> str | None:
    if is_shown_as(expected, seconds(found[name])):
        return None
    return f"{name} is {found[name]}, and must be {shown(expected)}"


def read(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def seconds(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def shown(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time).astimezone().isoformat(timespec="milliseconds")
