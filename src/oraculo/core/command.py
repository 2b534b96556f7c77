"""The command that a task sends to its queue."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from oraculo.core import naming
from oraculo.core.message import Message, encode_message
from oraculo.core.pipeline import NO_JSON, Kind
from oraculo.core.run import Run, Task
from oraculo.core.timestamps import to_iso

_encoder = msgspec.json.Encoder()
_EMPTY = msgspec.Raw(b"{}")
_NONE: Mapping[str, bytes] = MappingProxyType({})


class _EntryParameters(msgspec.Struct):
    parametros: msgspec.Raw = NO_JSON


# Values stay unparsed: one that Python cannot hold (1e999) is handed on as it came.
_parameters = msgspec.json.Decoder(_EntryParameters)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode_command(run: Run, task: Task, now_iso: str, reply_to: str, results: Mapping[str, bytes] = _NONE) -> bytes:
    """The message of the task's present attempt: the same bytes each time but for `timestamp`. `results`, by their
    task's id, are handed on in place of the references to them."""
    step = run.plan.steps[task.number]
    return encode_message(
        Message(
            correlation_id=run.id,
            tipo_evento=naming.START_COLLECT if run.plan.is_collector[task.number] else naming.START_EXECUTE,
            payload=command_payload(run, task, results),
            timestamp=now_iso,
            tarefa=step.id,
            tentativa=task.attempt,
            responder_em=reply_to,
            prazo=to_iso(deadline_of(run, task)),
            traceparent=run.head.traceparent,
            ponte=None if step.bridge is None else msgspec.to_builtins(step.bridge),
        )
    )


def deadline_of(run: Run, task: Task) -> float:
    """When the task's answer is late."""
    return run.head.deadline if task.deadline is None else min(task.deadline, run.head.deadline)


def command_payload(run: Run, task: Task, results: Mapping[str, bytes] = _NONE) -> msgspec.Raw:
    step = run.plan.steps[task.number]
    if run.plan.kind is Kind.FAN_OUT:
        return step.payload or msgspec.Raw(run.payload)
    names = run.plan.steps
    payload: dict[str, Any] = {
        "config": step.config or _EMPTY,
        "entrada": msgspec.Raw(run.payload),
        "resultados": {
            names[number].id: msgspec.Raw(results.get(names[number].id) or run.tasks[number].result or b"{}")
            for number in run.plan.dependencies[task.number]
        },
    }
    if run.plan.is_collector[task.number]:
        payload["fonte"] = naming.source_of(step.queue)
        payload["parametros"] = _collector_parameters(run.payload, step.config)
    return msgspec.Raw(_encoder.encode(payload))


def _collector_parameters(entry: bytes, config: msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The run payload's `parametros`, overlaid by the step's `config`."""
    given = _parameters.decode(entry).parametros
    parameters = _object.decode(given) if bytes(given).startswith(b"{") else {}
    return parameters | (_object.decode(config) if config else {})
