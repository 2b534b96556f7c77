"""The messages of the AsyncAPI document: for each `tipo_evento` the envelope, its payload's schema, and examples."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from oraculo.core.answers import FAILURE_WORDS
from oraculo.wire import naming
from oraculo.wire.message import message_schema

Object = dict[str, Any]

DEAD_LETTER = "carta_morta"  # the message of dead-letter queues: no event, because it may be anything


def components(api_schemas: Mapping[str, Object]) -> Object:
    """Return the components of the document. `api_schemas` are those of a request and of an aggregate."""
    messages = {event: _message(event, described) for event, described in _EVENTS.items()}
    return {
        "messages": {**messages, DEAD_LETTER: _DEAD_LETTER},
        "schemas": {"Mensagem": _envelope(), **_PAYLOADS, **dict(sorted(api_schemas.items()))},
        "correlationIds": {"orquestracao": _CORRELATION},
    }


def ref(*path: str) -> Object:
    return {"$ref": "/".join(("#", *path))}


def _schema_ref(name: str) -> Object:
    return ref("components", "schemas", name)


_OBJECT: Object = {"type": "object"}
_CORRELATION = {
    "description": "One for each run; a worker copies it to its answer.",
    "location": "$message.payload#/correlation_id",
}


class _Event(NamedTuple):
    """A `tipo_evento`: its summary, the schema and named examples of its `payload`, and the rest of the envelope."""

    summary: str
    payload: Object
    examples: Mapping[str, Object]
    envelope: Mapping[str, Any] = {}


_STEP_FIELDS: Mapping[str, Object] = {
    "config": {**_OBJECT, "description": "The step's own, from the pipeline's definition."},
    "entrada": {**_OBJECT, "description": "The run's payload."},
    "resultados": {
        **_OBJECT,
        "additionalProperties": _OBJECT,
        "description": "The payload of each dependency's answer, by the step's id.",
    },
}
_COLLECT_FIELDS: Mapping[str, Object] = {
    "fonte": {"type": "string", "description": "The queue's name without `escavador_`."},
    "parametros": {**_OBJECT, "description": "The run payload's `parametros`, overlaid by `config`."},
}


def _step_payload(fields: Mapping[str, Object]) -> Object:
    return {
        **_OBJECT,
        "description": "Of a step of a pipeline.",
        "properties": dict(fields),
        "required": list(fields),
    }


def _name_field(what: str) -> Object:
    """Return a field of any type: a worker's data may use the word for something else."""
    return {"description": f"{what}, for an answer without `tarefa` in the envelope."}


_OTHER_FAILURE_WORDS = ", ".join(f"`{word}`" for word in sorted(FAILURE_WORDS - {"erro"}))
_PAYLOADS: Mapping[str, Object] = {
    "Etapa": _step_payload(_STEP_FIELDS),
    "EtapaDeColeta": _step_payload({**_STEP_FIELDS, **_COLLECT_FIELDS}),
    "Destino": {**_OBJECT, "description": "Of a destination (`destinos`, `tipo`): its payload as the request gave it."},
    "Resultado": {
        **_OBJECT,
        "description": "It failed when `status` says so, or when there is no `status` and `erros` is not empty. "
        "Anything else is a success, and is handed on exactly as it came.",
        "properties": {
            "status": {
                "type": ["string", "null"],
                "description": f"`ok` or `erro`; a failure may also be written as {_OTHER_FAILURE_WORDS}, in any case.",
                "examples": ["ok", "erro"],
            },
            "dados": {"description": "What was collected."},
            "resultado": {"description": "What came of the execution."},
            "erros": {"type": ["array", "null"], "description": "Why it failed, a text each."},
            "repetir": {
                "type": ["boolean", "null"],
                "description": "false: it would fail again, make no other attempt.",
            },
            "rastreamento": {
                "type": ["string", "null"],
                "description": "Of a failure: its traceback. The run's history keeps the last 16 kB.",
            },
            "tarefa": _name_field("The subtask"),
            "destino": _name_field("The destination"),
            "fonte": _name_field("The source, as `youtube` for `escavador_youtube`"),
        },
    },
    "Progresso": {
        **_OBJECT,
        "properties": {
            "percentual": {"type": ["number", "null"], "minimum": 0, "maximum": 100},
            "mensagem": {"type": ["string", "null"]},
            "tarefa": _name_field("The subtask"),
            "destino": _name_field("The destination"),
            "fonte": _name_field("The source"),
        },
    },
}
_REQUEST = {
    "destinos": ["escavador_youtube", "escavador_blog", "executador_relatorio"],
    "payload": {"fonte": "youtube", "parametros": {"canal": "canal_exemplo", "periodo": "2025-10"}},
    "timeout": 30,
    "responder_em": "respostas",
}
_AGGREGATE = {
    "correlation_id": "abc123",
    "status": "parcial",
    "versao": 1,
    "resumo": {"total": 2, "concluidas": 1, "erros": 0, "timeouts": 1, "ignoradas": 0, "canceladas": 0},
    "resultados": {"executador_relatorio": {"resultado": "ok", "arquivo": "relatorio.pdf"}},
    "falhas": {"escavador_blog": {"status": "timeout", "motivo": "no answer in 30 s", "tentativas": 1}},
    "iniciada_em": "2025-10-14T12:00:00Z",
    "concluida_em": "2025-10-14T12:00:30Z",
    "duracao_ms": 30000,
}


