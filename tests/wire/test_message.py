"""Reading and writing the one message of the wire."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oraculo.errors import InvalidInput, InvalidJson, InvalidMessage
from oraculo.wire.message import (
    Message,
    correlation_id_at_start,
    correlation_id_of,
    decode_message,
    encode_message,
    fault_of,
    message_schema,
    task_named_in,
    valid_traceparent,
)

GOOD: dict[str, Any] = {
    "correlation_id": "abc123",
    "tipo_evento": "resultado_execucao",
    "payload": {"resultado": "ok", "arquivo": "relatorio.pdf"},
    "timestamp": "2025-10-14T12:05:00Z",
}


def decode(**changed: Any) -> Message:
    return decode_message(json.dumps(GOOD | changed).encode())


def fault(body: bytes | dict[str, Any], kind: type[InvalidInput] = InvalidMessage) -> str:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidInput) as raised:
        decode_message(text)
    assert type(raised.value) is kind
    assert kind is not InvalidJson or [one.field for one in raised.value.faults] == [""], "no field of it can be named"
    return str(raised.value)


def test_the_seeds_message_is_read() -> None:
    message = decode()
    assert (message.correlation_id, message.tipo_evento) == ("abc123", "resultado_execucao")
    assert json.loads(bytes(message.payload)) == GOOD["payload"]
    assert (message.tarefa, message.tentativa, message.responder_em, message.prazo, message.traceparent) == (None,) * 5


def test_every_optional_field_is_read() -> None:
    message = decode(tarefa="a", tentativa=2, responder_em="q", prazo="2025-10-14T12:06:00+03:00", traceparent="00-x")
    assert (message.tarefa, message.tentativa, message.responder_em) == ("a", 2, "q")
    assert (message.prazo, message.traceparent) == ("2025-10-14T12:06:00+03:00", "00-x")


def test_which_traces_are_valid() -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert valid_traceparent(good) == good
    no_trace, no_parent = f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"
    for bad in (None, "", good + "-x", good.upper(), "ff" + good[2:], no_trace, no_parent):
        assert valid_traceparent(bad) is None


def test_unknown_fields_are_ignored() -> None:
    assert decode(extra={"a": [1]}) == decode()


def test_the_payload_is_kept_to_the_byte() -> None:
    payload = b'{ "n": 1.10, "big": 123456789012345678901234567890,\n "far": 1e999 }'
    body = json.dumps(GOOD | {"payload": 0}).encode().replace(b'"payload": 0', b'"payload":  ' + payload)
    assert bytes(decode_message(body).payload) == payload


@pytest.mark.parametrize("field", GOOD)
def test_a_required_field_is_named_when_it_is_missing(field: str) -> None:
    assert fault({name: value for name, value in GOOD.items() if name != field}) == f"{field}: is required"


def test_an_attempt_may_be_written_as_some_languages_write_every_number() -> None:
    message = decode(tentativa=2.0)
    assert (message.tentativa, type(message.tentativa)) == (2, int)
    assert encode_message(message) == encode_message(decode(tentativa=2))


def test_a_field_that_only_bridges_read_may_hold_anything_for_others() -> None:
    assert decode(ponte="norte").ponte == "norte"


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("correlation_id", "", ">= 1"),
        ("correlation_id", "x" * 129, "<= 128"),
        ("correlation_id", 7, "`str`"),
        ("tipo_evento", "", ">= 1"),
        ("payload", [], "`object`"),
        ("payload", "{}", "encoded twice"),
        ("payload", None, "`null`"),
        ("payload", -1, "`number`"),
        ("timestamp", "yesterday", "ISO 8601"),
        ("timestamp", "2025-10-14T12:00:00", "offset"),
        ("prazo", "2025-10-14", "offset"),
        ("tarefa", 1, "`str | null`"),
        ("tentativa", 0, ">= 1"),
        ("tentativa", 1.5, "`int | null`"),
        ("tentativa", 0.0, "`int | null`"),
        ("tentativa", "1", "`int | null`"),
        ("responder_em", {}, "`str | null`"),
    ],
)
def test_a_broken_field_is_named_with_what_would_be_right(field: str, value: object, word: str) -> None:
    named, _, problem = fault(GOOD | {field: value}).partition(": ")
    assert (named, word in problem) == (field, True)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    body = json.dumps(GOOD | {"tentativa": 0}).encode().replace(b'"tentativa": 0', b'"tentativa": ' + b"1" * 5000)
    assert fault(body).startswith("tentativa: ")


@pytest.mark.parametrize("length", [1, 128])
def test_a_correlation_id_has_1_to_128_characters(length: int) -> None:
    assert decode(correlation_id="é" * length).correlation_id == "é" * length


@pytest.mark.parametrize("body", [b"", b"{", b"x", b'{"a": 1,}', b"\xff\xfe", b'{"a": "\\u0000"}', b"[" * 500])
def test_what_is_not_json_is_a_fault_of_its_own(body: bytes) -> None:
    fault(body, InvalidJson)


def test_an_empty_message_is_called_so_whatever_the_broker() -> None:
    assert fault(b"", InvalidJson) == "not valid JSON: it is empty"


@pytest.mark.parametrize(
    ("body", "word"),
    [(b"[]", "`array`"), (b"1", "`int`"), (b"null", "`null`"), (rb'"{\"correlation_id\": \"x\"}"', "encoded twice")],
)
def test_json_that_is_no_object_breaks_the_schema(body: bytes, word: str) -> None:
    assert word in fault(body)


def test_a_byte_order_mark_is_named() -> None:
    assert "byte order mark" in fault(b'\xef\xbb\xbf{"a": 1}', InvalidJson)


@pytest.mark.parametrize(
    ("body", "run_id"),
    [
        (b'{"correlation_id": "x", "tentativa": "1"}', "x"),
        (b'{"correlation_id": "x", "tarefa": 1e999}', "x"),
        (b'{"correlation_id": 5}', None),
        (b'{"correlation_id": ""}', None),
        (b"{}", None),
        (b"[" * 100_000, None),
        (b'{"correlation_id": "\xe7"}', None),
        (b'{"correlation_id": "a\\u0000b"}', None),
        (b'{"correlation_id": "x", "payload": "\\u0000 \xe7"}', "x"),
    ],
)
def test_the_run_of_a_bad_message_is_read_where_it_can_be(body: bytes, run_id: str | None) -> None:
    assert correlation_id_of(body) == run_id


@pytest.mark.parametrize(
    ("body", "task"),
    [
        (b'{"correlation_id": "x", "tarefa": "a"}', "a"),
        (b'{"correlation_id": "x", "tarefa": 1e999}', None),
        (b'{"correlation_id": "x", "tarefa": ["a"]}', None),
        (b'{"correlation_id": "x"}', None),
        (b'{"tarefa": "a"}', None),
        (b"a", None),
    ],
)
def test_the_task_of_a_bad_message_is_read_where_it_can_be(body: bytes, task: str | None) -> None:
    assert task_named_in(body) == task


def test_bad_json_inside_the_unparsed_payload_is_found() -> None:
    body = json.dumps(GOOD | {"payload": 0}).encode()
    for payload in (b'{"a": "\\q"}', b'{"a": 01}', b'{"a": nul}', b'{"a": "\\ud800"}', b'{"a": "x\ny"}', b'{"a" 1}'):
        says = fault(body.replace(b'"payload": 0', b'"payload": ' + payload), InvalidJson)
        assert says.startswith("not valid JSON: ")


def test_what_is_written_is_read_again() -> None:
    message = decode(tarefa="a", tentativa=1)
    assert decode_message(encode_message(message)) == message
    assert b"prazo" not in encode_message(message)


def test_a_fault_inside_a_list_has_its_path() -> None:
    class Item(msgspec.Struct, forbid_unknown_fields=True):
        a: int

    for body, says in (
        (b'[{"a": 1}, {}]', "[1].a: is required"),
        (b'[{"a": 1, "b": 2}]', "[0].b: is not a known field"),
    ):
        with pytest.raises(msgspec.ValidationError) as raised:
            msgspec.json.decode(body, type=list[Item])
        assert str(fault_of(raised.value)) == says


def test_an_error_that_says_nothing_is_a_fault_all_the_same() -> None:
    assert str(fault_of(msgspec.ValidationError(" - at `$.x`"))) == "x: is not valid"


def test_the_schema_names_every_field_and_lets_others_be() -> None:
    schema = message_schema()
    assert schema["required"] == ["correlation_id", "tipo_evento", "payload", "timestamp"]
    assert set(schema["properties"]) == set(Message.__struct_fields__)
    assert schema["additionalProperties"] is True


@given(st.binary(max_size=300))
def test_any_bytes_give_a_message_or_one_of_two_errors(body: bytes) -> None:
    with contextlib.suppress(InvalidJson, InvalidMessage):
        decode_message(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*Message.__struct_fields__, "outro"]), json_values, max_size=10))
def test_any_json_gives_a_message_or_one_of_two_errors(fields: dict[str, Any]) -> None:
    try:
        message = decode_message(json.dumps(GOOD | fields, allow_nan=True).replace("Infinity", "1e999").encode())
    except (InvalidJson, InvalidMessage):
        return
    assert isinstance(json.loads(bytes(message.payload)), dict)


@given(st.data())
def test_a_damaged_message_gives_a_message_or_one_of_two_errors(data: st.DataObject) -> None:
    body = bytearray(json.dumps(GOOD).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode_message(bytes(body))
    except (InvalidJson, InvalidMessage):
        return
    json.loads(bytes(message.payload))


@pytest.mark.parametrize(
    ("beginning", "run_id"),
    [
        (b'{"correlation_id":"r","payload":{"x', "r"),
        (b' { "correlation_id" : "a \\"quoted\\" one", "tarefa', 'a "quoted" one'),
        (b'{"correlation_id":"r', None),
        (b'{"tarefa":"t","correlation_id":"r",', None),
        (b'{"correlation_id":"\xe7","x', None),
        (b'{"correlation_id":"' + b"x" * 129 + b'",', None),
        (b'{"correlation_id":5,', None),
        (b"", None),
    ],
)
def test_the_run_of_a_message_that_is_cut_is_read_where_it_is_its_first_field(
    beginning: bytes, run_id: str | None
) -> None:
    assert correlation_id_at_start(beginning) == run_id
