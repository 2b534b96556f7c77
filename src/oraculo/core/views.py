"""The views of runs, tasks and history entries that the API returns."""

from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import msgspec

from oraculo.core.aggregate import aggregate, duration_ms, summary
from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.masking import masked
from oraculo.core.phase import Looks, phase_of
from oraculo.core.plan import Plan
from oraculo.core.run import Run, RunDelivery, RunHead, RunStatus, Task
from oraculo.wire.timestamps import to_iso
from oraculo.wire.tracebacks import split_traceback

_encoder = msgspec.json.Encoder()
_NO_LOOKS: Looks = MappingProxyType({})
_OF_DELIVERIES = frozenset({Happened.DELIVERED, Happened.DELIVERY_FAILED, Happened.UNDELIVERED})


def head_view(head: RunHead) -> dict[str, Any]:
    """Return a run as a list shows it."""
    return {
        "correlation_id": head.id,
        "status": head.status,
        "pipeline": head.name or None,
        "versao": head.edition,
        "prioridade": head.priority,
        "resumo": summary(head),
        "iniciada_em": to_iso(head.created_at),
        "prazo": to_iso(head.deadline),
        "concluida_em": _moment(head.ended_at),
        "duracao_ms": None if head.ended_at is None else duration_ms(head.created_at, head.ended_at),
        "links": links(head.id),
    }


def run_view(run: Run, looks: Looks = _NO_LOOKS) -> dict[str, Any]:
    """Return a run with its tasks and, once it has ended, its aggregate."""
    head = run.head
    view = head_view(head)
    if not run.is_open:
        view |= aggregate(run)
    view["definicao"] = head.definition_hash
    view["respostas_tardias"] = head.late
    view["respostas_repetidas"] = head.duplicates
    view["entregas"] = [_delivery_view(delivery) for delivery in head.deliveries]
    # Encoded one by one, because a wide run as objects would burden the garbage collector and hold up the event loop.
    view["tarefas"] = [msgspec.Raw(_encoder.encode(_task_view(run.plan, task, looks))) for task in run.tasks]
    return view


def _task_view(plan: Plan, task: Task, looks: Looks) -> dict[str, Any]:
    step = plan.steps[task.number]
    progress = (
        None
        if task.percent is None and task.note is None
        else {"percentual": task.percent, "mensagem": task.note or None}
    )
    return {
        "id": step.id,
        "fila": step.queue,
        "status": task.status,
        "fase": phase_of(task, step.id, looks.get((step.queue, task.via))),
        "tentativas": task.attempt,
        "max_tentativas": task.last_attempt,
        "depende_de": list(step.depends_on),
        "opcional": step.optional,
        "progresso": progress,
        "motivo": task.reason,
        "enviada_em": _moment(_sent_at(task)),
        "prazo": _moment(task.deadline),
        "proxima_tentativa_em": _moment(task.due_at) if task.awaits_retry else None,
        "concluida_em": _moment(task.ended_at),
        "na_dlq": task.dead_letter,
    }


def _sent_at(task: Task) -> float | None:
    """Return when the task's last command was sent, if that is known.

    A time after the task's end is that of its dead letter. The sending itself is not noted if the answer came first.
    """
    if task.sent_at is not None and task.ended_at is not None and task.sent_at > task.ended_at:
        return None
    return task.sent_at


def _delivery_view(delivery: RunDelivery) -> dict[str, Any]:
    return {
        "canal": delivery.channel,
        "destino": masked(delivery.target),
        "status": delivery.status,
        "versao": delivery.edition,
        "tentativas": delivery.attempts,
        "proxima_tentativa_em": _moment(delivery.due_at),
        "erro": None if delivery.error is None else masked(delivery.error),
    }


def entry_view(plan: Plan, entry: HistoryEntry) -> dict[str, Any]:
    """Return one entry of a run's history. Texts of workers are shown unchanged."""
    detail, traceback = split_traceback(entry.detail)
    if detail is not None and entry.what in _OF_DELIVERIES:
        detail = masked(detail)
    return {
        "seq": entry.seq,
        "timestamp": to_iso(entry.at),
        "evento": entry.what,
        "tarefa": None if entry.task is None else plan.steps[entry.task].id,
        "tentativa": entry.attempt,
        "detalhe": detail,
        "rastreamento": traceback,
    }


def accepted_view(run_id: str, status: RunStatus) -> dict[str, Any]:
    """Return the reply to an accepted request."""
    return {"correlation_id": run_id, "status": status, "links": links(run_id)}


def links(run_id: str) -> dict[str, str]:
    path = f"/orquestracoes/{quote(run_id, safe='')}"
    return {
        "self": path,
        "eventos": f"{path}/eventos",
        "explicacao": f"{path}/explicacao",
        "cancelar": f"{path}/cancelar",
        "repetir": f"{path}/repetir",
    }


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else to_iso(seconds)
