"""The meaning of a definition, its stored form, and the graph of its steps."""

import json
from typing import Any

import msgspec
import pytest

from oraculo.pipeline.definition import (
    DEFAULT_TIMEOUT,
    MAX_STEPS,
    OnLate,
    content_hash,
    decode_definition,
    encode_definition,
    find_cycle,
    parse_pipeline,
    pipeline_document,
)
from oraculo.pipeline.retry import DEFAULT_RETRY, RetryPolicy
from tests.core.building import pipeline

EXAMPLE: dict[str, Any] = {
    "name": "meu-pipeline",
    "description": "Pipeline customizado",
    "timeout": 600,
    "steps": [
        {"type": "ENHANCED_IMAGES", "config": {"count": 5}},
        {
            "type": "VIRAL_COPY",
            "config": {"platform": "instagram"},
            "retry": {"maxAttempts": 3, "backoff": 2, "maxBackoff": 60},
            "timeout": 120,
        },
        {
            "type": "PROMOTIONAL_VIDEO",
            "queue": "video-queue",
            "dependsOn": ["ENHANCED_IMAGES", "VIRAL_COPY"],
            "config": {"duration": 30},
        },
    ],
}


# -- what a good one means --------------------------------------------------------------------------------------


def test_what_an_example_means() -> None:
    definition = parse_pipeline(EXAMPLE)
    images, copy, video = definition.steps
    assert (definition.name, definition.description, definition.timeout) == (
        "meu-pipeline",
        "Pipeline customizado",
        600,
    )
    assert (images.id, images.queue, json.loads(bytes(images.config))) == (
        "ENHANCED_IMAGES",
        "images-queue",
        {"count": 5},
    )
    assert (copy.retry, copy.timeout) == (RetryPolicy(3, 2.0, 60.0), 120)
    assert (video.queue, video.depends_on) == ("video-queue", ("ENHANCED_IMAGES", "VIRAL_COPY"))


def test_what_holds_when_nothing_is_said() -> None:
    definition = pipeline("a")
    (step,) = definition.steps
    assert (definition.timeout, definition.quorum, definition.on_late) == (DEFAULT_TIMEOUT, None, OnLate.RECORD)
    assert definition.description == ""
    assert (step.id, step.type, step.queue, step.optional, step.timeout) == ("a", "a", "a", False, None)
    assert step.retry == DEFAULT_RETRY
    assert not step.config


@pytest.mark.parametrize(
    ("job", "queue"),
    [
        ("ENHANCED_IMAGES", "images-queue"),
        ("VIRAL_COPY", "text-queue"),
        ("VOICE_OVER", "voiceover-queue"),
        ("CAPTIONS", "captions-queue"),
        ("PROMOTIONAL_VIDEO", "video-queue"),
    ],
)
def test_a_job_type_has_its_queue(job: str, queue: str) -> None:
    assert pipeline(job).steps[0].queue == queue


def test_an_id_a_queue_and_the_rest_may_be_given() -> None:
    step = pipeline({"type": "VIRAL_COPY", "id": "one", "queue": "q", "optional": True, "timeout": 1.5}).steps[0]
    assert (step.id, step.type, step.queue, step.optional, step.timeout) == ("one", "VIRAL_COPY", "q", True, 1.5)


def test_a_queue_without_a_type_is_its_type() -> None:
    first, second = pipeline(
        {"queue": "text-queue"}, {"id": "two", "queue": "text-queue", "dependsOn": "text-queue"}
    ).steps
    assert (first.id, first.type, first.queue) == ("text-queue", "text-queue", "text-queue")
    assert (second.id, second.type, second.queue) == ("two", "text-queue", "text-queue")
    assert encode_definition(pipeline({"queue": "q"})) == encode_definition(pipeline({"type": "q"}))


def test_a_single_dependency_needs_no_list_and_a_repeated_one_counts_once() -> None:
    definition = pipeline("a", {"type": "b", "dependsOn": "a"}, {"type": "c", "dependsOn": ["a", "b", "a"]})
    assert [step.depends_on for step in definition.steps] == [(), ("a",), ("a", "b")]


def test_a_part_of_retry_leaves_the_rest_as_it_was_configured() -> None:
    configured = RetryPolicy(7, 3.0, 9.0)
    for part, policy in (
        (None, configured),
        ({}, configured),
        ({"maxAttempts": 1}, RetryPolicy(1, 3.0, 9.0)),
        ({"maxAttempts": 1000}, RetryPolicy(1000, 3.0, 9.0)),
        ({"backoff": 0}, RetryPolicy(7, 0.0, 9.0)),
        ({"maxBackoff": 0}, RetryPolicy(7, 3.0, 0.0)),
    ):
        source = {"name": "p", "steps": [{"type": "a", "retry": part}]}
        assert parse_pipeline(source, default_retry=configured).steps[0].retry == policy


