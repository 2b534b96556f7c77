"""The one answer that a run gives: a function of its tasks' states."""

from typing import Any

import msgspec

from oraculo.core.pipeline import Kind
from oraculo.core.run import Cause, Run, RunHead, RunStatus, TaskStatus
from oraculo.core.timestamps import to_iso

_encoder = msgspec.json.Encoder()


def end_status(run: Run) -> RunStatus:
    """The status of a run in which no task is open."""
    head = run.head
    if head.succeeded == head.total:
        return RunStatus.SUCCEEDED
    if head.cancelled:
        return RunStatus.CANCELLED
    quorum_met = run.plan.needed is not None and head.succeeded >= run.plan.needed
    if run.plan.kind is Kind.PIPELINE and not quorum_met and (status := _required_status(run)):
        return status
    if head.succeeded:
        return RunStatus.PARTIAL
    return RunStatus.FAILED if head.failed else RunStatus.TIMED_OUT if head.timed_out else RunStatus.CANCELLED


def _required_status(run: Run) -> RunStatus | None:
    """A required step that failed for good decides; a skipped one only tells what its dependency did."""
    status = None
    for task in run.tasks:
        if run.plan.steps[task.number].optional:
            continue
        if task.status is TaskStatus.FAILED or task.cause is Cause.TASK_DEADLINE:
            return RunStatus.FAILED
        if task.cause is Cause.RUN_DEADLINE:
            status = RunStatus.TIMED_OUT
    return status


def summary(head: RunHead) -> dict[str, int]:
    return {
        "total": head.total,
        "concluidas": head.succeeded,
        "erros": head.failed,
        "timeouts": head.timed_out,
        "ignoradas": head.skipped,
        "canceladas": head.task_cancelled,
    }


def aggregate(run: Run) -> dict[str, Any]:
    """The aggregate of an ended run. Payloads are `msgspec.Raw`: they are handed on exactly as they came."""
    head = run.head
    results: dict[str, msgspec.Raw] = {}
    failures: dict[str, dict[str, Any]] = {}
    for task in run.tasks:
        name = run.plan.steps[task.number].id
        if task.status is TaskStatus.SUCCEEDED:
            results[name] = msgspec.Raw(task.result or b"{}")
        else:
            failures[name] = {"status": task.status, "motivo": task.reason, "tentativas": task.attempt}
    ended_at = head.ended_at if head.ended_at is not None else head.deadline
    return {
        "correlation_id": head.id,
        "status": head.status,
        "versao": head.edition,
        "resumo": summary(head),
        "resultados": results,
        "falhas": failures,
        "iniciada_em": to_iso(head.created_at),
        "concluida_em": to_iso(ended_at),
        "duracao_ms": round((ended_at - head.created_at) * 1000),
    }


def encode_aggregate(run: Run) -> bytes:
    return _encoder.encode(aggregate(run))
