"""The documents: a run, its inputs, tasks and history as other applications read them, and back.

The words are the API's. `ordem`, `busca`, `origem`, `impressao`, `revisao`, and `interno` anywhere, are ORÁCULO's own.
Times are there twice: as dates for others, which know milliseconds, and exact, as numbers, in `interno`. A payload, a
result or a definition is its JSON text, exactly as it came.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import bson
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument

from oraculo.core.aggregate import summary
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Run, RunDelivery, RunHead, Task
from oraculo.errors import StoreError
from oraculo.stores.mongo.server import Document
from oraculo.stores.stored_words import CAUSE, CHANNEL, DELIVERY_STATUS, HAPPENED, RUN_STATUS, TASK_STATUS

MOST_BYTES = 16_000_000  # of a document; the server takes 16,777,216
INLINE_BYTES = 8_000  # of payload and definition together, up to which they are in the run's own document
PART_BYTES = 7_000_000  # of a payload and of a definition, in one document of the inputs
BETWEEN = "\x1f"  # id and name, where they are searched; no id may hold it


def encoded(document: Mapping[str, Any], run_id: str) -> RawBSONDocument:
    raw = bson.encode(document)
    if len(raw) > MOST_BYTES:
        raise StoreError(
            f"a document of run {run_id} would be {len(raw)} bytes, and MongoDB takes {MOST_BYTES}: "
            "put large results aside with ORACULO_OBJECTS_URL"
        )
    return RawBSONDocument(raw)


def place_in_order(head: RunHead) -> str:
    """Return the text by which runs are ordered: when they were created, to the microsecond, then their id."""
    return f"{max(0, int(head.created_at * 1_000_000)):014x}-{head.id}"


def moment(seconds: float | None) -> DatetimeMS | None:
    return None if seconds is None else DatetimeMS(int(seconds * 1000))


def _without_none(**fields: Any) -> Document:
    """Return the fields that have a value: an index of those that have one stays small."""
    return {name: value for name, value in fields.items() if value is not None}


# -- texts ----------------------------------------------------------------------------------------------------------


def _as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:  # a part that ends within a character
        return data


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _parts(data: bytes) -> Iterator[str | bytes]:
    return (_as_text(data[start : start + PART_BYTES]) for start in range(0, len(data), PART_BYTES))


def _are_inline(run: Run) -> bool:
    return len(run.payload) + len(run.definition) <= INLINE_BYTES


def input_documents(run: Run) -> Iterator[Document]:
    """Yield payload and definition where they are too large for the run's own document, which every change rewrites."""
    if _are_inline(run):
        return
    for number, (payload, definition) in enumerate(zip_longest(_parts(run.payload), _parts(run.definition))):
        yield {"correlation_id": run.id, "parte": number} | _without_none(payload=payload, definicao=definition)


def inputs_of(documents: Sequence[Document]) -> tuple[bytes, bytes]:
    """Return the definition and the payload, from a run's document or from its input documents in order."""
    return _joined(documents, "definicao"), _joined(documents, "payload")


def _joined(documents: Iterable[Document], field: str) -> bytes:
    return b"".join(_as_bytes(one[field]) for one in documents if field in one)


# -- runs -----------------------------------------------------------------------------------------------------------

NOT_OF_HEADS: Document = {"payload": 0, "definicao": 0}


def lasting_fields(run: Run, fingerprint: str, key: str | None) -> Document:
    head = run.head
    inputs = {"payload": _as_text(run.payload), "definicao": _as_text(run.definition)} if _are_inline(run) else {}
    return {
        "_id": head.id,
        "ordem": place_in_order(head),
        "pipeline": head.name,
        "prioridade": head.priority,
        "iniciada_em": moment(head.created_at),
        "busca": f"{head.id}{BETWEEN}{head.name}".casefold(),
        "origem": {
            "created_at": head.created_at,
            "timeout": head.timeout,
            "definition_hash": head.definition_hash,
            "traceparent": head.traceparent,
        },
        "impressao": fingerprint,
        **_without_none(chave_idempotencia=key),
        **inputs,
    }


