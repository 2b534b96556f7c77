"""The name of each fault of a definition."""

from collections.abc import Callable
from typing import Any

import pytest

from oraculo.errors import InvalidPipeline
from oraculo.pipeline.definition import MAX_FAULTS, MAX_SECONDS, MAX_STEPS, parse_pipeline
from tests.core.building import pipeline


def faults(*steps: Any, **options: Any) -> list[str]:
    source = {"name": "p", "steps": list(steps), **options}
    with pytest.raises(InvalidPipeline) as raised:
        parse_pipeline(source)
    return [str(fault) for fault in raised.value.faults]


def only_fault(*steps: Any, **options: Any) -> str:
    (fault,) = faults(*steps, **options)
    return fault


@pytest.mark.parametrize("source", [None, [], "steps", 7])
def test_what_is_no_object_is_no_pipeline(source: object) -> None:
    with pytest.raises(InvalidPipeline, match=r"^a pipeline is an object with `steps`; got") as raised:
        parse_pipeline(source)
    assert raised.value.faults[0].field == ""


@pytest.mark.parametrize(("steps", "got"), [({}, "{}"), ("a", "'a'"), (7, "7"), (False, "False")])
def test_steps_that_are_no_list(steps: object, got: str) -> None:
    with pytest.raises(InvalidPipeline) as raised:
        parse_pipeline({"name": "p", "steps": steps})
    assert str(raised.value) == f"steps: must be a list of at least one step; got {got}"


@pytest.mark.parametrize("steps", [None, []])
def test_no_steps(steps: object) -> None:
    with pytest.raises(InvalidPipeline) as raised:
        parse_pipeline({"name": "p", "steps": steps})
    assert str(raised.value) == "steps: is required: a list of at least one step"


def test_too_many_steps() -> None:
    assert only_fault(*[{"type": "a"}] * (MAX_STEPS + 1)).startswith("steps: has 100001 steps; at most 100000")


def test_a_cycle_with_its_path() -> None:
    steps = [
        {"type": "x"},
        {"type": "a", "dependsOn": ["c"]},
        {"type": "b", "dependsOn": ["a"]},
        {"type": "c", "dependsOn": ["x", "b"]},
    ]
    assert only_fault(*steps) == ("steps[1] (a).dependsOn: the steps wait for each other in a circle: a → c → b → a")


def test_a_step_that_waits_for_itself() -> None:
    assert only_fault({"type": "a", "dependsOn": ["a"]}).endswith("in a circle: a → a")


def test_a_very_long_cycle_is_shortened() -> None:
    steps = [{"type": f"s{n}", "dependsOn": [f"s{(n + 1) % 10_000}"]} for n in range(10_000)]
    said = only_fault(*steps)
    assert said.endswith("→ … 9981 more … → s0")
    assert len(said) < 400


@pytest.mark.parametrize(
    ("count", "path"),
    [
        (19, [f"s{n}" for n in range(19)] + ["s0"]),
        (20, [f"s{n}" for n in range(19)] + ["… 1 more …", "s0"]),
        (21, [f"s{n}" for n in range(19)] + ["… 2 more …", "s0"]),
    ],
)
def test_a_cycle_of_twenty_names_is_named_whole_and_a_longer_one_in_part(count: int, path: list[str]) -> None:
    steps = [{"type": f"s{n}", "dependsOn": [f"s{(n + 1) % count}"]} for n in range(count)]
    assert only_fault(*steps).endswith(" in a circle: " + " → ".join(path))


def test_an_unknown_dependency_with_the_nearest() -> None:
    assert only_fault({"type": "VIRAL_COPY"}, {"type": "b", "dependsOn": ["VIRAL_COPI"]}) == (
        "steps[1] (b).dependsOn: no step has the id 'VIRAL_COPI'; did you mean 'VIRAL_COPY'?"
    )


def test_a_duplicate_id() -> None:
    assert only_fault({"type": "x"}, {"type": "a"}, {"type": "b", "id": "a"}) == (
        "steps[2]: step 'a' is there already as steps[1]; give one an `id`"
    )


