"""Pipelines as YAML and JSON, and what a text may not do to us."""

import json
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oraculo.errors import InvalidPipeline
from oraculo.pipeline import text as pipeline_text
from oraculo.pipeline.definition import content_hash, encode_definition
from oraculo.pipeline.retry import RetryPolicy
from oraculo.pipeline.text import MAX_DEPTH, MAX_NUMBER, MAX_TEXT, MAX_YAML, MAX_YAML_VALUES, read_pipeline

HEAD = b"name: p\nsteps:\n"


def problem(text: str | bytes) -> str:
    with pytest.raises(InvalidPipeline) as raised:
        read_pipeline(text if isinstance(text, bytes) else text.encode())
    return str(raised.value)


def config(text: bytes) -> object:
    return json.loads(bytes(read_pipeline(text).steps[0].config))


def test_yaml_and_json_mean_the_same() -> None:
    source = {"name": "p", "steps": [{"type": "a"}, {"type": "b", "dependsOn": ["a"], "config": {"x": [1, 2.5, None]}}]}
    yaml = HEAD + b"  - type: a\n  - type: b\n    dependsOn: [a]\n    config: {x: [1, 2.5, null]}  # comment\n"
    texts = [yaml, json.dumps(source).encode(), json.dumps(source, indent="\t").encode()]
    assert len({content_hash(encode_definition(read_pipeline(text))) for text in texts}) == 1


def test_json_may_escape_an_emoji() -> None:
    text = json.dumps({"name": "p", "description": "pronto 😀", "steps": [{"type": "a"}]})
    assert "\\ud83d\\ude00" in text
    for spaces in ("", "\n \t"):
        assert read_pipeline((spaces + text).encode()).description == "pronto 😀"


def test_yaml_in_braces_is_read_too() -> None:
    assert read_pipeline(b"{name: p, steps: [{type: a}]}").name == "p"


def test_the_name_the_retry_and_the_timeout_are_handed_on() -> None:
    text, retry = b"steps: [{type: a}]", RetryPolicy(7, 3.0, 9.0)
    definition = read_pipeline(text, name="file", default_retry=retry, default_timeout=7.0)
    assert (definition.name, definition.steps[0].retry, definition.timeout) == ("file", retry, 7.0)


def test_anchors_and_merges_may_be_used() -> None:
    text = HEAD + b"  - {type: a, config: &base {x: 1, y: 2}}\n  - {type: b, config: {<<: *base, y: 3}}\n"
    assert json.loads(bytes(read_pipeline(text).steps[1].config)) == {"x": 1, "y": 3}


def test_what_was_merged_is_not_taken_for_a_key_given_twice() -> None:
    text = HEAD + b"  - {type: a, config: {z: &b {x: 1}, i: {d: &a {<<: *b, x: 2}}, o: {<<: *a}}}\n"
    assert config(text) == {"z": {"x": 1}, "i": {"d": {"x": 2}}, "o": {"x": 2}}


# -- faults -----------------------------------------------------------------------------------------------------


def test_bad_yaml_is_refused_with_its_line() -> None:
    assert problem("name: p\nsteps:\n  - type: [a\n").startswith("not valid YAML or JSON: line 4, column 1: ")


@pytest.mark.parametrize("text", ["name: a\nname: b\n", "steps:\n  - type: a\n    timeout: 1\n    timeout: 2\n"])
def test_a_key_given_twice_in_yaml(text: str) -> None:
    assert "is given twice" in problem(text)
    assert "not valid YAML or JSON: line " in problem(text)


def test_a_key_given_twice_deep_inside_config() -> None:
    assert "line 3, column 30: the key 'k' is given twice" in problem(HEAD + b"  - {type: a, config: {k: 1, k: 2}}")


