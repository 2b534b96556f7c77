"""What users are shown of a run, held against what is expected: its document and its aggregate."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from oraculo.testing.simulation.expected_run import ExpectedAggregate, ExpectedRun, ExpectedTask, first_difference
from oraculo.testing.simulation.timeline import is_shown_as

TOLD_STRAYS = 100  # late and repeated answers that a history tells; the rest is only counted

Document = dict[str, msgspec.Raw]
read_document = msgspec.json.Decoder(Document).decode


def run_fault(run: ExpectedRun, view: Document) -> str | None:
    """The first thing that a run's document says otherwise than expected."""
    told = {key: read(raw) for key, raw in view.items() if key not in ("resultados", "tarefas")}
    expected: dict[str, Any] = {
        "status": run.status,
        "versao": run.edition,
        "pipeline": run.asked.name,
        "prioridade": run.asked.priority,
        "resumo": run.summary(),
    }
    if run.late + run.repeated < TOLD_STRAYS:
        expected |= {"respostas_tardias": run.late, "respostas_repetidas": run.repeated}
    return (
        first_difference(tuple(expected), expected, told)
        or _moment_fault("iniciada_em", run.created_at, told)
        or _moment_fault("prazo", run.deadline, told)
        or _moment_fault("concluida_em", run.ended_at, told)
        or _deliveries_fault(run, told["entregas"])
        or tasks_fault(run, view)
        or (None if run.is_open else aggregate_fault(run.aggregate(), view))
    )


def tasks_fault(run: ExpectedRun, view: Document) -> str | None:
    told = read(view["tarefas"])
    if [each["id"] for each in told] != list(run.tasks):
        return f"its tasks are {[each['id'] for each in told]}, and must be {list(run.tasks)}"
    faults = (_task_fault(task, each) for task, each in zip(run.tasks.values(), told, strict=True))
    return next((f"task '{each['id']}': {fault}" for each, fault in zip(told, faults, strict=True) if fault), None)


def _task_fault(task: ExpectedTask, told: Mapping[str, Any]) -> str | None:
    expected = {
        "fila": task.step.queue,
        "status": task.status,
        "tentativas": task.attempts,
        "max_tentativas": task.allowed,
        "depende_de": list(task.step.depends_on),
        "opcional": task.step.optional,
        "na_dlq": task.has_letter,
    }
    if (fault := first_difference(tuple(expected), expected, told)) is not None:
        return fault
    if (told["proxima_tentativa_em"] is None) is not (task.retry_between is None):
        return f"proxima_tentativa_em is {told['proxima_tentativa_em']}"
    if task.reason not in (told["motivo"] or ""):
        return f"motivo is {told['motivo']!r}, and lacks {task.reason!r}"
    return _moment_fault("prazo", task.deadline, told) or _moment_fault("concluida_em", task.ended_at, told)


def _deliveries_fault(run: ExpectedRun, told: Sequence[Mapping[str, Any]]) -> str | None:
    shown = [(one["canal"], one["status"], one["versao"], one["tentativas"]) for one in told]
    expected = [(one.channel, one.status, one.edition, one.attempts) for one in run.deliveries]
    return None if shown == expected else f"entregas are {shown}, and must be {expected}"


def aggregate_fault(expected: ExpectedAggregate, view: Document) -> str | None:
    told = {key: read(raw) for key, raw in view.items() if key not in ("resultados", "tarefas")}
    fields = {"status": expected.status, "versao": expected.edition, "resumo": expected.summary}
    duration = max(0, round((expected.ended_at - expected.created_at) * 1000))
    fault = (
        first_difference(tuple(fields), fields, told)
        or _moment_fault("iniciada_em", expected.created_at, told)
        or _moment_fault("concluida_em", expected.ended_at, told)
        or (None if abs(told["duracao_ms"] - duration) <= 1 else f"duracao_ms is {told['duracao_ms']}, not {duration}")
    )
    return fault or _results_fault(expected, read_document(view["resultados"])) or _failures_fault(expected, told)


def _results_fault(expected: ExpectedAggregate, results: Document) -> str | None:
    if results.keys() != expected.results.keys():
        return f"resultados are of {sorted(results)}, and must be of {sorted(expected.results)}"
    for name, payloads in expected.results.items():
        if bytes(results[name]) not in payloads:
            return f"the result of '{name}' is {bytes(results[name])!r}, and came as {sorted(payloads)}"
    return None


def _failures_fault(expected: ExpectedAggregate, told: Mapping[str, Any]) -> str | None:
    failures = {name: (each["status"], each["tentativas"]) for name, each in told["falhas"].items()}
    right = {name: (status, attempts) for name, (status, attempts, _) in expected.failures.items()}
    if failures != right:
        return f"falhas are {failures}, and must be {right}"
    for name, (_, _, reason) in expected.failures.items():
        if reason not in (told["falhas"][name]["motivo"] or ""):
            return f"the motivo of '{name}' is {told['falhas'][name]['motivo']!r}, and lacks {reason!r}"
    return None


def _moment_fault(name: str, expected: float | None, told: Mapping[str, Any]) -> str | None:
    if is_shown_as(expected, seconds(told[name])):
        return None
    return f"{name} is {told[name]}, and must be {shown(expected)}"


def read(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def seconds(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def shown(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time).astimezone().isoformat(timespec="milliseconds")