def test_a_duplicate_id_is_counted_by_its_place_in_the_file() -> None:
    assert faults({}, {"type": "a"}, {"type": "a"}) == [
        "steps[0].type: is required: a job type or the name of a queue",
        "steps[2]: step 'a' is there already as steps[1]; give one an `id`",
    ]


def test_an_unknown_key_of_a_step_with_the_nearest() -> None:
    assert only_fault({"type": "a", "dependOn": []}) == (
        "steps[0] (a).dependOn: is not a known key; did you mean 'dependsOn'?"
    )


def test_an_unknown_key_of_the_pipeline_and_of_retry() -> None:
    assert faults({"type": "a", "retry": {"maxAttempt": 2}}, timout=3) == [
        "timout: is not a known key; did you mean 'timeout'?",
        "steps[0] (a).retry.maxAttempt: is not a known key; did you mean 'maxAttempts'?",
    ]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("texto", "steps[0]: a step is an object with `type`; got 'texto'"),
        ({}, "steps[0].type: is required: a job type or the name of a queue"),
        ({"type": 3}, "steps[0].type: must be a text: a job type or the name of a queue; got 3, which must be"),
        ({"type": False}, "steps[0].type: must be a text: a job type or the name of a queue; got False, which must be"),
        ({"type": "a", "id": 3}, "steps[0].id: must be a string; got 3"),
        ({"type": "a", "id": ""}, "steps[0] ().id: must have 1 to 128 characters; got 0"),
        ({"type": "a", "id": "x" * 129}, f"steps[0] ({'x' * 129}).id: must have 1 to 128 characters; got 129"),
        ({"type": "a", "id": "a\nb"}, "steps[0] (a\nb).id: must not hold control characters"),
        ({"type": "VIRAL_COPY", "id": ".."}, "steps[0] (..).id: must not be '.' or '..', which mean folders in a URL"),
        ({"type": "a", "config": [1]}, "steps[0] (a).config: must be an object; got [1]"),
        ({"type": "a", "dependsOn": {"b": 1}}, "steps[0] (a).dependsOn: must be a list of step ids"),
        ({"type": "a", "dependsOn": [1]}, "steps[0] (a).dependsOn: must be a list of step ids"),
        ({"type": "a", "optional": "yes"}, "steps[0] (a).optional: must be true or false; got 'yes'"),
        ({"type": "a", "timeout": "5s"}, "steps[0] (a).timeout: must be a number of seconds; got '5s'"),
        ({"type": "a", "timeout": True}, "steps[0] (a).timeout: must be a number of seconds; got True"),
        ({"type": "a", "timeout": 0}, "steps[0] (a).timeout: must be more than 0 and at most 31536000 seconds; got 0"),
        ({"type": "a", "queue": 5}, "steps[0] (a).queue: must be a string"),
        ({"type": "a", "queue": "resultados"}, "steps[0] (a).queue: 'resultados' is the orchestrator's own queue"),
        ({"type": "a", "queue": "a.dlq"}, "steps[0] (a).queue: 'a.dlq' is a dead-letter queue"),
        ({"type": "VIRAL COPY"}, "did you mean 'VIRAL_COPY'?)"),
        ({"type": "a", "retry": 3}, "steps[0] (a).retry: must be an object, as {maxAttempts: 3"),
        ({"type": "a", "retry": {"maxAttempts": 0}}, "steps[0] (a).retry.maxAttempts: must be a whole number from 1"),
        ({"type": "a", "retry": {"maxAttempts": True}}, "must be a whole number from 1 to 1000; got True"),
        ({"type": "a", "retry": {"maxAttempts": 1001}}, "must be a whole number from 1 to 1000; got 1001"),
        ({"type": "a", "retry": {"backoff": -1}}, "steps[0] (a).retry.backoff: must be 0 or more and at most 31536000"),
        ({"type": "a", "retry": {"maxBackoff": -1}}, "steps[0] (a).retry.maxBackoff: must be 0 or more and at most"),
        ({"type": "a", "retry": {"backoff": False}}, "steps[0] (a).retry.backoff: must be a number of seconds"),
        ({"type": "a", "config": {"x": object()}}, "steps[0] (a).config: `config.x` is <object"),
        ({"type": "a", "config": {1: 2}}, "(a).config: the key 1 of `config` must be a text; put it in quotes"),
        ({"type": "a", "config": {"x": [0, {None: 2}]}}, "(a).config: the key None of `config.x[1]` must be a text"),
        (
            {"type": "a", "config": {"x": [2**20_000]}},
            "(a).config: the number `config.x[0]` has too many digits; put it",
        ),
        (
            {"type": "a", "config": {"good": [1, {"x": 2}], 3: 4}},
            "steps[0] (a).config: the key 3 of `config` must be a text; put it in quotes",
        ),
        (
            {"type": "a", "config": {"long": 2**13_999, 3: 4}},
            "steps[0] (a).config: the key 3 of `config` must be a text; put it in quotes",
        ),
        (
            {"type": "a", "config": {"k" * 50: {3: 4}}},
            f"steps[0] (a).config: the key 3 of `config.{'k' * 40}` must be a text; put it in quotes",
        ),
        ({"type": "a", 2**20_000: 1}, "steps[0] (a).a very long number: is not a known key"),
        ({"type": "a", "queue": 2**20_000}, "steps[0] (a).queue: must be a string"),
        ({"queue": 5}, "steps[0].queue: must be a string"),
        ({"queue": "a b"}, "steps[0] (a b).queue: must be 1 to 128 letters"),
        ({"queue": "q", "type": 3}, "steps[0].type: must be a text: a job type or the name of a queue; got 3, which"),
    ],
)
def test_a_fault_of_a_step_names_the_step(step: Any, said: str) -> None:
    assert said in only_fault(step)