def test_a_key_given_twice_in_json() -> None:
    assert problem('{"name": "p", "name": "p", "steps": []}') == "not a valid pipeline: the key 'name' is given twice"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got nothing: it is empty"),
        ("# steps: none yet\n", "got nothing: it is empty"),
        ("just text", "got 'just text'"),
        ("a: 1\n---\nb: 2", "line 2, column 1"),
        ("steps:\n\t- type: a", "line 2, column 1: found character that cannot start any token; indent with spaces"),
        ("? [a, b]\n: 1", "line 1, column 3: a key must be a text"),
        ("!!python/object/apply:os.system [ls]", "line 1, column 1: the tag '!!python/object/apply:os.system' cannot"),
        ("!!map text", "the tag '!!map'"),
        ("name: 2025-99-99", "line 1, column 7: '2025-99-99' cannot be read as a date; put it in quotes"),
        ("a:\n- !!bool x", "line 2, column 3: 'x' cannot be read as true or false"),
        ("!!int x", "'x' cannot be read as a whole number"),
        ("!!float x", "'x' cannot be read as a number"),
        ("!!set {a}", "the tag '!!set'"),
        ("!own x", "the tag '!own'"),
        ("name: =", "the tag '!!value'"),
        ("name: <<", "the tag '!!merge'"),
        ("name: 1" + "0" * 5000, "cannot be read as a whole number; put it in quotes"),
        ('{"name": 1' + "0" * 5000 + "}", "a number has thousands of digits; put it in quotes"),
        ('{"name": "a\\u0000b"}', "NUL"),
        ("name: &a [*a]", "a value holds itself"),
        ("&a {<<: *a}", "a value holds itself"),
        ("name: *nobody", "undefined alias"),
        ("name: p\nsteps: [{type: a, config: {x: [!!binary eA==, &a [1], *a]}}]", "the tag '!!binary'"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, says: str) -> None:
    assert says in problem(text)


@pytest.mark.parametrize("text", [b" " * (MAX_TEXT + 1), b"a: [", b".inf", b'{"a":' * 500_000])
def test_a_fault_of_the_whole_text_names_no_field(text: bytes) -> None:
    with pytest.raises(InvalidPipeline) as raised:
        read_pipeline(text)
    assert [fault.field for fault in raised.value.faults] == [""]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps: [{type: a}, {type: b, config: {n: .nan}}]", "steps[1] (b).config: `config.n` is nan"),
        ('{"steps": [{"type": "a", "config": {"n": [0, [1e999]]}}]}', "steps[0] (a).config: `config.n[1][0]` is inf"),
        ("steps: [{type: a, config: {1: x}}]", "steps[0] (a).config: the key 1 of `config` must be a text"),
        ('steps: [{type: a, config: {x: "a\\0b"}}]', "steps[0] (a).config: a text in `config.x` holds a NUL"),
        ('{"description": "a\\ud83d", "steps": [{"type": "a"}]}', "description: a text in `description` holds a NUL"),
        ('steps: [{type: "a\\0b", queue: q}]', "steps[0].type: must be a text without control characters"),
        ('steps: [{type: a, celery: {task: t, args: ["\\0"]}}]', "steps[0] (a).celery.args: must hold nothing but"),
        ('steps: [{type: a, celery: {task: "t\\0"}}]', "steps[0] (a).celery.task: must name the task"),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_by_its_place(text: str, says: str) -> None:
    with pytest.raises(InvalidPipeline) as raised:
        read_pipeline(text.encode(), name="p")
    assert says in str(raised.value)


def test_what_is_not_utf_8_is_refused() -> None:
    assert problem(b"name: \xff").startswith("not valid YAML or JSON: ")
    assert "not UTF-8" in problem(b'{"name": "\xff"}')


def test_a_timeout_of_thousands_of_digits_is_refused() -> None:
    assert "timeout: must be more than 0" in problem("name: p\nsteps: [{type: a}]\ntimeout: 0x" + "f" * 4000)


def test_a_text_over_the_limit_is_not_read() -> None:
    assert problem(b" " * (MAX_TEXT + 1)) == f"{MAX_TEXT + 1} bytes, over the limit of {MAX_TEXT}"
    text = b'{"name": "p", "steps": [{"type": "a"}]}'
    assert read_pipeline(text.ljust(MAX_TEXT)).name == "p"


def test_yaml_may_be_less_long_than_json() -> None:
    assert read_pipeline((HEAD + b"  - type: a\n").ljust(MAX_YAML, b"#")).name == "p"
    assert "bytes of YAML, over the limit" in problem(b"#" * (MAX_YAML + 1))
    long = {"name": "p", "description": "x" * 2 * MAX_YAML, "steps": [{"type": "a"}]}
    assert len(read_pipeline(json.dumps(long).encode()).description) == 2 * MAX_YAML
    assert "as JSON it is broken at line 1, column" in problem(json.dumps(long).encode()[:-1])


def test_yaml_of_very_many_values_is_refused_before_it_is_built() -> None:
    started = time.process_time()
    assert "too many for YAML" in problem(
        HEAD + b"  - {type: a, config: {x: [" + b"1," * (MAX_YAML_VALUES + 1) + b"]}}"
    )
    assert time.process_time() - started < 2


# -- bombs ------------------------------------------------------------------------------------------------------


