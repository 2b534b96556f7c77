"""A run's history records each thing that happened, with its task, attempt and reason."""

from oraculo.core.events import Cancelled, DeadLetterDiscarded, Delivered, DeliveryFailed, Progressed, Repeated

from .building import START, Driver, fan_out, flow

Line = tuple[str, str | None, int | None, str | None]


def lines(driver: Driver) -> list[Line]:
    """The history as (what, task, attempt, detail). That each entry has the moment of its event, the driver checks."""
    names = [step.id for step in driver.run.plan.steps]
    return [
        (str(one.what), None if one.task is None else names[one.task], one.attempt, one.detail)
        for one in driver.history
    ]


def test_a_run_that_fails() -> None:
    driver = flow({"type": "a", "retry": {"maxAttempts": 2, "backoff": 8}}, "b<a").sent()
    driver.apply(Progressed(0, 12.5, "lendo"))
    driver.at(1).fail("a", "boom", attempt=1, jitter=0.5)
    driver.at(2).fail("a", "boom", attempt=1)
    driver.at(5).due("a")
    driver.sent().at(6).fail("a", "crash")
    driver.at(7).apply(DeadLetterDiscarded(0))
    assert lines(driver) == [
        ("orquestracao_iniciada", None, None, "p"),
        ("tarefa_enviada", "a", 1, None),
        ("progresso", "a", 1, "12.5 % lendo"),
        ("tentativa_falhou", "a", 1, "boom; next attempt in 4 s"),
        ("resposta_repetida", "a", 1, None),
        ("tarefa_enviada", "a", 2, None),
        ("tarefa_erro", "a", 2, "crash"),
        ("tarefa_ignorada", "b", None, "'a' ended as erro"),
        ("orquestracao_encerrada", None, None, "erro, versao 1"),
        ("carta_morta_descartada", "a", 2, None),
    ]


def test_a_run_whose_deadline_comes_and_whose_answers_are_late_or_repeated() -> None:
    driver = fan_out("a", "b", timeout=30).sent().at(10)
    driver.ok("a", attempt=1)
    driver.ok("a", attempt=1)
    driver.at(30).run_due()
    driver.at(31).ok("b", attempt=1)
    assert lines(driver)[3:] == [
        ("tarefa_concluida", "a", 1, None),
        ("resposta_repetida", "a", 1, None),
        ("tarefa_timeout", "b", 1, "no answer in 30 s"),
        ("orquestracao_encerrada", None, None, "parcial, versao 1"),
        ("resposta_tardia", "b", 1, None),
    ]


def test_a_run_that_is_cancelled() -> None:
    driver = flow("a", "b<a").sent().at(3)
    driver.apply(Cancelled("enough"))
    assert lines(driver)[2:] == [
        ("tarefa_cancelada", "a", 1, "enough"),
        ("tarefa_cancelada", "b", None, "enough"),
        ("orquestracao_encerrada", None, None, "cancelada, versao 1"),
    ]


def test_a_run_that_is_repeated() -> None:
    driver = fan_out("a").sent().at(3)
    driver.fail_for_good("a")
    driver.at(4).apply(Repeated())
    driver.sent()
    assert lines(driver)[-3:] == [
        ("orquestracao_reaberta", None, None, "repeated"),
        ("tarefa_reaberta", "a", 1, "repeated"),
        ("tarefa_enviada", "a", 2, None),
    ]


def test_a_late_success_that_amends_a_run() -> None:
    driver = flow("a", onLate="amend", timeout=30).sent().at(30)
    driver.run_due()
    driver.at(40).ok("a", attempt=1)
    assert lines(driver)[-2:] == [
        ("resposta_tardia_aceita", "a", 1, None),
        ("orquestracao_encerrada", None, None, "concluida, versao 2"),
    ]


def test_the_deliveries_of_an_ended_run() -> None:
    driver = fan_out("a", webhook="http://h", responder_em="q").sent()
    driver.ok("a")
    driver.at(1).apply(DeliveryFailed(0, 1, "answered 500", START + 5))
    driver.at(5).apply(DeliveryFailed(0, 1, "gone", None))
    driver.at(6).apply(Delivered(1, 1))
    assert lines(driver)[-3:] == [
        ("entrega_falhou", None, 1, "webhook http://h: answered 500"),
        ("entrega_abandonada", None, 2, "webhook http://h: gone"),
        ("entrega_concluida", None, None, "fila q, versao 1"),
    ]
