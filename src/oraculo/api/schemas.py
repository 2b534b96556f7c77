"""The JSON Schemas of requests and answers, for the OpenAPI document. Their values come from the core's types."""

from typing import Any

from oraculo.api.asyncapi_document import SPECIFICATION
from oraculo.core.history import Happened
from oraculo.core.phase import Phase
from oraculo.core.request import FIELDS
from oraculo.core.run import Channel, DeliveryStatus, RunStatus, TaskStatus
from oraculo.engine.pipelines import Origin
from oraculo.pipeline.bridges import KEYWORDS, PAYLOAD
from oraculo.pipeline.bridges import QUEUES as BRIDGES
from oraculo.pipeline.definition import ADDED_KEYS, JOB_TYPES, MAX_SECONDS, OnLate
from oraculo.wire.naming import MAX_NAME

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
MOMENT: Schema = {"type": "string", "format": "date-time"}
SECONDS: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS}
_NAME = rf"(?!\.{{1,2}}$)[A-Za-z0-9_.-]{{1,{MAX_NAME}}}"
QUEUE_NAME: Schema = {"type": "string", "pattern": f"^{_NAME}$"}
DESTINATION: Schema = {
    "type": "string",
    "pattern": rf"^({_NAME}|({'|'.join(BRIDGES)})://[^\s/?#:]{{1,200}}(\?.*)?)$",
    "description": "A queue, or `celery://task.name`, or `bullmq://queue`.",
}
ID: Schema = {"type": "string", "minLength": 1, "maxLength": 128}
QUORUM: Schema = {
    "description": 'How many successes are enough: "all", a number, or a percentage such as "60%".',
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^(all|[0-9]{1,3}(\.[0-9]{1,6})?%)$"}],
}


