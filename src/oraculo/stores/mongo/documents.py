"""The documents: a run, its inputs, tasks and history as other applications read them, and back.

Public fields have the API's words. `interno` has the rest of a record, with exact times: a date knows milliseconds.
`ordem`, `busca`, `impressao` and `revisao` are ORÁCULO's own, too. A payload, a result or a definition is its JSON
text, exactly as it came.
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
from oraculo.stores import records
from oraculo.stores.mongo.server import Document
from oraculo.stores.records import ENTRY, HEAD, TASK, Record, entry_record, head_record, task_record

MOST_BYTES = 16_000_000  # of a document; the server takes 16,777,216
INLINE_BYTES = 8_000  # of payload and definition together, up to which they are in the run's own document
PART_BYTES = 7_000_000  # of a payload and of a definition, in one document of the inputs
BETWEEN = "\x1f"  # separates id and name in the searched text; no id holds it


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


# -- records: the fields of public names, and the rest in `interno` --------------------------------------------------

_OF_HEADS = {
    "id": "_id",
    "name": "pipeline",
    "version": "revisao",
    "status": "status",
    "priority": "prioridade",
    "edition": "versao",
}
_OF_TASKS = {
    "number": "numero",
    "status": "status",
    "attempt": "tentativas",
    "last_attempt": "max_tentativas",
    "result": "resultado",
    "reason": "motivo",
}
_RESULT = TASK.index("result")
_OF_ENTRIES = {"seq": "seq", "what": "evento", "attempt": "tentativa", "detail": "detalhe"}


def _document(names: Sequence[str], record: Record, public: Mapping[str, str]) -> Document:
    """Return the fields that have a value: an index of those that have one stays small."""
    document: Document = {}
    inside: Document = {}
    for name, value in zip(names, record, strict=True):
        if value is not None and value is not False:
            if name in public:
                document[public[name]] = value
            else:
                inside[name] = value
    return document | {"interno": inside}


def _record(names: Sequence[str], document: Document, public: Mapping[str, str]) -> Record:
    inside = document["interno"]
    return [document.get(public[name]) if name in public else inside.get(name) for name in names]


# -- runs -----------------------------------------------------------------------------------------------------------

NOT_OF_HEADS: Document = {"payload": 0, "definicao": 0}


def new_run_fields(run: Run, fingerprint: str, key: str | None) -> Document:
    """Return the fields that only a creation writes."""
    head = run.head
    inputs = {"payload": _as_text(run.payload), "definicao": _as_text(run.definition)} if _are_inline(run) else {}
    return {
        "ordem": place_in_order(head),
        "iniciada_em": moment(head.created_at),
        "busca": f"{head.id}{BETWEEN}{head.name}".casefold(),
        "impressao": fingerprint,
        **_without_none(chave_idempotencia=key),
        **inputs,
    }


def head_fields(head: RunHead, version: int) -> Document:
    return {
        **_document(HEAD, head_record(head, version), _OF_HEADS),
        "resumo": summary(head),
        "prazo": moment(head.deadline),
        "concluida_em": moment(head.ended_at),
        "entregas": [_delivery_document(delivery) for delivery in head.deliveries],
    }


def head_of(document: Document) -> RunHead:
    return records.head_of(_record(HEAD, document, _OF_HEADS))


def _delivery_document(delivery: RunDelivery) -> Document:
    return {
        "canal": delivery.channel._value_,
        "destino": delivery.target,
        "status": delivery.status._value_,
        "versao": delivery.edition,
        "tentativas": delivery.attempts,
        "proxima_tentativa_em": moment(delivery.due_at),
        "erro": delivery.error,
    }


# -- tasks ----------------------------------------------------------------------------------------------------------


def task_documents(run: Run, tasks: Iterable[Task]) -> Iterator[Document]:
    place, steps = place_in_order(run.head), run.plan.steps
    for task in tasks:
        step = steps[task.number]
        document = _document(TASK, task_record(task), _OF_TASKS)
        if task.result is not None:
            document["resultado"] = _as_text(task.result)
        yield {
            "_id": f"{run.id}#{task.number}",
            "correlation_id": run.id,
            "ordem": place,
            "id": step.id,
            "fila": step.queue,
            **document,
            **_without_none(
                progresso=_progress(task),
                enviada_em=moment(task.sent_at),
                prazo=moment(task.deadline),
                concluida_em=moment(task.ended_at),
                na_dlq=task.dead_letter or None,
            ),
        }


def _progress(task: Task) -> Document | None:
    if task.percent is None and task.note is None:
        return None
    return {"percentual": task.percent, "mensagem": task.note}


def task_of(document: Document) -> Task:
    record = _record(TASK, document, _OF_TASKS)
    if (result := record[_RESULT]) is not None:
        record[_RESULT] = _as_bytes(result)
    return records.task_of(record)


# -- history --------------------------------------------------------------------------------------------------------


def entry_documents(run: Run, entries: Iterable[HistoryEntry]) -> Iterator[Document]:
    steps = run.plan.steps
    for entry in entries:
        yield {
            "correlation_id": run.id,
            "timestamp": moment(entry.at),
            **_without_none(tarefa=None if entry.task is None else steps[entry.task].id),
            **_document(ENTRY, entry_record(entry), _OF_ENTRIES),
        }


def entry_of(document: Document) -> HistoryEntry:
    return records.entry_of(_record(ENTRY, document, _OF_ENTRIES))
