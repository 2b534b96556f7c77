"""A JSON text with a fault is refused before anything reads it."""

import json
import time
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oraculo.core.request import Limits, read_request
from oraculo.errors import InvalidJson
from oraculo.wire.json_guard import HANDED_ON_DEPTH, MAX_DEPTH, check_json_text, holds_far_number, json_fault
from oraculo.wire.message import decode_message


def problem(body: bytes) -> str:
    with pytest.raises(InvalidJson) as raised:
        check_json_text(body)
    assert [fault.field for fault in raised.value.faults] == [""]
    return str(raised.value)


@pytest.mark.parametrize("body", [b"{}", b"", '{"a": "ção 😀"}'.encode(), b'{"a": "\\\\u0000"}', b'"\\u0001"'])
def test_what_others_can_read_passes(body: bytes) -> None:
    check_json_text(body)


def test_what_is_not_utf_8_is_refused_with_its_place() -> None:
    assert problem(b'{"a": "\xff"}').startswith("not UTF-8: byte 7")


@pytest.mark.parametrize("body", [b'{"a": "\\u0000"}', b'"\\\\\\u0000"', b"{}\0", b'{"\\u0000": 1}'])
def test_nul_is_refused(body: bytes) -> None:
    assert problem(body).startswith("holds a NUL character")


FAR = [
    *("1e999", "-1E+999", "1.5e309", "1.8e308", "1e0400", "1e99999999999999999999"),
    *("9" * 5000, "-" + "9" * 4301, "9" * 400 + ".5", "9" * 210 + "e99", "9" * 210 + ".1E+99"),
]
NEAR = [
    *("1e308", "1e-999", "0e999", "1e0000000000005", "0." + "0" * 400 + "1e700", "9" * 4300, "9" * 300 + ".5"),
    *('"1e999"', '"e1234567"', '"' + "9" * 5000 + '"', '"7e100, 1e999]"', "12345678901234567890123", "[]"),
]


LONG_TEXT = "x" * 5000  # a short value is read whole, a long one only where it looks like holding such a number


@pytest.mark.parametrize("beside", ["", LONG_TEXT], ids=["short", "long"])
@pytest.mark.parametrize("number", FAR)
def test_a_number_that_python_cannot_read_is_found(number: str, beside: str) -> None:
    assert holds_far_number(f'{{"a": [{{"b": {number}}}, "{beside}"]}}'.encode())


@pytest.mark.parametrize("beside", ["", LONG_TEXT], ids=["short", "long"])
@pytest.mark.parametrize("value", NEAR)
def test_what_python_can_read_holds_no_far_number(value: str, beside: str) -> None:
    assert not holds_far_number(f'{{"a": [{{"b": {value}}}, "{beside}"]}}'.encode())


@given(st.from_regex(r"-?(0|[1-9][0-9]{0,400})(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,5})?", fullmatch=True))
def test_a_number_is_as_far_in_a_long_value_as_in_a_short_one(number: str) -> None:
    assert holds_far_number(f'[{number}, "{LONG_TEXT}"]'.encode()) is holds_far_number(number.encode())


def test_a_long_value_without_far_numbers_is_not_read() -> None:
    many = b"[" + b"{}," * 2_000_000 + b"{}]"
    started = time.process_time()
    assert not holds_far_number(many)
    assert time.process_time() - started < 0.2, "some 10 ms of CPU, where to read it takes 300"


@pytest.mark.parametrize("half", [rb"\ud800", rb"\uDC00", rb"\ud83dx", rb"\ud83d\ud83d\ude00", rb"\ude00\ud83d"])
@pytest.mark.parametrize("read", [decode_message, lambda body: read_request(body, Limits())])
def test_half_a_surrogate_pair_is_reported_as_that(half: bytes, read: Callable[[bytes], object]) -> None:
    with pytest.raises(InvalidJson, match="not valid JSON: a text holds half a surrogate pair"):
        read(b'{"payload": {"a": "%s"}}' % half)


@pytest.mark.parametrize("body", [rb'"\ud83d\ude00\uD83D\uDE00"', rb'"\\ud800"', rb'"\ud7ff \ue000"'])
def test_whole_pairs_and_what_only_looks_like_half_a_pair_are_reported_in_the_readers_words(body: bytes) -> None:
    assert json_fault(body, ValueError("truncated")).problem == "not valid JSON: truncated"


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_is_bounded(opening: bytes, closing: bytes) -> None:
    check_json_text(opening * MAX_DEPTH + b"1" + closing * MAX_DEPTH)
    deeper = MAX_DEPTH + 1
    assert problem(opening * deeper + b"1" + closing * deeper) == f"nested deeper than {MAX_DEPTH} levels"