def changing_fields(head: RunHead, version: int) -> Document:
    return {
        "status": head.status._value_,
        "versao": head.edition,
        "resumo": summary(head),
        "prazo": moment(head.deadline),
        "concluida_em": moment(head.ended_at),
        "entregas": [_delivery_document(delivery) for delivery in head.deliveries],
        "revisao": version,
        "interno": _without_none(
            deadline=head.deadline,
            ended_at=head.ended_at,
            due_at=head.due_at,
            cancelled=head.cancelled,
            entries=head.entries,
            late=head.late,
            duplicates=head.duplicates,
        ),
    }


def head_of(document: Document) -> RunHead:
    counts = document["resumo"]
    return RunHead(
        id=document["_id"],
        name=document["pipeline"],
        total=counts["total"],
        version=document["revisao"],
        status=RUN_STATUS[document["status"]],
        priority=document["prioridade"],
        edition=document["versao"],
        succeeded=counts["concluidas"],
        failed=counts["erros"],
        timed_out=counts["timeouts"],
        skipped=counts["ignoradas"],
        task_cancelled=counts["canceladas"],
        deliveries=[_delivery_of(delivery) for delivery in document["entregas"]],
        **document["origem"],
        **document["interno"],
    )


def _delivery_document(delivery: RunDelivery) -> Document:
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


def _delivery_of(document: Document) -> RunDelivery:
    return RunDelivery(
        channel=CHANNEL[document["canal"]],
        target=document["destino"],
        status=DELIVERY_STATUS[document["status"]],
        edition=document["versao"],
        attempts=document["tentativas"],
        due_at=document["interno"]["due_at"],
        error=document["erro"],
        via=document["interno"]["via"],
    )


# -- tasks ----------------------------------------------------------------------------------------------------------


def task_documents(run: Run, tasks: Iterable[Task]) -> Iterator[Document]:
    place, steps = place_in_order(run.head), run.plan.steps
    for task in tasks:
        step = steps[task.number]
        yield {
            "_id": f"{run.id}#{task.number}",
            "correlation_id": run.id,
            "numero": task.number,
            "ordem": place,
            "id": step.id,
            "fila": step.queue,
            "status": task.status._value_,
            "tentativas": task.attempt,
            "max_tentativas": task.last_attempt,
            **_without_none(
                progresso=_progress(task),
                resultado=None if task.result is None else _as_text(task.result),
                motivo=task.reason,
                enviada_em=moment(task.sent_at),
                prazo=moment(task.deadline),
                concluida_em=moment(task.ended_at),
                na_dlq=task.dead_letter or None,
            ),
            "interno": _without_none(
                unsent=task.unsent or None,
                due_at=task.due_at,
                sent_at=task.sent_at,
                deadline=task.deadline,
                ended_at=task.ended_at,
                cause=None if task.cause is None else task.cause._value_,
                mark=task.mark or None,
                via=task.via,
            ),
        }


def _progress(task: Task) -> Document | None:
    if task.percent is None and task.note is None:
        return None
    return {"percentual": task.percent, "mensagem": task.note}


_NO_PROGRESS: Document = {"percentual": None, "mensagem": None}


def task_of(document: Document) -> Task:
    progress, result = document.get("progresso", _NO_PROGRESS), document.get("resultado")
    task = Task(
        number=document["numero"],
        status=TASK_STATUS[document["status"]],
        attempt=document["tentativas"],
        last_attempt=document["max_tentativas"],
        result=None if result is None else _as_bytes(result),
        reason=document.get("motivo"),
        percent=progress["percentual"],
        note=progress["mensagem"],
        dead_letter="na_dlq" in document,
        **document["interno"],
    )
    task.cause = CAUSE[task.cause]
    return task


# -- history --------------------------------------------------------------------------------------------------------


def entry_documents(run: Run, entries: Iterable[HistoryEntry]) -> Iterator[Document]:
    steps = run.plan.steps
    for entry in entries:
        yield {
            "correlation_id": run.id,
            "seq": entry.seq,
            "timestamp": moment(entry.at),
            "evento": entry.what._value_,
            **_without_none(
                tarefa=None if entry.task is None else steps[entry.task].id,
                tentativa=entry.attempt,
                detalhe=entry.detail,
            ),
            "interno": {"at": entry.at, "task": entry.task},
        }


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