@pytest.mark.parametrize("inside", [lambda inner: {"x": inner}, lambda inner: [inner]], ids=["objects", "lists"])
def test_what_json_cannot_hold_is_found_deep_inside_config(inside: Callable[[object], object]) -> None:
    value: object = {3: 4}
    for _ in range(150):
        value = inside(value)
    said = only_fault({"type": "a", "config": {"k": value}})
    assert said.startswith("steps[0] (a).config: the key 3 of `config.k")
    assert said.endswith("` must be a text; put it in quotes")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"description": 3}, "description: must be a string; got 3"),
        ({"timeout": "x"}, "timeout: must be a number of seconds; got 'x'"),
        ({"timeout": float("inf")}, "timeout: must be more than 0"),
        ({"timeout": float("nan")}, "timeout: must be more than 0"),
        ({"timeout": 2**20_000}, "timeout: must be more than 0 and at most 31536000 seconds; got a very long number"),
        ({"onLate": "amen"}, 'onLate: must be "record" or "amend"; got \'amen\''),
        ({"onLate": []}, 'onLate: must be "record" or "amend"; got []'),
        ({"quorum": 2}, 'quorum: must be "all", a whole number from 1 to 1, or a percentage such as "60%"; got 2'),
        ({"name": "a b"}, "name: must be 1 to 128 letters, digits, '_', '-' or '.'; got 'a b'"),
        ({"name": "é"}, "name: must be 1 to 128 letters, digits, '_', '-' or '.'; got 'é'"),
        ({"name": 2**20_000}, "name: must be a text: 1 to 128 letters"),
        ({"name": None}, "name: is required: 1 to 128 letters"),
    ],
)
def test_a_fault_of_the_pipeline_names_the_key(options: dict[str, Any], said: str) -> None:
    assert only_fault({"type": "a"}, **options).startswith(said)


def test_a_type_that_cannot_be_a_queue_is_reported_with_the_nearest_job_and_a_bad_queue_without() -> None:
    assert only_fault({"type": "VIRAL COPY"}) == (
        "steps[0] (VIRAL COPY).queue: must be 1 to 128 letters, digits, '_', '-' or '.'; got 'VIRAL COPY' "
        "(no `queue` is given and the type is not a job type; did you mean 'VIRAL_COPY'?)"
    )
    assert only_fault({"type": "VIRAL COPY", "queue": "a b"}) == (
        "steps[0] (VIRAL COPY).queue: must be 1 to 128 letters, digits, '_', '-' or '.'; got 'a b'"
    )


