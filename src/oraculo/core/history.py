"""The entries of a run's history, one for each thing that happened."""

from enum import StrEnum

import msgspec


class Happened(StrEnum):
    """The kinds of history entries, by their names on the wire."""

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
    """One entry: the moment, the kind, and the task and attempt if it has one."""

    seq: int
    at: float
    what: Happened
    task: int | None = None
    attempt: int | None = None
    detail: str | None = None  # a failure may carry its traceback behind it, see `wire.tracebacks`
