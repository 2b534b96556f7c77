"""Reading a worker's answer: did it fail, and which task is it about."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oraculo.core.answers import has_failed, is_failure, read_answer
from oraculo.core.events import Answered, Event, Progressed
from oraculo.core.machine import Verdict
from oraculo.wire import naming
from oraculo.wire.answers import NOT_IN_TIME
from oraculo.wire.message import Message, decode_message

from .building import Driver, fan_out, flow, message


def read(driver: Driver, payload: dict[str, Any], kind: str = "resultado_coleta", **fields: Any) -> Event | str:
    return read_answer(driver.run, message(payload, kind, **fields), jitter=0.25)


def task_of(driver: Driver, payload: dict[str, Any], kind: str = "resultado_coleta", **fields: Any) -> str:
    event = read(driver, payload, kind, **fields)
    assert isinstance(event, Answered | Progressed), event
    return driver.run.plan.steps[event.task].id


def three() -> Driver:
    return fan_out("escavador_youtube", "escavador_blog", "executador_relatorio").sent()


# -- did it fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        {"resultado": "ok", "arquivo": "relatorio.pdf"},
        {"status": "ok", "dados": []},
        {"status": "OK", "erros": []},
        {"status": "ok", "erros": ["a warning"]},
        {"status": "partial", "erros": ["a"]},
        {},
        {"erros": []},
        {"erros": None},
        {"erros": "texto"},
        {"erros": {"a": 1}},
        {"status": None},
        {"status": 500, "erros": ["a"]},
        {"status": True},
        {"status": {"erro": 1}, "erros": ["a"]},
        {"status": ""},
        {"status": "erro de digitação"},
    ],
)
def test_a_success(payload: dict[str, Any]) -> None:
    event = read(fan_out("escavador_a").sent(), payload)
    assert isinstance(event, Answered)
    assert not event.failed
    assert event.payload == json.dumps(payload).encode(), "it is kept to the byte"


@pytest.mark.parametrize("word", ["erro", "error", "falha", "failed", "failure", "ERRO", "Error", "fAlHa", "FAILED"])
def test_a_failure_by_its_status(word: str) -> None:
    assert has_failed(word, None)
    event = read(fan_out("escavador_a").sent(), {"status": word, "erros": []})
    assert isinstance(event, Answered)
    assert event.failed


@pytest.mark.parametrize("payload", [{"erros": ["x"]}, {"status": None, "erros": ["x"]}, {"erros": [None]}])
def test_a_failure_by_its_errors_alone(payload: dict[str, Any]) -> None:
    event = read(fan_out("escavador_a").sent(), payload)
    assert isinstance(event, Answered)
    assert event.failed


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"erros": ["a", "b"]}, "a; b"),
        ({"erros": [{"codigo": 1}, 2]}, '{"codigo":1}; 2'),
        ({"erros": "texto"}, "texto"),
        ({"erros": [], "mensagem": "why"}, "why"),
        ({}, "the worker answered with status erro"),
        ({"erros": "", "mensagem": 7}, "the worker answered with status erro"),
        ({"erros": [str(n) for n in range(9)]}, "0; 1; 2; 3; 4"),
        ({"erros": ["x" * 500]}, "x" * 500),
        ({"erros": ["x" * 501]}, "x" * 499 + "…"),
        ({"erros": [10**400]}, ("1" + "0" * 400)),
    ],
)
def test_the_reason_of_a_failure(payload: dict[str, Any], reason: str) -> None:
    event = read(fan_out("escavador_a").sent(), {"status": "erro"} | payload)
    assert isinstance(event, Answered)
    assert event.reason == reason


def test_a_failure_is_of_its_task_and_keeps_its_payload() -> None:
    event = read(three(), {"status": "erro"}, tarefa="escavador_blog")
    assert isinstance(event, Answered)
    assert (event.task, event.payload, event.redelivered) == (1, b'{"status": "erro"}', False)


@pytest.mark.parametrize("redelivered", [True, False])
def test_whether_the_broker_delivers_a_failure_again_is_handed_on(redelivered: bool) -> None:
    driver = fan_out("escavador_a").sent()
    event = read_answer(driver.run, message({"status": "erro"}), 0.5, redelivered=redelivered)
    assert isinstance(event, Answered)
    assert event.redelivered is redelivered


@pytest.mark.parametrize(("value", "retryable"), [(False, False), (True, True), (None, True), ("no", True)])
def test_a_worker_may_ask_not_to_be_tried_again(value: object, retryable: bool) -> None:
    event = read(fan_out("escavador_a").sent(), {"status": "erro", "repetir": value})
    assert isinstance(event, Answered)
    assert event.retryable is retryable
    assert event.jitter == 0.25


@pytest.mark.parametrize(("left", "is_believed"), [(300, False), (2, False), (0.5, True), (-1, True)])
def test_that_the_deadline_passed_is_not_believed_of_a_worker_for_which_it_is_still_to_come(
    left: float, is_believed: bool
) -> None:
    driver = fan_out("escavador_a").sent()
    refusal = message({"status": "erro", "erros": [NOT_IN_TIME], "repetir": False})
    event = read_answer(driver.run, refusal, 0.5, now=driver.run.head.deadline - left)
    assert isinstance(event, Answered)
    assert event.retryable is not is_believed, "a worker whose clock is right may take it"
    said = NOT_IN_TIME if is_believed else f"{NOT_IN_TIME} by the clock of its worker, {left} s too early"
    assert event.reason.startswith(said)
    assert ("NTP" in event.reason) is not is_believed


def test_the_same_failure_has_the_same_mark_and_another_has_another() -> None:
    driver = fan_out("escavador_a").sent()

    def mark(text: str, **fields: Any) -> int:
        event = read(driver, {"status": "erro", "mensagem": text}, **fields)
        assert isinstance(event, Answered)
        return event.mark

    assert mark("a") == mark("a") != 0
    assert mark("a") != mark("b")
    assert mark("a") != mark("a", timestamp="2025-10-14T12:05:01Z")


# -- whose is it ------------------------------------------------------------------------------------------------


def test_tarefa_goes_first() -> None:
    payload = {"tarefa": "escavador_blog", "destino": "escavador_blog", "fonte": "blog"}
    assert task_of(three(), payload, tarefa="escavador_youtube") == "escavador_youtube"


@pytest.mark.parametrize(
    "payload",
    [
        {"tarefa": "escavador_youtube", "destino": "escavador_blog", "fonte": "blog"},
        {"destino": "escavador_youtube", "fonte": "blog"},
        {"destino": "youtube"},
        {"fonte": "youtube"},
        {"fonte": "escavador_youtube"},
        {"tarefa": "nobody", "destino": 7, "fonte": "youtube"},
    ],
)
def test_then_a_name_in_the_payload_in_this_order(payload: dict[str, Any]) -> None:
    assert task_of(three(), payload) == "escavador_youtube"


def test_a_tarefa_that_is_not_known_leaves_it_to_the_payload() -> None:
    assert task_of(three(), {"fonte": "blog"}, tarefa="nobody") == "escavador_blog"


def test_then_the_only_open_one_that_awaits_such_an_answer() -> None:
    driver = three()
    assert task_of(driver, {"resultado": "ok"}, "resultado_execucao") == "executador_relatorio"
    driver.ok("escavador_blog")
    assert task_of(driver, {"dados": []}) == "escavador_youtube"


def test_a_tarefa_that_is_not_known_leaves_it_to_the_only_open_one() -> None:
    for said in ("nobody", ""):
        assert task_of(fan_out("escavador_a").sent(), {}, tarefa=said) == "escavador_a"


def test_a_nameless_answer_that_is_delivered_again_is_not_that_of_the_next_step() -> None:
    driver = flow({"type": "a"}, {"type": "b", "dependsOn": ["a"]}).sent()
    first, second = (
        message({"status": "ok"}, "resultado_execucao", timestamp=f"2025-10-14T12:00:0{n}Z") for n in (1, 2)
    )

    def verdict(answer: Message, redelivered: bool = True) -> Verdict:
        event = read_answer(driver.run, answer, 0.5, redelivered=redelivered)
        assert isinstance(event, Event)
        return driver.apply(event)

    assert verdict(first, redelivered=False) is Verdict.APPLIED
    driver.sent()
    assert verdict(first) is Verdict.DUPLICATE
    assert driver.task("b").status == "em_execucao"
    assert verdict(second) is Verdict.APPLIED
    assert driver.status == "concluida"
    assert verdict(first) is verdict(second) is Verdict.DUPLICATE


def test_an_answer_that_names_but_its_queue_and_is_delivered_again_is_not_that_of_the_next_step_there() -> None:
    first, second = ({"type": "t", "id": name, "queue": "escavador_a"} for name in ("a1", "a2"))
    driver = flow(first, second | {"dependsOn": ["a1"]}, {"type": "t", "id": "a3", "queue": "escavador_a"}).sent()
    driver.ok("a3")
    answer = message({"status": "ok", "destino": "escavador_a"})

    def task_named() -> str:
        event = read_answer(driver.run, answer, 0.5, redelivered=True)
        assert isinstance(event, Answered), event
        driver.apply(event)
        return driver.run.plan.steps[event.task].id

    assert task_named() == "a1"
    driver.sent()
    assert task_named() == "a1"
    assert (driver.statuses["a2"], driver.head.duplicates) == ("em_execucao", 1)
    driver.ok("a2")
    assert task_named() == "a1", "nor is it nobody's when none is open"


def test_a_nameless_failure_that_is_delivered_again_is_known_while_its_task_is_tried_again() -> None:
    driver = flow("a", "escavador_x", "b<escavador_x").sent()
    assert driver.answer({"status": "erro"}, "resultado_execucao") is Verdict.APPLIED
    driver.ok("escavador_x")
    event = read_answer(driver.run, message({"status": "erro"}, "resultado_execucao"), 0.5, redelivered=True)
    assert isinstance(event, Answered), "two are awaited now, but one of them had it"
    assert (event.task, driver.apply(event)) == (0, Verdict.DUPLICATE)


def test_an_answer_that_is_delivered_again_is_not_that_of_the_other_kind_with_the_same_bytes() -> None:
    driver = fan_out("escavador_a", "executador_b").sent()
    driver.answer({"status": "ok"})
    event = read_answer(driver.run, message({"status": "ok"}, "resultado_execucao"), 0.5, redelivered=True)
    assert isinstance(event, Answered)
    assert event.task == 1


def test_the_seeds_bare_worker_is_a_full_citizen() -> None:
    driver = fan_out("escavador_youtube", "executador_relatorio").sent()
    assert driver.answer({"dados": [1]}) is Verdict.APPLIED
    assert driver.answer({"resultado": "ok", "arquivo": "relatorio.pdf"}, "resultado_execucao") is Verdict.APPLIED
    assert driver.status == "concluida"


def test_a_step_is_named_by_its_queue_too() -> None:
    driver = flow("VIRAL_COPY", "ENHANCED_IMAGES").sent()
    assert task_of(driver, {"destino": "images-queue"}, "resultado_execucao") == "ENHANCED_IMAGES"


@pytest.mark.parametrize("queue", ["escavador_yt", "escavador-yt", "escavador.yt", "escavadoryt"])
def test_a_collector_is_known_by_the_source_that_its_command_gave_it(queue: str) -> None:
    driver = flow(queue, f"escavador-dois<{queue}").sent()
    driver.ok(queue)
    assert task_of(driver, {"fonte": naming.source_of(queue)}) == queue, "a repeat is not the next one's answer"


@pytest.mark.parametrize("queue", ["executador_pdf", "executador-pdf", "executador.pdf"])
def test_a_processor_is_known_by_its_name_without_its_role(queue: str) -> None:
    driver = fan_out(queue, "executador_outro").sent()
    assert task_of(driver, {"destino": "pdf"}, "resultado_execucao") == queue


@pytest.mark.parametrize("queues", [("escavador_yt", "escavador-yt"), ("escavador-yt", "escavador_yt")])
def test_of_two_spellings_the_one_that_the_contract_writes_is_meant(queues: tuple[str, str]) -> None:
    assert task_of(fan_out(*queues).sent(), {"fonte": "yt"}) == "escavador_yt"


def test_a_source_that_is_echoed_is_no_processor_of_the_same_name() -> None:
    driver = fan_out("escavador_yt", "executador_yt", "executador_relatorio").sent()
    assert isinstance(read(driver, {"fonte": "yt"}, "resultado_execucao"), str)
    driver.ok("executador_yt")
    assert task_of(driver, {"fonte": "yt"}, "resultado_execucao") == "executador_relatorio"


def test_an_id_of_the_other_kind_hides_no_queue() -> None:
    driver = fan_out({"fila": "executador_x", "id": "yt"}, "escavador_yt", "escavador_blog").sent()
    assert task_of(driver, {"fonte": "yt"}) == "escavador_yt"


def test_a_worker_may_name_its_queue_with_the_prefix_of_the_installation() -> None:
    driver = fan_out("escavador_a", "escavador_b").sent()
    for payload in ({"destino": "loja.escavador_a"}, {"destino": "escavador_a"}, {"fonte": "a"}):
        event = read_answer(driver.run, message(payload, "resultado_coleta"), 0.0, prefix="loja.")
        assert isinstance(event, Answered), event
        assert event.task == 0


def test_the_prefix_does_not_change_which_name_counts_first() -> None:
    driver = fan_out("escavador_a", "escavador_b").sent()
    payload = {"destino": "loja.escavador_a", "fonte": "b"}
    event = read_answer(driver.run, message(payload, "resultado_coleta"), 0.0, prefix="loja.")
    assert isinstance(event, Answered)
    assert event.task == 0


def test_a_name_in_the_payload_that_nothing_has_is_reported() -> None:
    assert "'tiktok' in its payload is not one of its destinations; open were" in str(
        read(three(), {"fonte": "tiktok"})
    )


def test_ambiguity_is_reported_with_what_was_open() -> None:
    assert read(three(), {"dados": []}) == (
        "no task of run abc123 fits this resultado_coleta: it does not name one; "
        "open were: escavador_youtube, escavador_blog, executador_relatorio"
    )


def test_a_wrong_tarefa_is_reported() -> None:
    assert "'nobody' is not one of its tasks; open were: escavador_youtube," in str(read(three(), {}, tarefa="nobody"))


def test_nothing_open_is_reported() -> None:
    driver = fan_out("escavador_a", "escavador_b").sent()
    driver.ok("escavador_a")
    driver.ok("escavador_b")
    assert str(read(driver, {})).endswith("; none was open")


def test_a_nameless_answer_after_the_end_is_of_the_only_task_of_its_kind() -> None:
    driver = fan_out("escavador_a", "executador_b").sent()
    driver.ok("escavador_a")
    assert task_of(driver, {}) == "escavador_a"


def test_a_source_that_a_processor_only_echoes_does_not_make_its_answer_the_collectors() -> None:
    driver = fan_out("escavador_youtube", "executador_relatorio").sent()
    assert task_of(driver, {"fonte": "youtube"}, "resultado_execucao") == "executador_relatorio"


def test_very_many_open_ones_are_reported_in_part() -> None:
    names = [f"escavador_{n}" for n in range(20)] + [f"executador_{n}" for n in range(5)]
    said = str(read(fan_out(*names).sent(), {}))
    assert said.endswith(f"; open were: {', '.join(names[:10])} and 15 more")


def test_what_has_not_been_sent_awaits_nothing() -> None:
    driver = flow("escavador_a", "escavador_b<escavador_a").sent()
    assert task_of(driver, {}) == "escavador_a"
    driver.ok("escavador_a")
    assert task_of(driver, {}) == "escavador_b"


def two_on_one_queue() -> Driver:
    return fan_out(
        {"fila": "escavador_a", "id": "a1"}, {"fila": "escavador_a", "id": "a2"}, {"fila": "escavador_b", "id": "b"}
    ).sent()


def test_a_queue_of_many_is_settled_when_only_one_of_it_is_open() -> None:
    driver = two_on_one_queue()
    assert isinstance(read(driver, {"fonte": "a"}), str)
    driver.ok("a1")
    assert task_of(driver, {"fonte": "a"}) == "a2"
    assert task_of(driver, {"fonte": "a", "tarefa": "a1"}) == "a1"


def test_a_queue_of_many_none_of_which_was_sent_yet_settles_nothing() -> None:
    later = [{"type": "t", "id": f"a{n}", "queue": "escavador_a", "dependsOn": ["escavador_x"]} for n in (1, 2)]
    said = read(flow("escavador_x", *later).sent(), {"destino": "escavador_a"})
    assert str(said).endswith("it does not name one; open were: escavador_x")


def test_an_answer_that_names_one_destination_is_never_given_to_another() -> None:
    driver = two_on_one_queue()
    driver.ok("a1")
    driver.ok("a2")
    said = read(driver, {"destino": "escavador_a"})
    assert str(said).endswith("; open were: b"), "b is the only open one, but it was not meant"
    late = fan_out("escavador_a", "escavador_b").sent()
    late.ok("escavador_a")
    assert task_of(late, {"destino": "escavador_a"}) == "escavador_a"


def test_a_name_that_settles_it_may_stand_behind_one_that_does_not() -> None:
    assert task_of(two_on_one_queue(), {"destino": "escavador_a", "fonte": "a2"}) == "a2"


# -- the attempt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "read_as"), [(None, None), (1, 1), (2, None), (2**64, None)])
def test_an_attempt_that_was_never_made_shows_nothing(said: int | None, read_as: int | None) -> None:
    fields: dict[str, Any] = {} if said is None else {"tentativa": said}
    for payload in ({}, {"status": "erro"}):
        event = read(fan_out("escavador_a").sent(), payload, **fields)
        assert isinstance(event, Answered)
        assert event.attempt == read_as


# -- progress ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "percent", "note"),
    [
        ({"percentual": 40, "mensagem": "lendo"}, 40.0, "lendo"),
        ({"percentual": 140}, 100.0, None),
        ({"percentual": -1.5}, 0.0, None),
        ({"percentual": 10**400}, 100.0, None),
        ({"percentual": "40"}, None, None),
        ({"percentual": True, "mensagem": 3}, None, None),
        ({"mensagem": "x" * 1000}, None, "x" * 500),
        ({}, None, None),
    ],
)
def test_progress(payload: dict[str, Any], percent: float | None, note: str | None) -> None:
    event = read(fan_out("escavador_a").sent(), payload, "progresso")
    assert event == Progressed(0, percent, note)


def test_progress_shows_the_attempt_that_it_is_of() -> None:
    driver = fan_out("escavador_a").sent()
    assert read(driver, {"percentual": 1}, "progresso", tentativa=1) == Progressed(0, 1.0, None, 1)
    assert read(driver, {"percentual": 1}, "progresso", tentativa=2) == Progressed(0, 1.0, None), "it was never made"


def test_progress_finds_its_task_as_an_answer_does_but_for_any_kind() -> None:
    driver = three()
    assert isinstance(read(driver, {"percentual": 1}, "progresso"), str)
    assert task_of(driver, {"fonte": "blog"}, "progresso") == "escavador_blog"
    driver.ok("escavador_blog")
    assert isinstance(read(driver, {"percentual": 1}, "progresso"), str), "one of each kind is open"
    driver.ok("escavador_youtube")
    assert task_of(driver, {"percentual": 1}, "progresso") == "executador_relatorio"


def test_a_heartbeat_that_comes_late_is_that_of_the_only_task() -> None:
    driver = fan_out("escavador_a").sent()
    driver.ok("escavador_a")
    assert driver.answer({"percentual": 50}, "progresso") is Verdict.LATE


# -- anything ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "failed", "reason"),
    [
        (b'{"status": 1e999}', False, ""),
        (b'{"status": "ok", "mensagem": [{"n": 1e999}]}', False, ""),
        (b'{"status": "erro", "erros": 1e999, "fonte": "a"}', True, "1e999"),
        (b'{"status": "erro", "erros": ["cheio"], "mensagem": 1e999}', True, "cheio"),
        (b'{"erros": ["cheio", 1e999, {"n": [-1e999]}]}', True, '["cheio", 1e999, {"n": [-1e999]}]'),
        (b'{"erros": [ ], "mensagem": 1e999}', False, ""),
        (b'{"erros": 1e999}', False, ""),
        (b'{"erros": {"n": 1e999}}', False, ""),
    ],
)
def test_a_number_that_no_double_holds_costs_nothing_else(payload: bytes, failed: bool, reason: str) -> None:
    body = (
        b'{"correlation_id": "abc123", "tipo_evento": "resultado_coleta", "payload": %s,'
        b' "timestamp": "2025-10-14T12:05:00Z"}' % payload
    )
    event = read_answer(fan_out("escavador_a").sent().run, decode_message(body), 0.0)
    assert isinstance(event, Answered)
    assert (event.task, event.failed, event.reason, event.payload) == (0, failed, reason, payload)
    assert is_failure(payload) is failed


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**320)
    | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=6,
)
fields = st.sampled_from(["status", "erros", "repetir", "tarefa", "destino", "fonte", "percentual", "mensagem", "x"])


@given(
    st.dictionaries(fields, values, max_size=6),
    st.sampled_from(["resultado_coleta", "resultado_execucao", "progresso"]),
    st.none() | st.sampled_from(["escavador_youtube", "x"]),
)
def test_any_payload_is_an_event_or_a_reason(payload: dict[str, Any], kind: str, task: str | None) -> None:
    body = {"correlation_id": "abc123", "tipo_evento": kind, "timestamp": "2025-10-14T12:05:00Z", "tarefa": task}
    text = json.dumps(body | {"payload": payload}).replace("Infinity", "1e999").replace("\\u0000", "")
    driver = three()
    event = read_answer(driver.run, decode_message(text.encode()), 0.5)
    if isinstance(event, Event):
        driver.apply(event)
    else:
        assert event