def test_an_id_is_held_to_its_rules_wherever_it_comes_from() -> None:
    long = "x" * 129
    too_long = f"steps[0] ({long}).id: must have 1 to 128 characters; got 129"
    assert pipeline({"type": long[1:], "queue": "q"}).steps[0].id == long[1:]
    assert only_fault({"type": long, "queue": "q"}) == too_long
    assert faults({"id": long}) == [f"steps[0].type: {REQUIRED}", too_long]


def test_a_name_that_is_not_the_one_it_is_kept_under() -> None:
    with pytest.raises(InvalidPipeline, match="name: is 'b' but the pipeline is addressed as 'a'; make them the same"):
        parse_pipeline({"name": "b", "steps": [{"type": "a"}]}, name="a")


def test_several_faults_are_reported_at_once() -> None:
    said = faults(
        {"type": "a", "timeout": -1, "dependsOn": ["z"]},
        {"type": "b", "dependsOn": ["c"], "depends": 1},
        {"type": "c", "dependsOn": ["b"]},
        {"type": "c"},
        quorum=5,
        onLate="never",
    )
    assert [fault.partition(": ")[0] for fault in said] == [
        "onLate",
        "steps[0] (a).timeout",
        "steps[1] (b).depends",
        "steps[3]",
        "quorum",
        "steps[0] (a).dependsOn",
    ]


def test_a_cycle_is_reported_together_with_other_faults() -> None:
    said = faults({"type": "a", "dependsOn": ["b", "z"]}, {"type": "b", "dependsOn": ["a"]})
    assert [fault.partition(": ")[2][:20] for fault in said] == ["no step has the id '", "the steps wait for e"]


REQUIRED = "is required: a job type or the name of a queue"


def test_a_step_whose_id_is_not_known_makes_no_fault_of_what_may_depend_on_it() -> None:
    for unknown in ({"type": ""}, {}, {"id": 7, "queue": 7}):
        said = faults(unknown, {"type": "b", "dependsOn": ["a"]}, {"type": "c"}, quorum=3)
        assert all(fault.startswith("steps[0].") for fault in said)


def test_a_step_without_a_type_has_its_other_faults_and_the_graphs() -> None:
    said = faults(
        {"timeout": 0, "depends": 1},
        {"id": "x", "dependsOn": ["y"], "optional": 1},
        {"type": "y", "dependsOn": ["x"]},
        {"type": "z"},
        {"type": "z"},
    )
    assert [fault.partition(": ")[0] for fault in said] == [
        "steps[0].type",
        "steps[0].depends",
        "steps[0].timeout",
        "steps[1].type",
        "steps[1] (x).optional",
        "steps[4]",
        "steps[1] (x).dependsOn",
    ]
    assert said[-1].endswith("in a circle: x → y → x")


def test_a_step_with_an_id_and_without_a_type_can_be_depended_on() -> None:
    first, second = faults({"id": "x"}, {"type": "b", "dependsOn": ["x", "z"]})
    assert first == f"steps[0].type: {REQUIRED}"
    assert second.startswith("steps[1] (b).dependsOn: no step has the id 'z'")


@pytest.mark.parametrize(
    "step", [{"type": "t", "depends": 1}, {"type": "t", "dependsOn": ["zz"]}, {"type": "t", "timeout": 0}, {}]
)
def test_very_many_faults_are_reported_in_part(step: dict[str, Any]) -> None:
    said = faults(*[step | ({"id": f"s{n}"} if step else {}) for n in range(20_000)])
    assert len(said) == MAX_FAULTS


def test_a_step_may_take_a_year_and_no_longer() -> None:
    assert pipeline({"type": "a", "timeout": MAX_SECONDS}).steps[0].timeout == MAX_SECONDS
    assert only_fault({"type": "a", "timeout": MAX_SECONDS + 1}).endswith("at most 31536000 seconds; got 31536001.0")
