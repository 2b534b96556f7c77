"""The one answer that a run gives. Its status is tested with the machine's endings."""

import json

from oraculo.core.aggregate import aggregate, encode_aggregate, summary
from oraculo.core.events import Cancelled

from .building import RUN_ID, fan_out, flow


def test_one_in_full() -> None:
    driver = fan_out("escavador_youtube", "escavador_blog", "executador_relatorio", timeout=30).sent()
    driver.ok("escavador_youtube", b'{"status": "ok", "dados": []}')
    driver.ok("executador_relatorio", b'{"resultado": "ok", "arquivo": "relatorio.pdf"}')
    driver.at(30.012).run_due()
    assert json.loads(encode_aggregate(driver.run)) == {
        "correlation_id": RUN_ID,
        "status": "parcial",
        "versao": 1,
        "resumo": {"total": 3, "concluidas": 2, "erros": 0, "timeouts": 1, "ignoradas": 0, "canceladas": 0},
        "resultados": {
            "escavador_youtube": {"status": "ok", "dados": []},
            "executador_relatorio": {"resultado": "ok", "arquivo": "relatorio.pdf"},
        },
        "falhas": {"escavador_blog": {"status": "timeout", "motivo": "no answer in 30 s", "tentativas": 1}},
        "iniciada_em": "2025-10-14T12:00:00.000Z",
        "concluida_em": "2025-10-14T12:00:30.012Z",
        "duracao_ms": 30012,
    }


def test_a_payload_is_handed_on_exactly_as_it_came() -> None:
    driver = fan_out("a").sent()
    driver.ok("a", b'{ "n":1.10, "big": 1e999 }')
    assert b'{ "n":1.10, "big": 1e999 }' in encode_aggregate(driver.run)


def test_every_kind_of_end_is_counted_and_every_failure_reported() -> None:
    driver = flow("a", "b", "c<b", "d", {"type": "e", "timeout": 5}).sent()
    driver.ok("a")
    driver.fail_for_good("b", "boom")
    driver.at(5).due("e")
    driver.apply(Cancelled("enough"))
    found = aggregate(driver.run)
    assert summary(driver.head) == found["resumo"]
    assert list(found["resumo"].values()) == [5, 1, 1, 1, 1, 1]
    assert found["falhas"] == {
        "b": {"status": "erro", "motivo": "boom", "tentativas": 1},
        "c": {"status": "ignorada", "motivo": "'b' ended as erro", "tentativas": 0},
        "d": {"status": "cancelada", "motivo": "enough", "tentativas": 1},
        "e": {"status": "timeout", "motivo": "no answer in 5 s", "tentativas": 1},
    }
    assert set(found["resultados"]) == {"a"}


def test_it_is_a_function_of_the_tasks_alone() -> None:
    first, second = (fan_out("a", "b").sent() for _ in range(2))
    first.ok("a")
    first.fail_for_good("b")
    second.fail_for_good("b")
    second.ok("a")
    second.ok("a")
    assert encode_aggregate(first.run) == encode_aggregate(second.run)


def test_a_clock_that_was_set_back_makes_no_run_shorter_than_nothing() -> None:
    driver = fan_out("a").sent().at(-20)
    driver.ok("a")
    assert aggregate(driver.run)["duracao_ms"] == 0
