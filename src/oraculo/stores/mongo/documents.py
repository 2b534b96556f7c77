"""A run as documents, and documents as a run. The words are the wire's, as the API shows a run; what is inside
`origem`, `estado`, `agenda` and `interno` is ours alone, in the code's words.

Times are there twice: as dates for others, which know milliseconds, and as numbers for us, exact. A payload, a result
or a definition is its JSON text, exactly as it came; what is too large for that is kept apart (see `Attachments`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import bson
from bson.datetime_ms import DatetimeMS
from bson.objectid import ObjectId

from oraculo.core.aggregate import summary
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Delivery, RunHead, Task
from oraculo.pipeline.definition import Step
from oraculo.stores.mongo.server import OPTIONS, Document
from oraculo.stores.stored_words import CAUSE, CHANNEL, DELIVERY_STATUS, HAPPENED, RUN_STATUS, TASK_STATUS

INLINE_BYTES = 8 * 1024  # a text up to this size is in the document that it belongs to
PART_BYTES = 4 * 1024 * 1024


def new_key(created_at: float) -> str:
    """A run's `_id`: in the order of creation, and never used again, so that nothing of a run that was deleted clings
    to one that took its correlation_id."""
    return f"{max(0, int(created_at * 1000)):012x}{str(ObjectId())[8:]}"


def moment(seconds: float | None) -> DatetimeMS | None:
    return None if seconds is None else DatetimeMS(int(seconds * 1000))


# -- texts ----------------------------------------------------------------------------------------------------------


class Attachments:
    """What is too large for the document that names it, in parts: each is written once and never changed."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.documents: list[Document] = []

    def keep(self, data: bytes) -> Any:
        """What stands for it in the document: itself, when it is short."""
        if len(data) <= INLINE_BYTES:
            return _as_text(data)
        return {"anexo": self.parts(data)}

    def parts(self, data: bytes) -> list[ObjectId]:
        return [self._part(data[start : start + PART_BYTES]) for start in range(0, len(data), PART_BYTES)]

    def _part(self, data: bytes) -> ObjectId:
        name = ObjectId()
        self.documents.append({"_id": name, "run": self._key, "dados": data})
        return name


Parts = Mapping[ObjectId, bytes]


def _as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def names_in(value: Any) -> Sequence[ObjectId]:
    return value["anexo"] if isinstance(value, dict) else ()


def content(value: Any, parts: Parts) -> bytes:
    """Raises KeyError when a part is missing."""
    if isinstance(value, str):
        return value.encode()
    return b"".join(parts[name] for name in value["anexo"]) if isinstance(value, dict) else value


# -- heads ----------------------------------------------------------------------------------------------------------

NOT_OF_HEADS = dict.fromkeys(
    ("tarefas", "blocos", "historico", "historico_anexos", "payload", "definicao", "busca", "gravacoes", "agenda"), 0
)
BETWEEN = "\x1f"  # id and name, where they are searched; no id may hold it


def lasting_fields(head: RunHead, fingerprint: str, key: str | None) -> Document:
    fields: Document = {
        "correlation_id": head.id,
        "pipeline": head.name,
        "prioridade": head.priority,
        "iniciada_em": moment(head.created_at),
        "busca": f"{head.id}{BETWEEN}{head.name}".casefold(),
        "origem": {
            "created_at": head.created_at,
            "timeout": head.timeout,
            "definition_hash": head.definition_hash,
            "traceparent": head.traceparent,
            "fingerprint": fingerprint,
        },
    }
    if key is not None:
        fields["chave_idempotencia"] = key
    return fields


def changing_fields(head: RunHead, version: int, agenda: Document) -> Document:
    return {
        "status": head.status._value_,
        "versao": head.edition,
        "resumo": summary(head),
        "prazo": moment(head.deadline),
        "concluida_em": moment(head.ended_at),
        "entregas": [_delivery_document(delivery) for delivery in head.deliveries],
        "revisao": version,
        "estado": {
            "deadline": head.deadline,
            "ended_at": head.ended_at,
            "due_at": head.due_at,
            "cancelled": head.cancelled,
            "entries": head.entries,
            "late": head.late,
            "duplicates": head.duplicates,
        },
        "agenda": agenda,
    }


def head_of(document: Document) -> RunHead:
    origin, state, counts = document["origem"], document["estado"], document["resumo"]
    return RunHead(
        id=document["correlation_id"],
        name=document["pipeline"],
        definition_hash=origin["definition_hash"],
        created_at=origin["created_at"],
        deadline=state["deadline"],
        timeout=origin["timeout"],
        total=counts["total"],
        version=document["revisao"],
        status=RUN_STATUS[document["status"]],
        priority=document["prioridade"],
        traceparent=origin["traceparent"],
        ended_at=state["ended_at"],
        due_at=state["due_at"],
        edition=document["versao"],
        cancelled=state["cancelled"],
        entries=state["entries"],
        late=state["late"],
        duplicates=state["duplicates"],
        succeeded=counts["concluidas"],
        failed=counts["erros"],
        timed_out=counts["timeouts"],
        skipped=counts["ignoradas"],
        task_cancelled=counts["canceladas"],
        deliveries=[_delivery_of(delivery) for delivery in document["entregas"]],
    )


