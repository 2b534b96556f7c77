"""The body of `POST /orquestracoes`: what is read from it, and how each fault is named."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oraculo.core.plan import Plan
from oraculo.core.request import FIELDS, Limits, RunRequest, definition_of, new_run, read_request
from oraculo.core.run import Channel, RunStatus, TaskStatus
from oraculo.errors import InvalidInput, InvalidJson, InvalidRequest, PayloadTooLarge
from oraculo.pipeline.definition import Definition, Kind, OnLate, content_hash, decode_definition, encode_definition
from oraculo.pipeline.retry import RetryPolicy

from .building import RUN_ID, START, Catalogue, pipeline, run_of

ROUTES = {"coleta_completa": ["escavador_youtube", "escavador_blog"]}


def read(limits: Limits | None = None, **request: Any) -> RunRequest:
    return read_request(json.dumps(request).encode(), limits or Limits())


def faults(**request: Any) -> list[str]:
    with pytest.raises(InvalidRequest) as raised:
        run_of(request, pipeline("a", "b<a", name="dois-passos"), **ROUTES)
    return [str(fault) for fault in raised.value.faults]


def only_fault(**request: Any) -> str:
    (fault,) = faults(**request)
    return fault


# -- the three ways to ask --------------------------------------------------------------------------------------


def test_a_list_of_destinations() -> None:
    run = run_of({"destinos": ["escavador_youtube", "executador_relatorio"], "payload": {"fonte": "x"}, "timeout": 30})
    assert [(step.id, step.queue, step.depends_on) for step in run.plan.steps] == [
        ("escavador_youtube", "escavador_youtube", ()),
        ("executador_relatorio", "executador_relatorio", ()),
    ]
    assert run.plan.kind is Kind.FAN_OUT
    assert (run.head.name, run.head.timeout, run.head.deadline) == ("", 30, START + 30)
    assert json.loads(run.payload) == {"fonte": "x"}


def test_destinations_with_their_own_id_payload_and_timeout() -> None:
    run = run_of({"destinos": [{"fila": "q", "id": "1", "payload": {"a": 1}, "timeout": 2}, {"fila": "q", "id": "2"}]})
    first, second = run.plan.steps
    assert (first.id, first.queue, json.loads(bytes(first.payload)), first.timeout) == ("1", "q", {"a": 1}, 2.0)
    assert (second.id, second.queue, bytes(second.payload), second.timeout) == ("2", "q", b"", None)


def test_the_id_is_the_queues_name_unless_given() -> None:
    run = run_of({"destinos": [{"fila": "q"}, {"id": "r"}]})
    assert [(step.id, step.queue) for step in run.plan.steps] == [("q", "q"), ("r", "r")]


def test_a_route() -> None:
    run = run_of({"tipo": "coleta_completa", "payload": {}}, **ROUTES)
    assert [step.id for step in run.plan.steps] == ["escavador_youtube", "escavador_blog"]
    assert (run.head.name, run.plan.kind) == ("coleta_completa", Kind.FAN_OUT)


def test_a_pipeline_pinned_to_its_content() -> None:
    definition = pipeline("a", "b<a", name="dois", timeout=7, onLate="amend")
    run = run_of({"pipeline": "dois"}, definition)
    assert (run.head.name, run.head.timeout, run.plan.kind, run.plan.on_late) == (
        "dois",
        7,
        Kind.PIPELINE,
        OnLate.AMEND,
    )
    assert run.head.definition_hash == content_hash(encode_definition(definition))
    assert run.definition == encode_definition(definition)


def test_a_request_may_set_a_pipelines_timeout_and_quorum_for_its_run() -> None:
    definition = pipeline("a", "b", timeout=7)
    run = run_of({"pipeline": "p", "timeout": 9, "quorum": 1}, definition)
    assert (run.head.timeout, run.plan.needed) == (9, 1)
    assert (definition.timeout, definition.quorum) == (7, None)
    assert run.definition == encode_definition(run.plan.definition), "its bytes must give its own hash again"


def test_the_plan_of_a_run_is_looked_up_by_the_hash_of_what_is_stored_with_it() -> None:
    asked: list[tuple[str, bytes, Definition | None]] = []

    class Plans:
        def plan(self, definition_hash: str, encoded: bytes, definition: Definition | None = None) -> Plan:
            asked.append((definition_hash, encoded, definition))
            return Plan(decode_definition(encoded))

    definition = pipeline("a", "b<a")
    run = new_run(read(pipeline="p"), definition, run_id="x", now=START, plans=Plans(), traceparent="00-x")
    assert asked == [(run.head.definition_hash, run.definition, definition)]
    assert run.head.traceparent == "00-x"


# -- what holds unless set, and what may be set -----------------------------------------------------------------


def test_a_new_run_before_its_first_event() -> None:
    run = run_of({"destinos": ["a", "b"]})
    head = run.head
    assert (head.id, head.status, head.version, head.edition, head.total) == (RUN_ID, RunStatus.RUNNING, 0, 0, 2)
    assert (head.timeout, head.created_at, head.deadline, head.priority) == (300, START, START + 300, 0)
    assert (head.deliveries, head.traceparent, run.payload) == ([], None, b"{}")
    assert [(task.number, task.status, task.attempt) for task in run.tasks] == [
        (0, TaskStatus.PENDING, 0),
        (1, TaskStatus.PENDING, 0),
    ]


def test_the_default_retry_and_timeout_are_the_settings() -> None:
    definition = definition_of(
        read(destinos=["a", {"fila": "b"}]), Catalogue(), default_timeout=12.0, default_retry=RetryPolicy(9, 1.0, 2.0)
    )
    assert definition.timeout == 12.0
    assert [step.retry for step in definition.steps] == [RetryPolicy(9, 1.0, 2.0)] * 2


def test_every_option() -> None:
    run = run_of(
        {
            "destinos": ["a", "b"],
            "correlation_id": "meu id",
            "webhook": "https://example.com/x",
            "responder_em": "respostas",
            "prioridade": 9,
            "quorum": "50%",
        }
    )
    assert run.head.priority == 9
    assert run.plan.needed == 1
    assert [(one.channel, one.target) for one in run.head.deliveries] == [
        (Channel.WEBHOOK, "https://example.com/x"),
        (Channel.QUEUE, "respostas"),
    ]


@pytest.mark.parametrize("url", ["http://h:1/", "HTTPS://h", "http://straße.de./é", "http://h/" + "x" * 2039])
def test_a_webhook_may_be_any_url_of_http(url: str) -> None:
    assert run_of({"destinos": ["a"], "webhook": url}).head.deliveries[0].target == url


@pytest.mark.parametrize("priority", [0, 9])
def test_a_priority_is_from_0_to_9(priority: int) -> None:
    assert run_of({"destinos": ["a"], "prioridade": priority}).head.priority == priority


def test_a_webhook_or_a_queue_alone() -> None:
    assert [one.channel for one in run_of({"destinos": ["a"], "webhook": "http://h"}).head.deliveries] == ["webhook"]
    assert [one.channel for one in run_of({"destinos": ["a"], "responder_em": "q"}).head.deliveries] == ["fila"]


# -- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        ({}, "destinos: exactly one of destinos, tipo and pipeline is needed; got none of them"),
        ({"destinos": ["a"], "tipo": "t"}, "tipo: exactly one of destinos, tipo and pipeline is needed; got destinos"),
        (
            {"tipo": "t", "pipeline": "p"},
            "pipeline: exactly one of destinos, tipo and pipeline is needed; got tipo and",
        ),
    ],
)
def test_exactly_one_subject(subject: dict[str, Any], says: str) -> None:
    assert only_fault(**subject).startswith(says)


def test_an_empty_fan_out() -> None:
    assert only_fault(destinos=[]) == "destinos: is empty: name at least one destination"


def test_too_wide_a_fan_out() -> None:
    names = [f"q{n}" for n in range(100_001)]
    assert only_fault(destinos=names) == "destinos: has 100001 destinations; at most 100000 are allowed"
    assert len(read(destinos=names[:-1]).destinos or ()) == 100_000


@pytest.mark.parametrize(
    ("destination", "says"),
    [
        ("a b", "destinos[0]: must be 1 to 128 letters, digits, '_', '-' or '.'; got 'a b'"),
        ("resultados", "destinos[0]: 'resultados' is the orchestrator's own queue"),
        ("a.dlq", "destinos[0]: 'a.dlq' is a dead-letter queue"),
        ({}, 'destinos[0]: needs `fila`, the name of its queue, as {"fila": "escavador_youtube"}'),
        ({"fila": ""}, "destinos[0].fila: must be 1 to 128 letters, digits, '_', '-' or '.'; got ''"),
        ({"fila": "", "id": "x"}, "destinos[0].fila: must be 1 to 128 letters, digits, '_', '-' or '.'; got ''"),
        ({"id": "", "fila": "ok"}, "destinos[0].id: must have 1 to 128 characters; got 0"),
        ({"id": ""}, "destinos[0].id: must be 1 to 128 letters"),
        ({"fila": "a/b"}, "destinos[0].fila: must be 1 to 128 letters"),
        ({"fila": "a", "id": "x" * 129}, "destinos[0].id: must have 1 to 128 characters; got 129"),
        ({"fila": "a", "id": "x\n"}, "destinos[0].id: must not hold control characters"),
        ({"fila": "a", "id": "."}, "destinos[0].id: must not be '.' or '..', which mean folders in a URL"),
        ({"fila": "a", "timeout": 0}, "destinos[0].timeout: must be more than 0"),
        ({"fila": "a", "timeout": "x"}, "destinos[0].timeout: must be a number of seconds"),
        ({"fila": "a", "payload": []}, "destinos[0].payload: expected `object`"),
        ({"fila": "a", "filla": 1}, "destinos[0].filla: is not a known field; did you mean 'fila'?"),
        (7, "destinos[0]: expected `str | object`"),
        ({"fila": 7}, "destinos[0].fila: expected `str | null`"),
        ({"fila": "a", "timeout": [1]}, "destinos[0].timeout: expected `"),
    ],
)
def test_a_bad_destination_is_named(destination: Any, says: str) -> None:
    assert only_fault(destinos=[destination]).startswith(says)


def test_ids_are_unique() -> None:
    says = "destinos[2]: the id 'a' is destinos[0]'s already; give each its own `id`"
    assert only_fault(destinos=["a", "b", "a"]) == says
    assert only_fault(destinos=[{"fila": "q", "id": "a"}, "b", "a"]) == says


def test_several_faults_at_once_and_not_too_many() -> None:
    assert len(faults(destinos=["a b", {}], timeout=-1, prioridade=10, webhook="x", responder_em="a b")) == 6
    assert [fault.partition(":")[0] for fault in faults(destinos=[{}, "a b"])] == ["destinos[0]", "destinos[1]"]
    assert len(faults(destinos=[f"a {n}" for n in range(1000)])) == 20


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("timeout", 0, "must be more than 0 and at most 31536000 seconds; got 0"),
        ("timeout", "30", "must be a number of seconds; got '30'"),
        ("timeout", True, "must be a number of seconds; got True"),
        ("timeout", 1e12, "must be more than 0"),
        ("correlation_id", "", "must have 1 to 128 characters; got 0"),
        ("correlation_id", "x" * 129, "must have 1 to 128 characters; got 129"),
        ("correlation_id", "a\tb", "must not hold control characters"),
        ("correlation_id", 7, "expected `str | null`"),
        ("webhook", "ftp://x", "must be an http:// or https:// URL of at most 2048 characters"),
        ("webhook", "http://", "must be an http:// or https:// URL"),
        ("webhook", "http://h:99999/", "must be an http:// or https:// URL"),
        ("webhook", "http://h:0/", "must be an http:// or https:// URL"),
        ("webhook", "http://[::1", "must be an http:// or https:// URL"),
        ("webhook", "http://☃☃☃..x/", "must be an http:// or https:// URL"),
        ("webhook", "http://a..b/", "must be an http:// or https:// URL"),
        ("webhook", f"http://{'a' * 64}.com/", "must be an http:// or https:// URL"),
        ("webhook", "http://h/a b", "must be an http:// or https:// URL"),
        ("webhook", "http://h/" + "x" * 2040, "must be an http:// or https:// URL"),
        ("responder_em", "a b", "must be 1 to 128 letters"),
        (
            *("responder_em", "resultados"),
            "'resultados' is the orchestrator's own queue; name one on which you await the aggregate, as minhas_resp",
        ),
        ("responder_em", "ponte-celery", "'ponte-celery' is a bridge's own queue; name one on which you await"),
        ("responder_em", "a.dlq", "'a.dlq' is a dead-letter queue; name the queue itself"),
        ("prioridade", 10, "must be a whole number from 0 to 9; got 10"),
        ("prioridade", -1, "must be a whole number from 0 to 9; got -1"),
        ("prioridade", "1", "expected `int | null`"),
        ("prioridade", 0.5, "expected `int | null`"),
        ("prioridade", 10.0, "must be a whole number from 0 to 9; got 10"),
        ("prioridade", 10**400, "must be a whole number from 0 to 9; got a very long number"),
        ("timeout", 10**400, "must be more than 0 and at most 31536000 seconds; got a very long number"),
        ("timeout", [[]], "expected `"),
        ("tipo", 7, "expected `str | null`"),
        ("destinos", "a", "expected `array | null`"),
        ("quorum", [], "expected `int | str | null`"),
        ("quorum", True, "expected `int | str | null`"),
        ("quorum", 10**400, 'must be "all", a whole number from 1 to 1, or'),
        ("quorum", "0" * 5000 + "50%", 'must be "all", a whole number from 1 to 1, or'),
        ("quorum", 1.5, "expected `int | str | null`"),
        ("quorum", 2, 'must be "all", a whole number from 1 to 1, or a percentage such as "60%"; got 2'),
        ("quorum", "most", 'must be "all", a whole number'),
        ("payload", [], "expected `object`"),
        ("payload", None, "expected `object`"),
        ("timout", 3, "is not a known field; did you mean 'timeout'?"),
        ("pipelin", "p", "is not a known field; did you mean 'pipeline'?"),
    ],
)
def test_a_bad_field_is_named_with_what_would_be_right(field: str, value: Any, says: str) -> None:
    assert only_fault(**{"destinos": ["a"], field: value}).startswith(f"{field}: {says}")


def test_a_whole_number_may_be_written_with_a_point() -> None:
    """Some languages write every number so."""
    for priority, quorum in (("5.0", "1"), ("5", "1.0"), ("5.0", "1.0")):
        body = f'{{"destinos": ["a"], "prioridade": {priority}, "quorum": {quorum}}}'
        request = read_request(body.encode(), Limits())
        assert (repr(request.prioridade), repr(request.quorum)) == ("5", "1")
    request = read_request(b'{"destinos": ["a"], "prioridade": 5.0, "quorum": "60%"}', Limits())
    assert (repr(request.prioridade), request.quorum) == ("5", "60%")


@pytest.mark.parametrize("field", ["quorum", "timeout", "prioridade"])
@pytest.mark.parametrize("number", ["1" * 5000, "-" + "1" * 5000, "1e400"], ids=["long", "negative", "far"])
def test_a_number_that_cannot_be_read_is_refused(field: str, number: str) -> None:
    body = f'{{"destinos": ["a"], "{field}": {number}}}'.encode()
    with pytest.raises(InvalidRequest) as raised:
        read_request(body, Limits())
    (fault,) = raised.value.faults
    assert (fault.field, "out of range" in fault.problem) == (field, True)


@pytest.mark.parametrize("number", ["1" * 5000, "1e999"], ids=["long", "far"])
def test_a_payload_with_a_number_that_no_worker_can_read_is_refused(number: str) -> None:
    payload = f'{{"a": [{{"n": {number}}}]}}'
    says = "payload: holds a number that is too large to be read; put it in quotes, as a text"
    for body, where in (
        (f'{{"destinos": ["a"], "payload": {payload}}}', ""),
        (f'{{"destinos": ["a", {{"fila": "b", "payload": {payload}}}]}}', "destinos[1]."),
    ):
        with pytest.raises(InvalidRequest) as raised:
            read_request(body.encode(), Limits())
        assert str(raised.value) == where + says


def test_a_payload_with_a_text_that_looks_like_such_a_number_passes() -> None:
    payload = b'{"id": "7e1234567", "n": "1e999", "digits": "' + b"9" * 5000 + b'"}'
    assert bytes(read_request(b'{"destinos": ["a"], "payload": ' + payload + b"}", Limits()).payload) == payload


@pytest.mark.parametrize("field", ["quorum", "timeout", "prioridade"])
def test_a_structure_where_a_value_belongs_is_refused_at_once(field: str) -> None:
    body = b'{"destinos": ["a"], "%s": [' % field.encode() + b"[]," * 10_000_000 + b"[]]}"
    started = time.process_time()
    with pytest.raises(InvalidRequest, match=f"{field}: expected"):
        read_request(body, Limits())
    assert time.process_time() - started < 2.5, "some 0.4 s of CPU"


def test_an_unknown_pipeline_or_route_with_the_nearest() -> None:
    assert only_fault(pipeline="dois-paços") == (
        "pipeline: there is no pipeline 'dois-paços'; did you mean 'dois-passos'?"
    )
    assert only_fault(tipo="coleta") == "tipo: there is no route 'coleta'; did you mean 'coleta_completa'?"


def test_a_quorum_that_the_pipeline_cannot_give() -> None:
    assert only_fault(pipeline="dois-passos", quorum=3).startswith('quorum: must be "all", a whole number from 1 to 2')


# -- size -------------------------------------------------------------------------------------------------------


def test_what_is_too_large_is_refused_with_its_size() -> None:
    small = Limits(payload_bytes=20, request_bytes=200)
    fits, too_large = {"a": "x" * 11}, {"a": "x" * 12}
    read(small, destinos=["a", {"fila": "b", "payload": fits}], payload=fits)
    for request, field in (
        ({"destinos": ["a"], "payload": too_large}, "payload"),
        ({"destinos": ["a", {"fila": "b", "payload": too_large}]}, "destinos[1].payload"),
    ):
        with pytest.raises(PayloadTooLarge) as raised:
            read(small, **request)
        assert str(raised.value) == f"{field}: 21 bytes, over the limit of 20 bytes"


def test_a_request_that_is_too_large_is_refused_with_its_size() -> None:
    body, small = b'{"destinos": ["a"]}', Limits(request_bytes=200)
    read_request(body.ljust(200), small)
    with pytest.raises(PayloadTooLarge) as raised:
        read_request(body.ljust(201), small)
    assert str(raised.value) == "request: 201 bytes, over the limit of 200 bytes"


def test_the_limits_unless_set() -> None:
    assert (Limits().payload_bytes, Limits().request_bytes) == (1024 * 1024, 32 * 1024 * 1024)


# -- anything ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"destinos": ["\\u0000"]}', b"[" * 1000])
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(InvalidJson) as raised:
        read_request(body, Limits())
    assert [fault.field for fault in raised.value.faults] == [""]


def test_the_place_where_json_is_broken_is_named() -> None:
    with pytest.raises(InvalidJson, match=r"^not valid JSON: .*byte 13"):
        read_request(b'{"destinos": x}', Limits())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["fila", "id", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4) | st.binary(max_size=100))
def test_anything_gives_a_run_or_an_error_with_its_faults(request_: dict[str, Any] | bytes) -> None:
    body = request_ if isinstance(request_, bytes) else json.dumps(request_).encode()
    try:
        asked = read_request(body, Limits())
        definition = definition_of(asked, Catalogue(routes=ROUTES), default_timeout=300.0)
    except InvalidInput as error:
        faults = error.faults
    else:
        faults = ()
        assert definition.steps
    assert all(fault.problem for fault in faults)
