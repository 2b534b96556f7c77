"""The queues that requests, pipelines and calls may name."""

import pytest

from oraculo.pipeline.queue_rules import QueueRules, patterns_fault
from oraculo.wire import naming

SYSTEM = [
    "amq.direct",
    "amq.rabbitmq.reply-to",
    "oraculo.memoria",
    "oraculo.x",
    "oraculo-respostas",
    "resultados.engine-1",
    "_INBOX.abc",
    "mqtt-subscription-a",
    "stomp-subscription-b",
    "celeryev.1-2",
    "host.celery.pidbox",
    "celery.pidbox",
    "_kombu.binding.celery",
    "unacked",
    "unacked_index",
    "unacked_mutex",
    "loja_unacked_mutex",
    "loja._kombu.binding.celery",
    "loja.oraculo-respostas",
    "host.loja.pidbox",
    "celery_delayed_27",
    "celery-task-meta-1f0c",
    "loja.celery-taskset-meta-1f0c",
    "chord-unlock-1f0c",
]


@pytest.mark.parametrize("queue", SYSTEM)
@pytest.mark.parametrize("patterns", [(), ("*",)])
def test_a_system_queue_is_never_a_target(queue: str, patterns: tuple[str, ...]) -> None:
    targets = QueueRules(patterns)
    for fault in (
        naming.queue_fault(queue),
        naming.reply_queue_fault(queue),
        targets.fault(queue),
        targets.call_fault(queue),
    ):
        assert fault == f"'{queue}' is a system queue; name one of your own"


def test_a_queue_that_rabbitmq_named_for_a_client_takes_replies_and_no_commands() -> None:
    assert naming.reply_queue_fault("amq.gen-x") is None
    assert QueueRules().fault("amq.gen-x") is None
    assert naming.queue_fault("amq.gen-x") is not None


@pytest.mark.parametrize("queue", ["orquestrador", "resultados", "resultados.dlq", "ponte-celery"])
def test_calls_reach_the_engines_own_queues_whatever_the_patterns(queue: str) -> None:
    targets = QueueRules(["loja.*"])
    assert targets.call_fault(queue) is None
    assert targets.fault(queue) is not None


def test_the_patterns_bound_what_is_named() -> None:
    targets = QueueRules(["escavador_*", "fila-[ab]", "x?"])
    for queue in ("escavador_youtube", "fila-a", "x1"):
        assert targets.fault(queue) is None
        assert targets.call_fault(f"{queue}.dlq") is None
    for queue in ("escavador", "fila-c", "Escavador_a", "x", "x11", "y.escavador_a"):
        assert targets.fault(queue) == f"'{queue}' is outside ORACULO_QUEUES_ALLOW (escavador_*, fila-[ab], x?)"
        assert targets.call_fault(queue) == targets.fault(queue)


def test_without_patterns_every_other_queue_may_be_named() -> None:
    assert [QueueRules().fault(queue) for queue in ("a", "loja.pedidos", "oraculos", "celery")] == [None] * 4


@pytest.mark.parametrize("pattern", ["a b", "", "a/b", "é*"])
def test_a_pattern_that_no_name_can_match_is_a_fault(pattern: str) -> None:
    assert patterns_fault(["a*", pattern])
    assert patterns_fault(["a*", "[!b]?"]) is None
