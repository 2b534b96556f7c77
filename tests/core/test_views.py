"""Runs as the API shows them."""

import json
from typing import Any

import msgspec
import pytest

from oraculo.api.replies import PAGE_BYTES
from oraculo.core.events import Delivered, DeliveryFailed, Progressed, Sent
from oraculo.core.run import Run, RunStatus
from oraculo.core.views import accepted_view, entry_view, head_view, links, run_view

from .building import START, fan_out, flow


def shown(run: Run) -> dict[str, Any]:
    """Return the view that a client reads."""
    view: dict[str, Any] = json.loads(msgspec.json.encode(run_view(run)))
    return view


def test_an_accepted_request() -> None:
    assert accepted_view("a b/c", RunStatus.RUNNING) == {
        "correlation_id": "a b/c",
        "status": "em_execucao",
        "links": links("a b/c"),
    }


def test_where_a_run_can_be_seen_and_acted_on() -> None:
    assert links("a b/c") == {
        "self": "/orquestracoes/a%20b%2Fc",
        "eventos": "/orquestracoes/a%20b%2Fc/eventos",
        "explicacao": "/orquestracoes/a%20b%2Fc/explicacao",
        "cancelar": "/orquestracoes/a%20b%2Fc/cancelar",
        "repetir": "/orquestracoes/a%20b%2Fc/repetir",
    }


@pytest.mark.parametrize("letter", ["\U0001f600", "\x01", "/"])
def test_the_largest_runs_fit_a_page_of_a_list(letter: str) -> None:
    head = fan_out("fila_x", correlation_id="r").run.head
    head.id = head.name = letter * 128
    assert 500 * len(msgspec.json.encode(head_view(head))) < PAGE_BYTES


def test_a_run_in_a_list() -> None:
    driver = fan_out("a", timeout=30, prioridade=4)
    assert head_view(driver.head) == {
        "correlation_id": "abc123",
        "status": "em_execucao",
        "pipeline": None,
        "versao": 0,
        "prioridade": 4,
        "resumo": {"total": 1, "concluidas": 0, "erros": 0, "timeouts": 0, "ignoradas": 0, "canceladas": 0},
        "iniciada_em": "2025-10-14T12:00:00.000Z",
        "prazo": "2025-10-14T12:00:30.000Z",
        "concluida_em": None,
        "duracao_ms": None,
        "links": links("abc123"),
    }
    driver.at(1.5).ok("a")
    assert (head_view(driver.head)["concluida_em"], head_view(driver.head)["duracao_ms"]) == (
        "2025-10-14T12:00:01.500Z",
        1500,
    )


def test_an_open_run_has_its_tasks_and_no_aggregate() -> None:
    driver = flow("a", {"type": "b", "dependsOn": ["a"], "optional": True}, timeout=30).sent()
    driver.apply(Progressed(0, 40.0, "lendo"))
    view = shown(driver.run)
    assert "resultados" not in view
    assert view["pipeline"] == "p"
    assert view["definicao"] == driver.head.definition_hash
    first, second = view["tarefas"]
    assert first == {
        "id": "a",
        "fila": "a",
        "status": "em_execucao",
        "fase": "em_trabalho",
        "tentativas": 1,
        "max_tentativas": 3,
        "depende_de": [],
        "opcional": False,
        "progresso": {"percentual": 40.0, "mensagem": "lendo"},
        "motivo": None,
        "enviada_em": "2025-10-14T12:00:00.000Z",
        "prazo": None,
        "proxima_tentativa_em": None,
        "concluida_em": None,
        "na_dlq": False,
    }
    assert (second["status"], second["depende_de"], second["opcional"]) == ("pendente", ["a"], True)
    assert (second["tentativas"], second["progresso"], second["enviada_em"]) == (0, None, None)


def test_the_moment_of_a_dead_letter_is_not_shown_as_that_of_the_command() -> None:
    driver = fan_out("a")  # the answer comes before the note that the command was sent
    driver.at(1).fail("a", retryable=False)
    driver.at(2).apply(Sent(0, 1, dead_letter=True))
    [task] = shown(driver.run)["tarefas"]
    assert (task["concluida_em"], task["enviada_em"]) == ("2025-10-14T12:00:01.000Z", None)


def test_the_tasks_are_encoded_one_by_one() -> None:
    """A hundred thousand of them at once would hold up everything else, in whatever thread."""
    first, second = run_view(fan_out("a", "b").run)["tarefas"]
    assert isinstance(first, msgspec.Raw)
    assert json.loads(bytes(second))["id"] == "b"


