"""The aggregate of a run and its end status, both a function of its tasks' states."""

from typing import Any

import msgspec

from oraculo.core.run import Cause, Run, RunHead, RunStatus, Task, TaskStatus
from oraculo.pipeline.definition import Kind
from oraculo.wire.timestamps import to_iso

_encoder = msgspec.json.Encoder()


def end_status(run: Run) -> RunStatus:
    """Return the end status of a run. For an open run, it is the status if nobody answers any more."""
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
    if head.failed:
        return RunStatus.FAILED
    return RunStatus.TIMED_OUT if head.timed_out or run.open_tasks else RunStatus.CANCELLED


def _required_status(run: Run) -> RunStatus | None:
    """Return the status that the required steps force, if any. A skipped step forces none; its dependency does."""
    ahead = _deadlines_ahead(run) if run.open_tasks else ()  # an ended run needs no look at all its tasks
    if run.required_failed or Cause.TASK_DEADLINE in ahead:
        return RunStatus.FAILED
    return RunStatus.TIMED_OUT if run.required_timed_out or Cause.RUN_DEADLINE in ahead else None


def _deadlines_ahead(run: Run) -> set[Cause]:
    """Return the deadlines that close required tasks. A task that waits for another would be skipped instead."""
    steps = run.plan.steps
    waiting = (task for task in run.tasks if task.is_open and not task.missing and not steps[task.number].optional)
    return {_deadline_ahead(run, task) for task in waiting}


def _deadline_ahead(run: Run, task: Task) -> Cause:
    is_own = task.deadline is not None and task.deadline <= run.head.deadline
    return Cause.TASK_DEADLINE if is_own else Cause.RUN_DEADLINE


def duration_ms(since: float, until: float) -> int:
    return max(0, round((until - since) * 1000))  # the clock may have been set back


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
    """Return the aggregate of an ended run. Payloads are `msgspec.Raw`, so they leave exactly as they came."""
    head = run.head
    results: dict[str, msgspec.Raw] = {}
    failures: dict[str, dict[str, Any]] = {}
    succeeded = TaskStatus.SUCCEEDED
    for task in run.tasks:
        name = run.plan.steps[task.number].id
        if task.status is succeeded:
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
        "duracao_ms": duration_ms(head.created_at, ended_at),
    }


def encode_aggregate(run: Run) -> bytes:
    return _encoder.encode(aggregate(run))