def _command_envelope(task: str) -> Object:
    return {"tarefa": task, "tentativa": 1, "responder_em": naming.ANSWERS, "prazo": "2025-10-14T12:00:30Z"}


_FAILURE = {"status": "erro", "erros": ["the channel does not exist"]}
_EVENTS: Mapping[str, _Event] = {
    naming.START_RUN: _Event(
        "Asks for a run; the payload is the body of `POST /orquestracoes`.",
        _schema_ref("Pedido"),
        {"destinos": _REQUEST, "tipo": {"tipo": "coleta_completa", "payload": {}}},
    ),
    naming.START_COLLECT: _Event(
        "Asks an escavador to collect.",
        {"anyOf": [_schema_ref("EtapaDeColeta"), _schema_ref("Destino")]},
        {
            "destino": {"fonte": "youtube", "parametros": {"canal": "canal_exemplo", "periodo": "2025-10"}},
            "etapa": {
                "config": {"periodo": "2025-10"},
                "entrada": {"parametros": {"canal": "canal_exemplo"}},
                "resultados": {},
                "fonte": "youtube",
                "parametros": {"canal": "canal_exemplo", "periodo": "2025-10"},
            },
        },
        _command_envelope("escavador_youtube"),
    ),
    naming.START_EXECUTE: _Event(
        "Asks any other destination to execute.",
        {"anyOf": [_schema_ref("Etapa"), _schema_ref("Destino")]},
        {
            "destino": {"param": "valor"},
            "etapa": {
                "config": {"duration": 30},
                "entrada": {"produto": "x"},
                "resultados": {"ENHANCED_IMAGES": {"status": "ok", "resultado": ["a.png"]}},
            },
        },
        _command_envelope("PROMOTIONAL_VIDEO"),
    ),
    naming.COLLECTED: _Event(
        "An escavador's answer.",
        _schema_ref("Resultado"),
        {"sucesso": {"status": "ok", "dados": [{"titulo": "x"}], "erros": []}, "falha": _FAILURE},
    ),
    naming.EXECUTED: _Event(
        "Any other destination's answer.",
        _schema_ref("Resultado"),
        {"sucesso": {"resultado": "ok", "arquivo": "relatorio.pdf"}, "falha": _FAILURE},
    ),
    naming.PROGRESS: _Event(
        "How far a subtask is; also a sign of life.",
        _schema_ref("Progresso"),
        {"metade": {"percentual": 50, "mensagem": "half of the pages"}},
    ),
    naming.RUN_ENDED: _Event(
        "The one answer that a run gives, to its `responder_em`.",
        _schema_ref("Agregado"),
        {"parcial": _AGGREGATE},
    ),
}
_DEAD_LETTER: Object = {
    "name": DEAD_LETTER,
    "summary": "A dead letter.",
    "payload": {
        "description": "Exactly as it came: one that the queue may hold, or the very thing that is not valid. "
        "The reason travels beside it; `GET /filas/{fila}/dlq` shows both."
    },
}


def _message(event: str, described: _Event) -> Object:
    return {
        "name": event,
        "summary": described.summary,
        "correlationId": ref("components", "correlationIds", "orquestracao"),
        "payload": {
            "type": "object",
            "allOf": [
                _schema_ref("Mensagem"),
                {"properties": {"tipo_evento": {"const": event}, "payload": described.payload}},
            ],
        },
        "examples": [{"name": name, "payload": _example(event, described, name)} for name in described.examples],
    }


def _example(event: str, described: _Event, name: str) -> Object:
    return {
        "correlation_id": "abc123",
        "tipo_evento": event,
        "payload": described.examples[name],
        "timestamp": "2025-10-14T12:00:00Z",
        **described.envelope,
    }


def _envelope() -> Object:
    """AsyncAPI's own dialect, of which all that the schema says is part, instead of 2020-12."""
    return {key: value for key, value in message_schema().items() if key not in ("$schema", "$id")}
