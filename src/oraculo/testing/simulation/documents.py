"""Comparison of the documents that users see of a run with what is expected."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from oraculo.testing.simulation.expected_run import ExpectedAggregate, ExpectedRun, ExpectedTask, first_difference
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
        first_difference(tuple(expected), expected, found)
        or _moment_fault("iniciada_em", run.created_at, found)
        or _moment_fault("prazo", run.deadline, found)
        or _moment_fault("concluida_em", run.ended_at, found)
        or _deliveries_fault(run, found["entregas"])
        or tasks_fault(run, view)
        or (None if run.is_open else aggregate_fault(run.aggregate(), view))
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
    if (fault := first_difference(tuple(expected), expected, found)) is not None:
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


def aggregate_fault(expected: ExpectedAggregate, view: Document) -> str | None:
    found = {key: read(raw) for key, raw in view.items() if key not in ("resultados", "tarefas")}
    fields = {"status": expected.status, "versao": expected.edition, "resumo": expected.summary}
    took = found["duracao_ms"]
    duration = max(0, round((expected.ended_at - expected.created_at) * 1000))
    fault = (
        first_difference(tuple(fields), fields, found)
        or _moment_fault("iniciada_em", expected.created_at, found)
        or _moment_fault("concluida_em", expected.ended_at, found)
        or (None if abs(took - duration) <= 1 else f"duracao_ms is {took}, not {duration}")
    )
    return fault or _results_fault(expected, read_document(view["resultados"])) or _failures_fault(expected, found)


def _results_fault(expected: ExpectedAggregate, results: Document) -> str | None:
    if results.keys() != expected.results.keys():
        return f"resultados are of {sorted(results)}, and must be of {sorted(expected.results)}"
    for name, payloads in expected.results.items():
        if bytes(results[name]) not in payloads:
            return f"the result of '{name}' is {bytes(results[name])!r}, and came as {sorted(payloads)}"
    return None


def _failures_fault(expected: ExpectedAggregate, found: Mapping[str, Any]) -> str | None:
    failures = {name: (each["status"], each["tentativas"]) for name, each in found["falhas"].items()}
    right = {name: (status, attempts) for name, (status, attempts, _) in expected.failures.items()}
    if failures != right:
        return f"falhas are {failures}, and must be {right}"
    for name, (_, _, reason) in expected.failures.items():
        if reason not in (found["falhas"][name]["motivo"] or ""):
            return f"the motivo of '{name}' is {found['falhas'][name]['motivo']!r}, and lacks {reason!r}"
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