def levels(first: str, each: str) -> str:
    """A step's config of ten lines, each ten times the one before."""
    lines = [f"a0: &a0 {first}"]
    for number in range(1, 10):
        lines.append(f"a{number}: &a{number} " + each.format(", ".join([f"*a{number - 1}"] * 10)))
    return config_of(lines)


def wide_merges() -> str:
    """A thousand objects, each with the thousand keys of one before them, and one of its own."""
    keys = ", ".join(f"k{number}: 1" for number in range(1_000))
    return config_of([f"a: &a {{{keys}}}", *(f"b{number}: {{<<: *a, own: 1}}" for number in range(1_000))])


def alike_keys() -> str:
    """Thirty thousand numbers that have the same hash in Python."""
    return config_of([f"{number * (2**61 - 1)}: 1" for number in range(1, 30_000)])


def config_of(lines: list[str]) -> str:
    return HEAD.decode() + "  - type: a\n    config:\n" + "".join(f"      {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (levels("[1, 1]", "[{}]"), "more than 1000000 values"),
        (levels("{k: 1}", "{{<<: [{}]}}"), "more than 1000000 values"),
        (wide_merges(), "more than 1000000 values"),
        (levels("[1]", "!!pairs [{}]").replace("*a", "x: *a"), "the tag '!!pairs'"),
        ("[" * 1_000_000, "line 1, column 101: nested deeper than 100 levels"),
        ("- " * 500_000, "line 1, column 201: nested deeper than 100 levels"),
        ("? " * 500_000, "nested deeper than 100 levels"),
        ("{a: " * 250_000, "nested deeper than 100 levels"),
        ('{"a":' * 500_000, "not a valid pipeline: nested deeper than 100 levels"),
        (config_of(["n: 1" + ":1" * 400_000]), "cannot be read as a whole number; put it in quotes"),
        (config_of(["n: 1" + ":1" * 400_000 + ".5"]), "cannot be read as a number; put it in quotes"),
        (config_of(["? 1" + ":1" * 400_000, ": n"]), "must be a text; put it in quotes"),
        (alike_keys(), "line 5, column 7: the key '2305843009213693951' must be a text; put it in quotes"),
    ],
    ids=[
        *("aliases", "merges", "wide merges", "pairs", "brackets", "dashes", "questions", "braces", "json"),
        *("base 60", "base 60 with a fraction", "a key of base 60", "alike keys"),
    ],
)
def test_a_bomb_is_refused_in_time(text: str, says: str) -> None:
    started = time.process_time()
    assert says in problem(text)
    assert time.process_time() - started < 8


def test_what_is_nested_100_deep_is_read_and_what_is_deeper_is_not() -> None:
    yaml, as_json = (
        "name: p\nsteps: [{type: a, config: {x: %s}}]",
        '{"name": "p", "steps": [{"type": "a", "config": {"x": %s}}]}',
    )
    room = MAX_DEPTH - 4  # for lists, inside the pipeline, its steps, the step and its config
    for text in (yaml, as_json):
        assert len(bytes(read_pipeline((text % nested(room)).encode()).steps[0].config)) > 2 * room
        assert "nested deeper than 100 levels" in problem(text % nested(room + 1))


def nested(lists: int) -> str:
    return "[" * lists + "1" + "]" * lists


def test_what_was_closed_is_not_taken_for_depth_nor_its_neighbours_for_none() -> None:
    assert config(HEAD + b"  - {type: a, config: {x: [" + nested(90).encode() + b", " + nested(90).encode() + b"]}}")
    assert "line 1, column 497: nested deeper than 100 levels" in problem("[[], " * 200)


# -- where the limits are ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "fits"), [("1", 180), ("[]", 180), ("{}", 180), ("[1]", 90)])
def test_yaml_is_counted_by_its_values(one: str, fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_text, "MAX_YAML_VALUES", 200)

    def text(count: int) -> str:
        return f"name: p\nsteps: [{{type: a, config: {{x: [{', '.join([one] * count)}]}}}}]"

    assert config(text(fits).encode()) == {"x": [json.loads(one)] * fits}
    assert "more than 200 values, too many for YAML" in problem(text(201))


