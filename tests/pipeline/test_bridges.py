"""Destinations that are Celery tasks or BullMQ queues: how they are written, refused and sent."""

from pathlib import Path

import msgspec
import pytest

from oraculo.core.command import encode_command
from oraculo.core.machine import start
from oraculo.core.request import Limits, definition_of, new_run, read_request
from oraculo.engine.pipelines import PipelineCatalogue
from oraculo.errors import InvalidPipeline, InvalidRequest
from oraculo.pipeline.bridges import Bridge, read_bridge
from oraculo.pipeline.definition import (
    Definition,
    decode_definition,
    encode_definition,
    parse_pipeline,
    pipeline_document,
)
from oraculo.settings import BUILT_IN_ROUTES, load_settings
from oraculo.testing.store_runs import PLANS, SampleRoutes


@pytest.mark.parametrize(
    ("url", "bridge"),
    [
        ("celery://tasks.add", Bridge("celery", "tasks.add")),
        ("celery://tasks.add?queue=high", Bridge("celery", "tasks.add", queue="high")),
        ("celery://tasks.add?send=payload", Bridge("celery", "tasks.add", send="payload")),
        ("bullmq://images-queue", Bridge("bullmq", "images-queue")),
        ("bullmq://images-queue?name=make&attempts=3", Bridge("bullmq", "images-queue", name="make", attempts=3)),
    ],
)
def test_a_url_is_read_and_written_the_same(url: str, bridge: Bridge) -> None:
    assert read_bridge(url) == bridge
    assert bridge.url == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("kafka://topic", "unknown scheme 'kafka'"),
        ("celery://", "task: must name the task"),
        ("celery://a/b", "task: must name the task"),
        ("celery://a b", "task: must name the task"),
        ("celery://a?quue=x", "unknown option 'quue'; did you mean 'queue'?"),
        ("celery://a?attempts=2", "unknown option 'attempts'"),
        (f"celery://a?queue={'é' * 128}", "queue: must have at most 255 bytes"),
        ("celery://a?send=all", "send: must be kwargs or payload; got 'all'"),
        ("bullmq://q?attempts=0", "attempts: must be a whole number from 1 to 1000; got 0"),
        ("bullmq://q?attempts=many", "got 'many'"),
        ("bullmq://q?attempts", "options that cannot be read"),
    ],
)
def test_a_bad_url_is_reported_with_what_would_be_right(url: str, said: str) -> None:
    fault = read_bridge(url)
    assert isinstance(fault, str)
    assert said in fault


def test_a_fan_out_goes_to_bridges_and_queues_alike() -> None:
    body = {"destinos": ["celery://tasks.add", {"id": "imgs", "fila": "bullmq://images-queue"}, "executador_x"]}
    request = read_request(msgspec.json.encode(body), Limits())
    definition = definition_of(request, SampleRoutes("x"), default_timeout=60.0)
    assert [(step.id, step.queue) for step in definition.steps] == [
        ("celery://tasks.add", "ponte-celery"),
        ("imgs", "ponte-bullmq"),
        ("executador_x", "executador_x"),
    ]
    assert decode_definition(encode_definition(definition)) == definition
    run = new_run(request, definition, run_id="r", now=1.0, plans=PLANS, traceparent=None)
    start(run, 1.0)
    commands = [msgspec.json.decode(encode_command(run, task, "now", "resultados")) for task in run.tasks]
    assert [command.get("ponte") for command in commands] == [
        {"tipo": "celery", "alvo": "tasks.add"},
        {"tipo": "bullmq", "alvo": "images-queue"},
        None,
    ]


