"""Names on the wire."""

import time
import tracemalloc
from collections.abc import Callable

import pytest

from oraculo.wire import naming
from oraculo.wire.naming import QueueNames, numbered


@pytest.mark.parametrize("name", ["a", "escavador_youtube", "images-queue", "a.b.C-9", "x" * 128])
def test_a_name_has_letters_digits_and_three_signs(name: str) -> None:
    assert naming.is_name(name)
    assert naming.queue_fault(name) is None


@pytest.mark.parametrize("name", ["", "a b", "é", "a/b", "x" * 129, "a\n", "a*"])
def test_anything_else_is_no_name(name: str) -> None:
    assert not naming.is_name(name)
    assert "letters, digits" in str(naming.queue_fault(name))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (7, "must be a string"),
        ("orquestrador", "own queue"),
        ("resultados", "own queue"),
        ("text-queue.dlq", "dead-letter queue"),
    ],
)
def test_what_cannot_be_a_destination_is_reported(name: object, problem: str) -> None:
    assert problem in str(naming.queue_fault(name))


@pytest.mark.parametrize(
    ("queue", "command", "answer"),
    [
        ("escavador_youtube", "iniciar_coleta", "resultado_coleta"),
        ("escavador", "iniciar_coleta", "resultado_coleta"),
        ("executador_relatorio", "iniciar_execucao", "resultado_execucao"),
        ("images-queue", "iniciar_execucao", "resultado_execucao"),
        ("o_escavador", "iniciar_execucao", "resultado_execucao"),
    ],
)
def test_the_destination_decides_the_events(queue: str, command: str, answer: str) -> None:
    assert (naming.command_event(queue), naming.answer_event(queue)) == (command, answer)


@pytest.mark.parametrize(
    ("queue", "source"),
    [
        ("escavador_youtube", "youtube"),
        ("escavador-blog", "blog"),
        ("escavador", "escavador"),
        ("escavador_X", "X"),
        ("outro", "outro"),
    ],
)
def test_the_source_is_the_queue_without_its_role(queue: str, source: str) -> None:
    assert naming.source_of(queue) == source


def test_the_dead_letters_of_a_queue() -> None:
    assert naming.dlq_of("resultados") == "resultados.dlq"


def test_a_prefix_is_put_before_and_taken_off() -> None:
    names = QueueNames("prod.")
    assert (names.requests, names.answers) == ("prod.orquestrador", "prod.resultados")
    assert names.physical("a") == "prod.a"
    assert names.logical("prod.a") == "a"
    assert QueueNames().physical("a") == "a"


def test_no_prefix_comes_before_a_queue_that_rabbitmq_named() -> None:
    names = QueueNames("prod.")
    assert names.reply_queue("respostas") == "prod.respostas"
    assert names.reply_queue("amq.gen-JzTY20BRgKO") == "amq.gen-JzTY20BRgKO"
    assert names.reply_queue("amqp") == "prod.amqp"


def test_the_nearest_name_is_offered_else_the_known_ones() -> None:
    assert naming.nearest("timout", ["timeout", "steps"]) == "; did you mean 'timeout'?"
    assert naming.nearest("zzz", ["b", "a"]) == "; known: a, b"
    assert naming.nearest("zzz", []) == ""


def test_of_the_known_names_the_first_twelve_are_reported() -> None:
    assert naming.nearest("zzz", "mlkjihgfedcba") == "; known: a, b, c, d, e, f, g, h, i, j, k, l, …"
    assert naming.nearest("zzz", "lkjihgfedcba") == "; known: a, b, c, d, e, f, g, h, i, j, k, l"


def test_among_a_thousand_names_the_nearest_is_looked_for() -> None:
    names = [f"step_{number}" for number in range(naming.MAX_COMPARED)]
    assert naming.nearest("stepp_999", names) == "; did you mean 'step_999'?"


def test_among_very_many_names_none_is_looked_for() -> None:
    started = time.process_time()
    assert naming.nearest("step_1x", [f"step_{number}" for number in range(100_000)]) == ""
    assert time.process_time() - started < 1


def test_a_value_is_shown_short() -> None:
    assert naming.shown("a") == "'a'"
    assert naming.shown("x" * 58) == f"'{'x' * 58}'"
    assert len(naming.shown("x" * 1000)) == 60
    assert naming.shown("x" * 1000).endswith("…")
    assert naming.shown(2**511) == naming.shown(2**20_000) == "a very long number"
    assert naming.shown(2**510) == "33519519824856492748935062495514615318698414551480983444308…"
    assert naming.shown([1, 2, 3, 4, 5, 6, 7, 8]) == "[1, 2, 3, 4, 5, 6, 7, 8]"
    assert naming.shown([1, 2, 3, 4, 5, 6, 7, 8, 9]) == "[1, 2, 3, 4, 5, 6, 7, 8, …]"
    assert naming.shown([1, {"a": [None, 2.5]}]) == "[1, {'a': [None, 2.5]}]"
    assert naming.shown([[[[[1]]]]]) == "[[[[…]]]]"
    assert naming.shown({}) == "{}"


@pytest.mark.parametrize("wrapped", [lambda text: text, lambda text: [text], lambda text: {"a": [text]}])
def test_a_huge_text_is_not_copied_to_show_its_beginning(wrapped: Callable[[str], object]) -> None:
    value = wrapped("x" * 10_000_000)
    tracemalloc.start()
    try:
        naming.shown(value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_of_a_huge_value_only_the_beginning_is_looked_at() -> None:
    million = list(range(1_000_000))
    wide = [[million] * 1000] * 1000
    values = (million, dict.fromkeys(million), "x" * 10**8, wide, [2**20_000] * 10**6, {"a": wide})
    started = time.process_time()
    for value in values:
        assert len(naming.shown(value)) <= 60
    assert time.process_time() - started < 0.5


def test_things_of_one_kind_are_numbered_by_their_order() -> None:
    assert numbered(["redis", "rabbitmq", "redis", "redis"]) == ["redis", "rabbitmq", "redis-2", "redis-3"]
    assert numbered([]) == []