def record(properties: Schema, *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    """Return the schema of an object. All its properties are required, except the optional ones."""
    required = [name for name in properties if name not in optional]
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return schema | {"required": required} if required else schema


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(values: type) -> Schema:
    return {"type": "string", "enum": [str(value) for value in values]}  # type: ignore[attr-defined]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_FAULT = record({"campo": TEXT, "motivo": TEXT}, description="Which field, and what would be right.")
_PROBLEM = record(
    {
        "type": {"type": "string", "format": "uri-reference"},
        "title": TEXT,
        "status": {"type": "integer"},
        "detail": TEXT,
        "instance": {"type": "string", "format": "uri-reference"},
        "erros": listed(_FAULT),
    },
    optional=("erros",),
    description="An error, as RFC 9457 has it.",
)

_DESTINATION = {
    "anyOf": [
        DESTINATION,
        record(
            {"fila": DESTINATION, "id": ID, "payload": {"type": "object"}, "timeout": SECONDS},
            optional=("fila", "id", "payload", "timeout"),
            anyOf=[{"required": ["fila"]}, {"required": ["id"]}],
        ),
    ]
}

_REQUEST = record(
    {
        "destinos": {
            **listed(_DESTINATION),
            "minItems": 1,
            "description": "Queues, or objects; of `fila` and `id` each is the other unless given, and ids are unique.",
        },
        "tipo": {"type": "string", "description": "A route: a named list of destinations."},
        "pipeline": {"type": "string", "description": "Name of a pipeline."},
        "payload": {"type": "object", "description": "Handed to each destination as it is."},
        "timeout": {**SECONDS, "description": "Seconds for the whole run; unless set, the pipeline's own, or 300."},
        "correlation_id": {**ID, "description": "The run's id; made up unless given."},
        "webhook": {"type": "string", "format": "uri", "description": "URL that is sent the aggregate."},
        "responder_em": {**QUEUE_NAME, "description": "Queue that is sent the aggregate."},
        "prioridade": {"type": "integer", "minimum": 0, "maximum": 9},
        "quorum": QUORUM,
    },
    optional=FIELDS,
    oneOf=[{"required": ["destinos"]}, {"required": ["tipo"]}, {"required": ["pipeline"]}],
    description="Exactly one of `destinos`, `tipo` and `pipeline`.",
)

_SUMMARY = record(
    dict.fromkeys(("total", "concluidas", "erros", "timeouts", "ignoradas", "canceladas"), COUNT),
    description="How many subtasks ended how.",
)
_LINKS = record(dict.fromkeys(("self", "eventos", "explicacao", "cancelar", "repetir"), TEXT))
_RESULT = {"type": "object", "description": "The payload of a successful answer."}
_RESULTS = {
    "type": "object",
    "description": "Each successful answer's payload, exactly as it came. Of large ones (256 kB unless set) only so "
    'many are brought along (32 MiB unless set); what stands for the others is `{"oraculo_referencia": {…}}`, and '
    "`GET /orquestracoes/{correlation_id}/resultados/{tarefa}` has them.",
}
_FAILURES = {
    "type": "object",
    "additionalProperties": record(
        {"status": one_of(TaskStatus), "motivo": nullable(TEXT), "tentativas": COUNT},
    ),
}

_AGGREGATE = record(
    {
        "correlation_id": TEXT,
        "status": one_of(RunStatus),
        "versao": COUNT,
        "resumo": ref("Resumo"),
        "resultados": _RESULTS,
        "falhas": _FAILURES,
        "iniciada_em": MOMENT,
        "concluida_em": MOMENT,
        "duracao_ms": COUNT,
    },
    description="The one answer that a run gives.",
)

_HEAD_FIELDS: Schema = {
    "correlation_id": TEXT,
    "status": one_of(RunStatus),
    "pipeline": nullable(TEXT),
    "versao": COUNT,
    "prioridade": {"type": "integer", "minimum": 0, "maximum": 9},
    "resumo": ref("Resumo"),
    "iniciada_em": MOMENT,
    "prazo": MOMENT,
    "concluida_em": nullable(MOMENT),
    "duracao_ms": nullable(COUNT),
    "links": ref("Links"),
}

_TASK = record(
    {
        "id": TEXT,
        "fila": TEXT,
        "status": one_of(TaskStatus),
        "fase": nullable(one_of(Phase))
        | {
            "description": "Where an open subtask is: in its queue, taken by a worker, or waiting for its next attempt "
            "(`proxima_tentativa_em`). Null: it is not sent yet, it has ended, or nobody can say. A worker that "
            "reported progress is at work; otherwise the queue was looked at, at most a second ago."
        },
        "tentativas": COUNT,
        "max_tentativas": COUNT,
        "depende_de": listed(TEXT),
        "opcional": FLAG,
        "progresso": nullable(record({"percentual": nullable({"type": "number"}), "mensagem": nullable(TEXT)})),
        "motivo": nullable(TEXT),
        "enviada_em": nullable(MOMENT)
        | {"description": "Of its last command. Null, too, when the answer came before that was noted."},
        "prazo": nullable(MOMENT),
        "proxima_tentativa_em": nullable(MOMENT),
        "concluida_em": nullable(MOMENT),
        "na_dlq": {
            **FLAG,
            "description": "It failed for good, and its command is a dead letter. The explanation, not this field, "
            "shows commands that the broker dead-lettered itself.",
        },
    }
)

_DELIVERY = record(
    {
        "canal": one_of(Channel),
        "destino": TEXT,
        "status": one_of(DeliveryStatus),
        "versao": COUNT,
        "tentativas": {
            **COUNT,
            "description": "Those that are noted. While the broker of a reply queue is away, or the queue full, only "
            "the first is: it is tried again and again until it is taken.",
        },
        "proxima_tentativa_em": nullable(MOMENT),
        "erro": nullable(TEXT),
    }
)

_RUN = record(
    {
        **_HEAD_FIELDS,
        "definicao": TEXT,
        "respostas_tardias": COUNT,
        "respostas_repetidas": COUNT,
        "entregas": listed(_DELIVERY),
        "tarefas": listed(_TASK),
        "resultados": _RESULTS,
        "falhas": _FAILURES,
    },
    optional=("resultados", "falhas"),
    description="A run with its subtasks; once it ended, also all that the aggregate has.",
)

_ENTRY = record(
    {
        "seq": COUNT,
        "timestamp": MOMENT,
        "evento": one_of(Happened),
        "tarefa": nullable(TEXT),
        "tentativa": nullable(COUNT),
        "detalhe": nullable(TEXT),
        "rastreamento": nullable(TEXT)
        | {"description": "The traceback of a failed attempt, where its worker sent one."},
    }
)

_RETRY = record(
    {"maxAttempts": {"type": "integer", "minimum": 1, "maximum": 1000}, "backoff": {"type": "number", "minimum": 0}}
    | {"maxBackoff": {"type": "number", "minimum": 0}},
    optional=("maxAttempts", "backoff", "maxBackoff"),
)

_CELERY = record(
    {"task": TEXT, "queue": TEXT, "send": {"type": "string", "enum": [KEYWORDS, PAYLOAD]}}
    | {"args": {"type": "array", "items": {}}, "kwargs": {"type": "object"}},
    optional=("queue", "send", "args", "kwargs"),
    description="A Celery task. By default the step's `config` is its keyword arguments; with `payload` its only "
    "argument is what a worker of ours would be given.",
)
_BULLMQ = record(
    {"queue": TEXT, "name": TEXT, "attempts": {"type": "integer", "minimum": 1, "maximum": 1000}},
    optional=("name", "attempts"),
    description="A queue of BullMQ. The job's name is the step's type unless given.",
)

_STEP_FIELDS: Schema = {
    "id": {**ID, "description": "The type unless given."},
    "type": {
        "type": "string",
        "description": f"A job type ({', '.join(JOB_TYPES)}) or the name of a queue; `queue` unless given.",
    },
    "queue": {**DESTINATION, "description": "A queue, `celery://…` or `bullmq://…`; the job type's own unless given."},
    "celery": ref("Celery"),
    "bullmq": ref("Bullmq"),
    "dependsOn": listed(TEXT),
    "config": {"type": "object"},
    "retry": ref("Retry"),
    "timeout": SECONDS,
    "optional": FLAG,
}
_PIPELINE_FIELDS: Schema = {
    "name": TEXT,
    "description": TEXT,
    "timeout": SECONDS,
    "quorum": QUORUM,
    "onLate": one_of(OnLate),
}

_STEP_DEFAULTS = tuple(_STEP_FIELDS)
_SOMEWHERE = [{"required": ["queue"]}, {"required": ["celery"]}]  # a task whose arguments fit in no URL
_STEP_OMITTED = ("queue", "celery", "bullmq", "dependsOn", "config", "timeout", "optional")

_IGNORED: Schema = {name: {"description": "Ignored."} for name in sorted(ADDED_KEYS)}
_PIPELINE_REQUEST = record(
    {
        **_PIPELINE_FIELDS,
        "steps": {**listed(record(_STEP_FIELDS, optional=_STEP_DEFAULTS)), "minItems": 1},
        **_IGNORED,
    },
    optional=(*_PIPELINE_FIELDS, *_IGNORED),
)
_PIPELINE = record(
    {
        **_PIPELINE_FIELDS,
        "steps": listed(record(_STEP_FIELDS, optional=_STEP_OMITTED, anyOf=_SOMEWHERE)),
        "origem": one_of(Origin),
        "hash": TEXT,
        "avisos": listed(_FAULT),
    },
    optional=("quorum",),
)
_PIPELINE_LISTED = record(
    {"name": TEXT, "description": TEXT, "origem": one_of(Origin), "hash": TEXT, "steps": listed(TEXT)},
    description="`steps` are their ids.",
)
_PIPELINE_FILE = record(
    {
        "arquivo": {**TEXT, "description": "Its name in the pipelines folder; empty: the folder itself."},
        "pipeline": TEXT,
        "versao_anterior_em_uso": {"type": "boolean"},
        "erros": listed(_FAULT),
    },
    description="A file that cannot be used as it is now.",
)

_QUEUE = record(
    {
        "fila": TEXT,
        "mensagens": COUNT,
        "em_processamento": nullable({**COUNT, "description": "null: the broker does not count them"}),
        "consumidores": nullable({**COUNT, "description": "null: the broker does not count them"}),
        "dlq": COUNT,
    }
)
_BROKER = record({"nome": TEXT, "ok": {"type": "boolean"}, "problema": nullable(TEXT), "filas_surdas": listed(TEXT)})
_LETTER = record(
    {
        "id": TEXT,
        "motivo": TEXT,
        "timestamp": nullable(MOMENT),
        "entregas": COUNT,
        "correlation_id": nullable(TEXT),
        "tarefa": nullable(TEXT),
        "corpo": {"description": "The message, when it is JSON and whole."},
        "corpo_texto": nullable({"type": "string", "description": "Else its text, or `base64:` and its bytes."}),
        "corpo_bytes": {**COUNT, "description": "The length of the whole message."},
        "corpo_cortado": {**FLAG, "description": "It is over 1 MiB, and `corpo_texto` is its first MiB only."},
    }
)
_PART = record({"ok": FLAG, "problema": nullable(TEXT)})
_HEALTH = record({"status": {"type": "string", "enum": ["ok", "indisponivel"]}, "versao": TEXT})
_READINESS = {"type": "string", "enum": ["ok", "degradado", "indisponivel"]}
_READY = record({"status": _READINESS, "versao": TEXT, "partes": {"type": "object", "additionalProperties": _PART}})

_NAMED_OBJECTS: Schema = {"type": "object", "additionalProperties": {"type": "object"}}
_ASYNCAPI = record(
    {
        "asyncapi": {"type": "string", "enum": [SPECIFICATION]},
        "info": record({"title": TEXT, "version": TEXT, "description": TEXT}),
        "servers": _NAMED_OBJECTS,
        "defaultContentType": TEXT,
        "channels": _NAMED_OBJECTS,
        "operations": _NAMED_OBJECTS,
        "components": _NAMED_OBJECTS,
    },
    optional=("servers",),
    description="An AsyncAPI document. `servers` are the brokers, but for `memory://`.",
)

_CURSOR = nullable({"type": "string", "description": "For the next page; null: there is none."})

COMPONENTS: dict[str, Schema] = {
    "Problema": _PROBLEM,
    "Pedido": _REQUEST,
    "Aceita": record({"correlation_id": TEXT, "status": one_of(RunStatus), "links": ref("Links")}),
    "Agregado": _AGGREGATE,
    "Resumo": _SUMMARY,
    "Links": _LINKS,
    "OrquestracaoListada": record(_HEAD_FIELDS),
    "Orquestracoes": record({"orquestracoes": listed(ref("OrquestracaoListada")), "cursor": _CURSOR}),
    "Orquestracao": _RUN,
    "Resultado": _RESULT,
    "Evento": _ENTRY,
    "Eventos": record({"eventos": listed(ref("Evento")), "proximo": nullable(COUNT)}),
    "Explicacao": record({"correlation_id": TEXT, "status": one_of(RunStatus), "explicacao": TEXT}),
    "Retry": _RETRY,
    "Celery": _CELERY,
    "Bullmq": _BULLMQ,
    "PipelinePedido": _PIPELINE_REQUEST,
    "Pipeline": _PIPELINE,
    "Pipelines": record(
        {"pipelines": listed(_PIPELINE_LISTED), "cursor": _CURSOR, "arquivos_invalidos": listed(_PIPELINE_FILE)}
    ),
    "Filas": record({"filas": listed(_QUEUE), "brokers": listed(_BROKER)}),
    "CartasMortas": record({"fila": TEXT, "mensagens": listed(_LETTER), "cursor": _CURSOR}),
    "ReenvioPedido": record({"ids": nullable(listed(TEXT))}, optional=("ids",)),
    "Reenvio": record(dict.fromkeys(("reenviadas", "reabertas", "obsoletas"), COUNT)),
    "AsyncApi": _ASYNCAPI,
    "Saude": _HEALTH,
    "Prontidao": _READY,
}