def test_a_route_goes_to_bridges_and_queues_alike(tmp_path: Path) -> None:
    file = tmp_path / "oraculo.toml"
    file.write_text('[rotas]\nloja = ["celery://loja.precos?queue=alta", "bullmq://images-queue", "executador_x"]')
    settings = load_settings({}, file)
    catalogue = PipelineCatalogue(settings)
    request = read_request(b'{"tipo": "loja"}', Limits())
    definition = definition_of(request, catalogue, default_timeout=60.0)
    assert [(step.id, step.queue, step.bridge) for step in definition.steps] == [
        ("celery://loja.precos?queue=alta", "ponte-celery", Bridge("celery", "loja.precos", queue="alta")),
        ("bullmq://images-queue", "ponte-bullmq", Bridge("bullmq", "images-queue")),
        ("executador_x", "executador_x", None),
    ]
    assert catalogue.destinations() - set(BUILT_IN_ROUTES["coleta_completa"]) == {
        step.queue for step in definition.steps
    }


@pytest.mark.parametrize("destination", ["kafka://x", {"id": "a", "fila": "celery://"}, "ponte-celery"])
def test_a_destination_that_cannot_be_is_refused(destination: object) -> None:
    with pytest.raises(InvalidRequest, match=r"destinos\[0\]"):
        read_request(msgspec.json.encode({"destinos": [destination]}), Limits())


def parsed(*steps: dict[str, object]) -> Definition:
    return parse_pipeline({"name": "p", "steps": list(steps)})


def test_a_step_has_a_block_or_a_url() -> None:
    by_url = parsed({"id": "a", "queue": "celery://tasks.add?queue=high"}).steps[0]
    by_block = parsed({"id": "a", "celery": {"task": "tasks.add", "queue": "high"}}).steps[0]
    assert by_url.bridge == by_block.bridge
    assert by_block.type == "tasks.add"
    jobs = parsed({"type": "ENHANCED_IMAGES", "bullmq": {"queue": "images-queue", "attempts": 3}}).steps[0]
    assert jobs.bridge == Bridge("bullmq", "images-queue", name="ENHANCED_IMAGES", attempts=3)
    assert jobs.queue == "ponte-bullmq"


def test_a_definition_is_shown_as_it_could_be_written() -> None:
    definition = parsed(
        {"id": "a", "celery": {"task": "t", "args": [1], "kwargs": {"x": None}, "send": "payload"}},
        {"type": "VIRAL_COPY", "queue": "bullmq://text-queue"},
        {"id": "c", "queue": "celery://t?queue=q"},
    )
    again = parse_pipeline(msgspec.json.decode(msgspec.json.encode(pipeline_document(definition))))
    assert again == definition


@pytest.mark.parametrize(
    ("step", "field", "said"),
    [
        ({"celery": "tasks.add"}, "celery", "must be an object"),
        ({"id": "a", "celery": {}}, "celery.task", "must name the task"),
        ({"id": "a", "celery": {"task": "t", "tsk": 1}}, "celery.tsk", "is not a known key; did you mean 'task'?"),
        ({"id": "a", "celery": {"task": "t", "args": {}}}, "celery.args", "must be a list"),
        ({"id": "a", "celery": {"task": "t", "kwargs": []}}, "celery.kwargs", "must be an object"),
        ({"id": "a", "celery": {"task": "t", "args": [{1: 2}]}}, "celery.args", "must hold nothing but texts"),
        ({"id": "a", "bullmq": {"queue": "q", "attempts": True}}, "bullmq.attempts", "from 1 to 1000"),
        ({"id": "a", "bullmq": {"queue": 5}}, "bullmq.queue", "must name the queue"),
        ({"id": "a", "queue": "q", "celery": {"task": "t"}}, "(a)", "has celery and queue; a step goes to one place"),
        ({"id": "a", "queue": "kafka://x"}, "queue", "unknown scheme"),
        ({"id": "a", "queue": "ponte-bullmq"}, "queue", "a bridge's own queue"),
    ],
)
def test_a_bad_step_is_reported_with_its_field(step: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(InvalidPipeline) as refusal:
        parsed(step)
    assert any(field in fault.field and said in fault.problem for fault in refusal.value.faults), refusal.value.faults