def test_a_pipeline_that_says_no_timeout_has_the_configured_one() -> None:
    source: dict[str, Any] = {"name": "p", "steps": [{"type": "a"}]}
    configured = parse_pipeline(source, default_timeout=7.0)
    said = parse_pipeline({**source, "timeout": DEFAULT_TIMEOUT}, default_timeout=7.0)
    assert (configured.timeout, said.timeout) == (7.0, DEFAULT_TIMEOUT)
    for definition in (configured, said):
        assert decode_definition(encode_definition(definition)) == definition


def test_what_was_stored_without_timeout_and_retry_means_what_it_always_did() -> None:
    stored = decode_definition(b'{"name":"p","steps":[{"id":"a","queue":"a"}]}')
    assert (stored.timeout, stored.steps[0].retry) == (300.0, RetryPolicy(3, 1.0, 60.0))


def test_the_name_may_come_from_where_it_is_kept() -> None:
    assert parse_pipeline({"steps": [{"type": "a"}]}, name="file").name == "file"


def test_late_and_quorum_are_read() -> None:
    definition = pipeline("a", "b", onLate="amend", quorum=1)
    assert (definition.on_late, definition.quorum) == (OnLate.AMEND, 1)


# -- content, hash and document ---------------------------------------------------------------------------------


def digest(**step: Any) -> str:
    return content_hash(encode_definition(pipeline({"type": "a", **step})))


def test_the_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert digest(config={"a": 1, "b": {"c": 2, "d": 3}}) == digest(config={"b": {"d": 3, "c": 2}, "a": 1})


def test_the_hash_depends_on_all_else() -> None:
    digests = [
        digest(),
        digest(config={}),
        digest(config={"a": [1, 2]}),
        digest(config={"a": [2, 1]}),
        digest(timeout=3),
    ]
    assert len(set(digests)) == len(digests)


def test_a_definition_comes_back_from_its_bytes_with_the_same_hash() -> None:
    for definition in (parse_pipeline(EXAMPLE), pipeline("a", onLate="amend", quorum="50%")):
        encoded = encode_definition(definition)
        assert encode_definition(decode_definition(encoded)) == encoded
        assert msgspec.to_builtins(decode_definition(encoded).steps[0].retry) == msgspec.to_builtins(
            definition.steps[0].retry
        )


def test_the_document_of_a_definition_is_one_that_a_user_could_have_written() -> None:
    source = {
        "name": "p",
        "description": "two steps",
        "timeout": 600.0,
        "quorum": "60%",
        "onLate": "amend",
        "steps": [
            {
                "id": "a",
                "type": "VIRAL_COPY",
                "queue": "text-queue",
                "retry": {"maxAttempts": 4, "backoff": 2.0, "maxBackoff": 30.0},
            },
            {
                "id": "b",
                "type": "b",
                "queue": "q",
                "dependsOn": ["a"],
                "config": {"x": 1},
                "retry": {"maxAttempts": 3, "backoff": 1.0, "maxBackoff": 60.0},
                "timeout": 120.0,
                "optional": True,
            },
        ],
    }
    definition = parse_pipeline(source)
    document = json.loads(msgspec.json.encode(pipeline_document(definition)))
    assert document == source
    again = parse_pipeline(document)
    assert pipeline_document(again) == pipeline_document(definition)


def test_the_document_leaves_out_what_is_not_set() -> None:
    document = pipeline_document(pipeline("a"))
    assert set(document) == {"name", "description", "timeout", "onLate", "steps"}
    assert set(document["steps"][0]) == {"id", "type", "queue", "retry"}


# -- the graph --------------------------------------------------------------------------------------------------


def test_a_diamond_is_no_cycle() -> None:
    assert find_cycle({"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}) is None


def test_a_cycle_is_found_behind_a_tail() -> None:
    assert find_cycle({"t": ("a",), "a": ("b",), "b": ("c",), "c": ("b",)}) == ["b", "c", "b"]


def test_a_cycle_is_found_behind_steps_that_are_in_none() -> None:
    assert find_cycle({"a": ("b",), "b": (), "c": ("d",), "d": ("c",)}) == ["c", "d", "c"]


def test_each_step_of_a_chain_is_followed_once() -> None:
    class Followed(dict[str, tuple[str, ...]]):
        count = 0

        def __getitem__(self, name: str) -> tuple[str, ...]:
            self.count += 1
            return super().__getitem__(name)

    chain = Followed({f"s{n}": (f"s{n + 1}",) if n < 99 else () for n in range(100)})
    assert find_cycle(chain) is None
    assert chain.count == 100


def test_a_chain_of_100_000_is_read_without_recursion() -> None:
    steps = [{"type": f"s{n}", "dependsOn": [f"s{n + 1}"] if n < MAX_STEPS - 1 else []} for n in range(MAX_STEPS)]
    assert len(parse_pipeline({"name": "p", "steps": steps}).steps) == MAX_STEPS
