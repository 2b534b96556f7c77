"""What a run's history tells, one entry for each thing that happened."""

from enum import StrEnum

import msgspec

MAX_TRACEBACK = 16 * 1024  # bytes
_TRACEBACK_MARK = "\x1e"  # in a detail, before the traceback of the attempt; no other text has it


class Happened(StrEnum):
    STARTED = "orquestracao_iniciada"
    SENT = "tarefa_enviada"
    PROGRESS = "progresso"
    SUCCEEDED = "tarefa_concluida"
    ATTEMPT_FAILED = "tentativa_falhou"
    FAILED = "tarefa_erro"
    TIMED_OUT = "tarefa_timeout"
    SKIPPED = "tarefa_ignorada"
    CANCELLED = "tarefa_cancelada"
    REOPENED = "tarefa_reaberta"
    BROKER_LOST = "broker_perdido"
    LATE = "resposta_tardia"
    DUPLICATE = "resposta_repetida"
    AMENDED = "resposta_tardia_aceita"
    ANSWER_REFUSED = "resposta_recusada"
    RUN_ENDED = "orquestracao_encerrada"
    RUN_REOPENED = "orquestracao_reaberta"
    DELIVERED = "entrega_concluida"
    DELIVERY_FAILED = "entrega_falhou"
    UNDELIVERED = "entrega_abandonada"
    DEAD_LETTER_DISCARDED = "carta_morta_descartada"


class HistoryEntry(msgspec.Struct, frozen=True, gc=False):
    seq: int
    at: float
    what: Happened
    task: int | None = None
    attempt: int | None = None
    detail: str | None = None  # after a failure with the worker's traceback behind it: see `parted`


def bounded_traceback(text: str) -> str:
    """Return a traceback as it is sent and kept: of a long one the end, which names the error and its place."""
    encoded = text.replace("\0", "\ufffd").replace(_TRACEBACK_MARK, "\ufffd").encode(errors="replace")
    if len(encoded) <= MAX_TRACEBACK:
        return encoded.decode()
    return "…" + encoded[-(MAX_TRACEBACK - len("…".encode())) :].decode(errors="ignore")


def with_traceback(detail: str, traceback: str | None) -> str:
    return detail if traceback is None else f"{detail}{_TRACEBACK_MARK}{traceback}"


def parted(detail: str | None) -> tuple[str | None, str | None]:
    """Return the detail of a history entry for people, and the traceback behind it."""
    told, mark, traceback = (detail or "").partition(_TRACEBACK_MARK)
    return (told, traceback) if mark else (detail, None)
