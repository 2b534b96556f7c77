"""The settings name what may be reached behind the bridges, and never the transports' own names."""

import pytest

from oraculo.pipeline.bridge_rules import BullmqAllow, CeleryAllow
from oraculo.pipeline.bridges import Bridge, read_bridge

ALL = CeleryAllow(("*",), ("*",))
LOJA = CeleryAllow(("loja.*",), ("alta", "lote-*"), "celery")
NONE = "(which names none)"
OWN = "is one that Celery's transport keeps for itself; name another"


def bridge_of(url: str) -> Bridge:
    found = read_bridge(url)
    assert isinstance(found, Bridge), found
    return found


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("celery://loja.precos", None),
        ("celery://loja.precos?queue=celery", None),
        ("celery://loja.precos?queue=alta", None),
        ("celery://loja.precos?queue=lote-2", None),
        ("celery://outra.precos", "the task 'outra.precos' is outside ORACULO_CELERY_TASKS_ALLOW (loja.*)"),
        ("celery://Loja.precos", "the task 'Loja.precos' is outside ORACULO_CELERY_TASKS_ALLOW (loja.*)"),
        ("celery://loja.x?queue=Alta", "the queue 'Alta' is outside ORACULO_CELERY_QUEUES_ALLOW (alta, lote-*)"),
    ],
)
def test_a_task_and_its_queue_are_reached_when_a_pattern_names_them(url: str, fault: str | None) -> None:
    assert LOJA.fault(bridge_of(url), "t") == fault


def test_nothing_is_reached_unless_it_is_named() -> None:
    celery, bullmq = Bridge("celery", "loja.x"), Bridge("bullmq", "fila")
    assert CeleryAllow().fault(celery, "t") == f"the task 'loja.x' is outside ORACULO_CELERY_TASKS_ALLOW {NONE}"
    assert BullmqAllow().fault(bullmq, "t") == f"the queue 'fila' is outside ORACULO_BULLMQ_QUEUES_ALLOW {NONE}"


@pytest.mark.parametrize(
    "url",
    ["celery://loja.x?queue=un%61cked", "celery://loja.x?queue=alta&queue=unacked", "celery://loja.x?queue=_kombu%2Ex"],
)
def test_another_way_of_writing_a_transports_own_name_is_no_way_around(url: str) -> None:
    assert str(ALL.fault(bridge_of(url), "t")).endswith(OWN)


@pytest.mark.parametrize("queue", ["un%61cked", "alta&send=payload", "a+b", "a b", "coração", "a=b"])
def test_an_address_that_is_shown_leads_to_the_same_place(queue: str) -> None:
    bridge = Bridge("celery", "loja.x", queue=queue)
    assert read_bridge(bridge.url) == bridge


@pytest.mark.parametrize(
    "queue",
    [
        "unacked",
        "unacked_index",
        "unacked_mutex",
        "oraculo-respostas",
        "loja.oraculo-respostas",
        "loja.oraculo-respostas.unacked_index",
        "_kombu.binding.celery",
        "loja:unacked",
        "loja_unacked_mutex",
        "loja:_kombu.binding.celery",
        "celery_delayed_27",
        "chord-unlock-1f0c",
        "loja:celery-task-meta-1f0c",
        "celeryev",
        "celeryev.9a1b",
        "1f0c.reply.celery.pidbox",
        "celery@host.celery.pidbox",
        "amq.gen-x",
        "celery-task-meta-1f0c",
    ],
)
def test_no_pattern_leads_to_a_transports_own_names(queue: str) -> None:
    assert ALL.fault(Bridge("celery", "loja.precos", queue=queue), "t") == f"the queue '{queue}' {OWN}"


def test_no_pattern_leads_to_celerys_own_tasks_which_run_any_other() -> None:
    fault = ALL.fault(Bridge("celery", "celery.map", kwargs={"task": "loja.estornar"}), "t")
    assert fault == "the task 'celery.map' is Celery's own; name a task of your app"


@pytest.mark.parametrize(
    ("url", "task_id", "named"),
    [
        ("bullmq://images-queue", "t", None),
        ("bullmq://images-queue?name=any", "t", None),
        ("bullmq://pagamentos?name=cobrar", "t", None),
        ("bullmq://pagamentos", "cobrar-2", None),
        ("bullmq://fila", "t", "the queue 'fila'"),
        ("bullmq://pagamentos?name=estornar", "cobrar", "the job 'estornar' of the queue 'pagamentos'"),
        ("bullmq://pagamentos", "estornar", "the job 'estornar' of the queue 'pagamentos'"),
        ("bullmq://pagamentos", "bullmq://pagamentos", "the job '' of the queue 'pagamentos'"),
    ],
)
def test_a_queue_and_its_jobs_are_reached_when_a_pattern_names_them(url: str, task_id: str, named: str | None) -> None:
    """A job has its step's id as its name where the URL gives none."""
    fault = BullmqAllow(("images-*", "pagamentos:cobrar*")).fault(bridge_of(url), task_id)
    assert fault == (named and f"{named} is outside ORACULO_BULLMQ_QUEUES_ALLOW (images-*, pagamentos:cobrar*)")


@pytest.mark.parametrize(
    ("url", "task_id", "is_allowed"),
    [
        ("bullmq://pagamentos?name=cobrar", "t", True),
        ("bullmq://pagamentos?name=cobrar", "cobrar", False),
        ("bullmq://pagamentos", "cobrar", False),
        ("bullmq://pagamentos", "bullmq://pagamentos", False),
        ("bullmq://outra", "cobrar", True),
    ],
)
def test_for_old_bull_a_job_named_as_its_step_has_no_name(url: str, task_id: str, is_allowed: bool) -> None:
    """Any worker takes a job without a name, so a pattern for `cobrar` does not allow it."""
    allow = BullmqAllow(("pagamentos:cobrar", "outra:__default__"), legacy=True)
    fault = allow.fault(bridge_of(url), task_id)
    assert (fault is None) == is_allowed
    assert is_allowed or "the job '__default__' of the queue 'pagamentos' is outside" in str(fault)


@pytest.mark.parametrize("queue", ["fila:wait", "fila:meta", "fila:7:lock"])
def test_no_pattern_leads_to_bullmqs_own_keys(queue: str) -> None:
    assert isinstance(read_bridge(f"bullmq://{queue}"), str)
    assert BullmqAllow(("*",)).fault(Bridge("bullmq", queue), "t") is not None