def _delivery_document(delivery: Delivery) -> Document:
    return {
        "canal": delivery.channel._value_,
        "destino": delivery.target,
        "status": delivery.status._value_,
        "versao": delivery.edition,
        "tentativas": delivery.attempts,
        "proxima_tentativa_em": moment(delivery.due_at),
        "erro": delivery.error,
        "interno": {"due_at": delivery.due_at, "via": delivery.via},
    }


def _delivery_of(document: Document) -> Delivery:
    return Delivery(
        channel=CHANNEL[document["canal"]],
        target=document["destino"],
        status=DELIVERY_STATUS[document["status"]],
        edition=document["versao"],
        attempts=document["tentativas"],
        due_at=document["interno"]["due_at"],
        error=document["erro"],
        via=document["interno"].get("via"),  # older ones have none
    )


# -- tasks ----------------------------------------------------------------------------------------------------------


def task_document(task: Task, step: Step, attachments: Attachments) -> Document:
    """Only what there is: most of a task's fields are empty for most of its life."""
    inside: Document = {}
    document: Document = {
        "id": step.id,
        "fila": step.queue,
        "status": task.status._value_,
        "tentativas": task.attempt,
        "max_tentativas": task.last_attempt,
        "interno": inside,
    }
    if task.percent is not None or task.note is not None:
        document["progresso"] = {"percentual": task.percent, "mensagem": task.note}
    if task.result is not None:
        document["resultado"] = attachments.keep(task.result)
    if task.reason is not None:
        document["motivo"] = task.reason
    if task.sent_at is not None:
        inside["sent_at"] = task.sent_at
        document["enviada_em"] = moment(task.sent_at)
    if task.deadline is not None:
        inside["deadline"] = task.deadline
        document["prazo"] = moment(task.deadline)
    if task.ended_at is not None:
        inside["ended_at"] = task.ended_at
        document["concluida_em"] = moment(task.ended_at)
    if task.dead_letter:
        document["na_dlq"] = True
    if task.due_at is not None:
        inside["due_at"] = task.due_at
    if task.unsent:
        inside["unsent"] = True
    if task.cause is not None:
        inside["cause"] = task.cause._value_
    if task.mark:
        inside["mark"] = task.mark
    if task.via is not None:
        inside["via"] = task.via
    return document


_NO_PROGRESS: Document = {"percentual": None, "mensagem": None}


def task_of(number: int, document: Document, parts: Parts) -> Task:
    inside, progress = document["interno"], document.get("progresso", _NO_PROGRESS)
    result = document.get("resultado")
    return Task(
        number=number,
        status=TASK_STATUS[document["status"]],
        attempt=document["tentativas"],
        last_attempt=document["max_tentativas"],
        unsent="unsent" in inside,
        due_at=inside.get("due_at"),
        deadline=inside.get("deadline"),
        result=None if result is None else content(result, parts),
        cause=CAUSE[inside.get("cause")],
        reason=document.get("motivo"),
        mark=inside.get("mark", 0),
        percent=progress["percentual"],
        note=progress["mensagem"],
        sent_at=inside.get("sent_at"),
        ended_at=inside.get("ended_at"),
        dead_letter="na_dlq" in document,
        via=inside.get("via"),
    )


def without_results(number: int, document: Document) -> Task:
    return task_of(number, {**document, "resultado": None}, {})


# -- history --------------------------------------------------------------------------------------------------------


def entry_document(entry: HistoryEntry, steps: Sequence[Step]) -> Document:
    document: Document = {
        "seq": entry.seq,
        "timestamp": moment(entry.at),
        "evento": entry.what._value_,
        "interno": {"at": entry.at, "task": entry.task},
    }
    if entry.task is not None:
        document["tarefa"] = steps[entry.task].id
    if entry.attempt is not None:
        document["tentativa"] = entry.attempt
    if entry.detail is not None:
        document["detalhe"] = entry.detail
    return document


def entry_of(document: Document) -> HistoryEntry:
    inside = document["interno"]
    return HistoryEntry(
        seq=document["seq"],
        at=inside["at"],
        what=HAPPENED[document["evento"]],
        task=inside["task"],
        attempt=document.get("tentativa"),
        detail=document.get("detalhe"),
    )


def encode_entries(entries: Sequence[Document]) -> bytes:
    return bson.encode({"entradas": entries})


def decode_entries(data: bytes) -> list[Document]:
    entries: list[Document] = bson.decode(data, OPTIONS)["entradas"]
    return entries