@pytest.mark.parametrize(("percent", "note"), [(40.0, None), (None, "lendo")])
def test_progress_is_shown_when_only_half_of_it_was_reported(percent: float | None, note: str | None) -> None:
    driver = fan_out("a").sent()
    driver.apply(Progressed(0, percent, note))
    assert shown(driver.run)["tarefas"][0]["progresso"] == {"percentual": percent, "mensagem": note}


def test_an_ended_run_has_its_aggregate_too() -> None:
    driver = fan_out("a", "b", webhook="http://h").sent()
    driver.ok("a", b'{"n": 1}')
    driver.ok("a")
    driver.at(2).fail_for_good("b", "boom")
    view = shown(driver.run)
    assert view.keys() > head_view(driver.head).keys(), "it has all that a list shows of it"
    assert (view["status"], view["versao"], view["resultados"]) == ("parcial", 1, {"a": {"n": 1}})
    assert view["falhas"] == {"b": {"status": "erro", "motivo": "boom", "tentativas": 1}}
    assert (view["respostas_tardias"], view["respostas_repetidas"]) == (0, 1)
    assert (view["tarefas"][1]["na_dlq"], view["tarefas"][1]["motivo"]) == (True, "boom")
    assert view["tarefas"][1]["concluida_em"] == "2025-10-14T12:00:02.000Z"
    assert view["entregas"] == [
        {
            "canal": "webhook",
            "destino": "http://h",
            "status": "pendente",
            "versao": 1,
            "tentativas": 0,
            "proxima_tentativa_em": "2025-10-14T12:00:17.000Z",
            "erro": None,
        }
    ]


@pytest.mark.parametrize(
    ("webhook", "seen"),
    [
        ("https://ana:s3cr@t:x@h:8443/in?to=b:c@d&token=t", "https://ana:***@h:8443/in?***"),
        ("https://ana@casa.com:s3cret@h/in", "https://ana@casa.com:***@h/in"),
        ("https://:s3cret@[::1]:80", "https://:***@[::1]:80"),
        ("https://ana@h:8443/a:b@c", "https://ana@h:8443/a:b@c"),
        ("https://h?next=a:b@c", "https://h?***"),
        ("https://h/in?token=t,u:#x?y", "https://h/in?***"),
    ],
)
def test_what_lets_one_in_at_a_webhook_is_not_shown(webhook: str, seen: str) -> None:
    driver = fan_out("a", webhook=webhook).sent()
    driver.ok("a")
    driver.apply(DeliveryFailed(0, 1, f"no answer from {webhook}", START + 5))
    (delivery,) = shown(driver.run)["entregas"]
    assert (delivery["destino"], delivery["erro"]) == (seen, f"no answer from {seen}")
    failed = entry_view(driver.run.plan, driver.history[-1])
    assert failed["detalhe"] == f"webhook {seen}: no answer from {seen}"
    driver.apply(Delivered(0, 1))
    delivered = entry_view(driver.run.plan, driver.history[-1])
    assert delivered["detalhe"] == f"webhook {seen}, versao 1"
    assert driver.head.deliveries[0].target == webhook, "the delivery itself needs it"


def test_what_a_worker_wrote_is_shown_as_it_is() -> None:
    driver = fan_out("a").sent()
    driver.fail_for_good("a", "cannot reach db://u:p@h")
    assert [entry_view(driver.run.plan, entry)["detalhe"] for entry in driver.history][-2] == "cannot reach db://u:p@h"


def test_a_retry_has_its_moment() -> None:
    driver = flow({"type": "a", "timeout": 60, "retry": {"backoff": 8}}).sent()
    assert shown(driver.run)["tarefas"][0]["proxima_tentativa_em"] is None
    driver.fail("a", jitter=0.5)
    (task,) = shown(driver.run)["tarefas"]
    assert task["proxima_tentativa_em"] == "2025-10-14T12:00:04.000Z"
    assert task["prazo"] == "2025-10-14T12:01:00.000Z"


def test_a_line_of_the_history() -> None:
    driver = fan_out("a").sent().at(1)
    driver.fail("a", "boom", jitter=0.5)
    plan = driver.run.plan
    assert entry_view(plan, driver.history[0]) == {
        "seq": 1,
        "timestamp": "2025-10-14T12:00:00.000Z",
        "evento": "orquestracao_iniciada",
        "tarefa": None,
        "tentativa": None,
        "detalhe": None,
        "rastreamento": None,
    }
    assert entry_view(plan, driver.history[2]) == {
        "seq": 3,
        "timestamp": "2025-10-14T12:00:01.000Z",
        "evento": "tentativa_falhou",
        "tarefa": "a",
        "tentativa": 1,
        "detalhe": "boom; next attempt in 0.5 s",
        "rastreamento": None,
    }