def test_a_bomb_is_refused_before_it_is_spread_out() -> None:
    wide = ", ".join(["1"] * 4_000)
    text = config_of([f"a: &a [{wide}]", f"b: [{', '.join(['*a'] * 4_000)}]"])
    tracemalloc.start()
    try:
        assert "more than 1000000 values" in problem(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64_000_000, "all its sixteen million values would take 128 MB"


@pytest.mark.parametrize(
    "lines",
    [
        [f"s: &s {'z' * 500_000}", f"n: [{', '.join(['*s'] * 1_000)}]"],
        [f"a: &a {{? {'z' * 500_000} : 1}}", *(f"m{number}: {{<<: *a}}" for number in range(1_000))],
        [f"s: &s 0x{'f' * 4_000}", f"n: [{', '.join(['*s'] * 10_000)}]"],
    ],
    ids=["texts", "merged keys", "numbers"],
)
def test_what_aliases_repeat_counts_by_its_length_and_is_not_spread_out(lines: list[str]) -> None:
    tracemalloc.start()
    try:
        assert f"more than {MAX_TEXT} characters, with what aliases repeat" in problem(config_of(lines))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32_000_000, "spread out it would take 40 MB or more"


def test_texts_and_numbers_may_be_as_long_together_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + b"  - {type: a, config: {s: &s " + b"x" * 90 + b", n: [*s, *s, *s, &n 0x" + b"f" * 90 + b", *n, *n]}}"
    length = 4 * 90 + 3 * 92 + len("name p steps type a config s n".replace(" ", ""))
    monkeypatch.setattr(pipeline_text, "MAX_TEXT", length)
    assert config(text) == {"s": "x" * 90, "n": ["x" * 90] * 3 + [16**90 - 1] * 3}
    monkeypatch.setattr(pipeline_text, "MAX_TEXT", length - 1)
    assert f"more than {length - 1} characters" in problem(text)


@pytest.mark.parametrize("number", ["9" * MAX_NUMBER, "-0x" + "f" * 3_000, "0." + "3" * (MAX_NUMBER - 2)])
def test_a_number_may_have_as_many_characters_as_the_limit(number: str) -> None:
    text = f"name: p\nsteps: [{{type: a, config: {{n: {number}}}}}]"
    assert config(text.encode()) == {"n": int(number, 0) if "." not in number else float(number)}
    longer = number + "0" * (MAX_NUMBER + 1 - len(number))
    assert "cannot be read as a" in problem(text.replace(number, longer))


def test_a_text_of_digits_may_be_longer() -> None:
    assert config(HEAD + b"  - {type: a, config: {n: '" + b"9" * 5_000 + b"'}}") == {"n": "9" * 5_000}


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab:-?[]{}&*!<>|#%@\"'\n \t,0.~", max_size=60) | st.binary(max_size=60))
def test_any_text_gives_a_definition_or_one_error(text: str | bytes) -> None:
    body = text if isinstance(text, bytes) else text.encode()
    for one in (body, HEAD + b"  - type: a\n    config: " + body):
        try:
            definition = read_pipeline(one)
        except InvalidPipeline:
            continue
        encode_definition(definition)


TAGS = "str int float bool null timestamp binary set omap pairs map seq merge value python/name:os.system"
tags = st.sampled_from(["", "! ", "!own ", "!<tag:x> ", *(f"!!{tag} " for tag in TAGS.split())])
ODD = "x '' \"x\" 0b_ 0x_ 1_000 ._ 1:99 - = << ~ 2025-99-99 2025-01-01T99:00:00Z 2025-01-01 .inf .nan +.e yes 09 1e999"
scalars = st.sampled_from([*ODD.split(), "1" + "0" * 5000, "0x" + "f" * 5000, '"\\ud800"']) | st.text(max_size=6).map(
    json.dumps
)
tagged = st.recursive(
    st.builds(str.__add__, tags, scalars),
    lambda inner: (
        st.builds(lambda tag, items: f"{tag}[{', '.join(items)}]", tags, st.lists(inner, max_size=3))
        | st.builds(
            lambda tag, pairs: f"{tag}{{{', '.join(f'? {key} : {value}' for key, value in pairs)}}}",
            tags,
            st.lists(st.tuples(inner, inner), max_size=3),
        )
    ),
    max_leaves=6,
)
KEYS = ["name", "description", "timeout", "quorum", "onLate", "steps"]
STEP_KEYS = ["type", "id", "queue", "dependsOn", "config", "retry", "timeout", "optional"]


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=60) | tagged, st.sampled_from(KEYS), st.sampled_from(STEP_KEYS))
def test_any_tag_and_value_gives_a_definition_or_one_error(value: str, key: str, step_key: str) -> None:
    texts = [
        value,
        f"{key}: {value}",
        f"steps: [{{{step_key}: {value}, type: a}}]",
        f"steps: [{{{step_key}: {value}}}]",
    ]
    for text in [*texts, f"steps: [{{type: a, config: {{x: {value}}}}}]"]:
        try:
            definition = read_pipeline(text.encode(errors="surrogatepass"), name="p")
        except InvalidPipeline:
            continue
        encode_definition(definition)
