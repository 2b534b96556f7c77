"""Warnings about definitions that are valid and may not say what their authors mean."""

import pytest

from oraculo.errors import Fault
from oraculo.pipeline.advice import mistyped_types, unserved_queues
from oraculo.pipeline.definition import Definition, parse_pipeline


def definition(*steps: dict[str, object]) -> Definition:
    return parse_pipeline({"name": "meu", "steps": list(steps)})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("ENHANCED_IMAGE", "ENHANCED_IMAGES"), ("captions", "CAPTIONS"), ("voice-over", "VOICE_OVER")],
)
def test_a_type_near_a_job_type_is_warned_of(typed: str, meant: str) -> None:
    [warning] = mistyped_types(definition({"type": "VIRAL_COPY"}, {"type": typed}))
    assert warning.field == f"steps[1] ({typed}).type"
    assert f"'{meant}'" in warning.problem


@pytest.mark.parametrize(
    "step",
    [
        {"type": "CAPTIONS"},
        {"type": "captions", "queue": "captions-queue"},
        {"type": "executador_relatorio"},
        {"type": "captions", "queue": "celery://loja.resumir"},
    ],
)
def test_what_is_meant_is_not_warned_of(step: dict[str, object]) -> None:
    assert mistyped_types(definition(step)) == []


def test_a_queue_without_a_consumer_is_warned_of_with_the_name_that_may_be_meant() -> None:
    asked = definition({"type": "escavador_blgo"}, {"type": "b"}, {"type": "c"}, {"type": "d"})
    consumers = {"escavador_blgo": 0, "b": 1, "c": None}
    assert unserved_queues(asked, consumers, ["escavador_blog", "escavador_blgo"]) == [
        Fault(
            "steps[0] (escavador_blgo).queue",
            "nobody listens on queue 'escavador_blgo' now; did you mean 'escavador_blog'?",
        )
    ]
