"""Words that a store keeps: read back as they were meant, and never a new one that an older version would meet."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Cause, RunHead, RunStatus, Task, TaskStatus
from oraculo.errors import StoreError, StoreUnavailable, WrittenByNewer
from oraculo.pipeline.definition import Definition, decode_definition
from oraculo.stores.mongo import schema as mongo
from oraculo.stores.records import CAUSE, RUN_STATUS, TASK_STATUS
from oraculo.stores.redis import server as redis
from oraculo.stores.sql import migrations

# Both change together: see WHAT_TO_DO.
NUMBERS = {"sqlite": 1, "postgres": 2, "redis": 1, "mongo": 1}
WORDS = {
    "Cause": "answer dependency quorum request run_deadline task_deadline unsendable",
    "Channel": "fila webhook",
    "DeliveryStatus": "entregue nao_entregue pendente",
    "Happened": "broker_perdido carta_morta_descartada entrega_abandonada entrega_concluida entrega_falhou "
    "orquestracao_encerrada orquestracao_iniciada orquestracao_reaberta progresso resposta_recusada resposta_repetida "
    "resposta_tardia resposta_tardia_aceita tarefa_cancelada tarefa_concluida tarefa_enviada tarefa_erro "
    "tarefa_ignorada tarefa_reaberta tarefa_timeout tentativa_falhou",
    "Kind": "fan_out pipeline",
    "OnLate": "amend record",
    "RunStatus": "cancelada concluida em_execucao erro parcial timeout",
    "TaskStatus": "cancelada concluida em_execucao erro ignorada pendente timeout",
}
WHAT_TO_DO = """
The words that stores keep have changed, and {stores} would have the number of before: whoever goes back to the version
before would meet a word that it does not know, in the middle of its work. Give each of the four stores a new migration,
if only an empty one, so that the version before is refused when it starts, by name. Then write the new words and the
new numbers into this file."""


def stored_enums() -> set[type[StrEnum]]:
    """All that is anywhere in what a store keeps of a run, and in what it keeps of a pipeline."""
    return set(_enums_in(inspect.multi_type_info([RunHead, Task, HistoryEntry, Definition])))


def _enums_in(node: Any) -> Iterator[Any]:
    if isinstance(node, inspect.EnumType):
        yield node.cls
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _enums_in(item)
    elif isinstance(node, msgspec.Struct):
        for name in node.__struct_fields__:
            yield from _enums_in(getattr(node, name))


def numbers() -> dict[str, int]:
    return {
        "sqlite": len(migrations("sqlite")),
        "postgres": len(migrations("postgres")),
        "redis": len(redis.MIGRATIONS),
        "mongo": len(mongo.MIGRATIONS),
    }


def test_no_word_comes_or_goes_without_a_new_number_in_every_store() -> None:
    words = {enum.__name__: " ".join(sorted(enum)) for enum in stored_enums()}
    present = numbers()
    same = [store for store, number in NUMBERS.items() if present[store] == number]
    assert words == WORDS or not same, WHAT_TO_DO.format(stores=", ".join(same))
    assert (words, present) == (WORDS, NUMBERS), "write the words and the numbers of now into this file"


def test_what_was_written_is_read_as_it_was_meant() -> None:
    assert [RUN_STATUS[one.value] for one in RunStatus] == list(RunStatus)
    assert [TASK_STATUS[one.value] for one in TaskStatus] == list(TaskStatus)
    assert [CAUSE[one] for one in (None, *(cause.value for cause in Cause))] == [None, *Cause]


def test_a_definition_of_a_newer_version_is_told_as_that() -> None:
    with pytest.raises(WrittenByNewer, match=r"definition that cannot be read .*'nunca'.*onLate.*: run that version"):
        decode_definition(b'{"name":"p","steps":[{"id":"a","queue":"a"}],"onLate":"nunca"}')


def test_what_a_newer_version_wrote_is_not_waited_for() -> None:
    """As a store that is away would be: it is one run's, and no other is held up."""
    assert issubclass(WrittenByNewer, StoreError)
    assert not issubclass(WrittenByNewer, StoreUnavailable)