@pytest.mark.parametrize("limit", [MAX_DEPTH, HANDED_ON_DEPTH])
def test_a_message_may_be_of_ours_unless_its_reader_says_otherwise(limit: int) -> None:
    def message(levels: int) -> bytes:
        inner = b'{"a":' * (levels - 1) + b"1" + b"}" * (levels - 1)
        return b'{"correlation_id":"r","tipo_evento":"x","timestamp":"2025-10-14T12:00:00Z","payload":%s}' % inner

    read = decode_message if limit == HANDED_ON_DEPTH else partial(decode_message, max_depth=limit)
    read(message(limit))
    with pytest.raises(InvalidJson, match=f"^nested deeper than {limit} levels$"):
        read(message(limit + 1))


def test_many_brackets_side_by_side_are_not_deep() -> None:
    check_json_text(b"[" + b",".join([b"[]"] * 1000) + b"]")


@pytest.mark.parametrize("text", ["[" * 500, '\\"[' * 500, "\\\\", '"{{' * 200])
def test_brackets_inside_a_text_are_not_counted(text: str) -> None:
    check_json_text(json.dumps({"a": text, "b": [[]]}).encode())


@pytest.mark.parametrize(
    "tail", [b'"' + b'\\"' * 200_000, b'"' * 200_001, b'"' + b"\\" * 400_000, b'"' + b"a" * 400_000]
)
def test_a_text_that_never_ends_costs_no_more_than_its_length(tail: bytes) -> None:
    started = time.process_time()
    problem(b"[" * 200 + tail)
    assert time.process_time() - started < 2, "the time grows with the square of the length"


@pytest.mark.parametrize(
    "part",
    [
        b"[],",
        b"{},",
        b'"a",',
        b'"[",',
        b'"[[",',
        b'"\\"[",',
        b'"\\\\",',
        b'"\\\\u0000",',
        b"[" * 100 + b"]" * 100 + b",",
    ],
)
def test_a_body_of_30_mb_is_looked_through_at_once(part: bytes) -> None:
    body = b"[" + b"[]," * 200 + part * (30_000_000 // len(part)) + b"[]]"
    started = time.process_time()
    check_json_text(body)
    assert time.process_time() - started < 2.5, "some 0.5 s of CPU; brackets one by one take 5 s"


@pytest.mark.parametrize("before", [0, 1, 7, 8, 2**18 - 130, 2**18 - 1, 2**18, 2**18 + 3])
@pytest.mark.parametrize("text", [b"", b'"[",', b'"\\\\","]]",'])
def test_the_depth_is_exact_wherever_the_deepest_place_is(before: int, text: bytes) -> None:
    flat = b"[" + b"[]," * (before // 2) + text + b"{}," * (before % 2)
    check_json_text(flat + b"[" * (MAX_DEPTH - 1) + b"]" * MAX_DEPTH)
    problem(flat + b"[" * MAX_DEPTH + b"]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize("around", [0, 1, 125, MAX_DEPTH])
def test_brackets_in_a_long_text_nest_nothing_however_deep_the_text_is(around: int) -> None:
    check_json_text(b"[" * around + b'"' + b"[" * 2**20 + b'"' + b"]" * around)
    problem(b"[" * (MAX_DEPTH + 1) + b'"' + b"[" * 2**20 + b'"' + b"]" * (MAX_DEPTH + 1))


@given(st.binary(max_size=400))
def test_any_bytes_pass_or_are_refused_as_json(body: bytes) -> None:
    try:
        check_json_text(body)
    except InvalidJson:
        return
    body.decode()


@given(st.recursive(st.text(max_size=5), lambda inner: st.lists(inner, max_size=4), max_leaves=60))
def test_the_depth_of_any_value_is_reported_right(value: object) -> None:
    def depth(one: object) -> int:
        return 1 + max(map(depth, one), default=0) if isinstance(one, list) else 0

    text = json.dumps(value).replace("\\u0000", "").encode()
    room = MAX_DEPTH - depth(value)
    check_json_text(b"[" * room + text + b"]" * room)
    if isinstance(value, list):
        problem(b"[" * (room + 1) + text + b"]" * (room + 1))
