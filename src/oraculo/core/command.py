"""The command of a task: its message and its payload."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from oraculo.core.run import Run, Task
from oraculo.pipeline.definition import NO_JSON, Kind
from oraculo.wire import naming
from oraculo.wire.message import Message, encode_message
from oraculo.wire.timestamps import to_iso

_encoder = msgspec.json.Encoder()
_EMPTY = msgspec.Raw(b"{}")
_NONE: Mapping[str, bytes] = MappingProxyType({})

# The encoded results that commands pass on, by the tasks they come from. Many commands of a batch share them.
Written = dict[tuple[int, ...], msgspec.Raw]


class _EntryParameters(msgspec.Struct):
    parametros: msgspec.Raw = NO_JSON


# Values stay unparsed, so that one that Python cannot hold (1e999) passes unchanged.
_parameters = msgspec.json.Decoder(_EntryParameters)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode_command(
    run: Run,
    task: Task,
    now_iso: str,
    reply_to: str,
    results: Mapping[str, bytes] = _NONE,
    written: Written | None = None,
) -> bytes:
    """Return the message of the task's present attempt, the same each time but for `timestamp`.

    `results`, by task id, replace the references to them. Commands without such results share `written`.
    """
    step = run.plan.steps[task.number]
    return encode_message(
        Message(
            correlation_id=run.id,
            tipo_evento=naming.START_COLLECT if run.plan.is_collector[task.number] else naming.START_EXECUTE,
            payload=_payload(run, task, results, written),
            timestamp=now_iso,
            tarefa=step.id,
            tentativa=task.attempt,
            responder_em=reply_to,
            prazo=to_iso(deadline_of(run, task)),
            traceparent=run.head.traceparent,
            prioridade=run.head.priority or None,
            ponte=None if step.bridge is None else msgspec.to_builtins(step.bridge),
        )
    )


def deadline_of(run: Run, task: Task) -> float:
    """Return the moment after which the task's answer is late."""
    return run.head.deadline if task.deadline is None else min(task.deadline, run.head.deadline)


def _payload(run: Run, task: Task, results: Mapping[str, bytes], written: Written | None) -> msgspec.Raw:
    step = run.plan.steps[task.number]
    if run.plan.kind is Kind.FAN_OUT:
        return step.payload or msgspec.Raw(run.payload)
    sources = run.plan.dependencies[task.number]
    passed_on: object
    if written is None:
        passed_on = _results_of(run, sources, results)
    elif (passed_on := written.get(sources)) is None:
        passed_on = written[sources] = msgspec.Raw(_encoder.encode(_results_of(run, sources, results)))
    payload: dict[str, Any] = {
        "config": step.config or _EMPTY,
        "entrada": msgspec.Raw(run.payload),
        "resultados": passed_on,
    }
    if run.plan.is_collector[task.number]:
        payload["fonte"] = naming.source_of(step.queue)
        payload["parametros"] = _collector_parameters(run.payload, step.config)
    return msgspec.Raw(_encoder.encode(payload))


def _results_of(run: Run, sources: tuple[int, ...], results: Mapping[str, bytes]) -> dict[str, msgspec.Raw]:
    steps, tasks = run.plan.steps, run.tasks
    return {
        steps[number].id: msgspec.Raw(results.get(steps[number].id) or tasks[number].result or b"{}")
        for number in sources
    }


def _collector_parameters(entry: bytes, config: msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the run payload's `parametros`, overlaid by the step's `config`."""
    given = _parameters.decode(entry).parametros
    parameters = _object.decode(given) if bytes(given).startswith(b"{") else {}
    return parameters | (_object.decode(config) if config else {})
