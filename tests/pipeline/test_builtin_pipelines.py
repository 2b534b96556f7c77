"""The pipelines that come with the package: those of the videos, and collect-then-execute."""

from importlib.resources import files

import pytest

from oraculo.pipeline.definition import JOB_TYPES, Definition
from oraculo.pipeline.retry import DEFAULT_RETRY
from oraculo.pipeline.text import read_pipeline

Graph = dict[str, set[str]]

# step → every result that it receives
GRAPHS: dict[str, Graph] = {
    "enhanced-images-only": {"ENHANCED_IMAGES": set()},
    "viral-copy-only": {"VIRAL_COPY": set()},
    "voice-over-only": {"VIRAL_COPY": set(), "VOICE_OVER": {"VIRAL_COPY"}},
    "promotional-video-basic": {"ENHANCED_IMAGES": set(), "PROMOTIONAL_VIDEO": {"ENHANCED_IMAGES"}},
    "promotional-video-with-text": {
        "ENHANCED_IMAGES": set(),
        "VIRAL_COPY": set(),
        "PROMOTIONAL_VIDEO": {"ENHANCED_IMAGES", "VIRAL_COPY"},
    },
    "promotional-video-with-voiceover": {
        "ENHANCED_IMAGES": set(),
        "VIRAL_COPY": set(),
        "VOICE_OVER": {"VIRAL_COPY"},
        "PROMOTIONAL_VIDEO": {"ENHANCED_IMAGES", "VIRAL_COPY", "VOICE_OVER"},
    },
    "promotional-video-full": {
        "ENHANCED_IMAGES": set(),
        "VIRAL_COPY": set(),
        "VOICE_OVER": {"VIRAL_COPY"},
        "CAPTIONS": {"VOICE_OVER"},
        "PROMOTIONAL_VIDEO": {"ENHANCED_IMAGES", "VIRAL_COPY", "VOICE_OVER", "CAPTIONS"},
    },
    "coleta-execucao": {
        "escavador_youtube": set(),
        "escavador_blog": set(),
        "executador_relatorio": {"escavador_youtube", "escavador_blog"},
    },
}
FOLDER = files("oraculo") / "pipelines"


def built_in(name: str) -> Definition:
    return read_pipeline((FOLDER / f"{name}.yaml").read_bytes(), name=name)


def test_exactly_the_expected_ones_are_shipped() -> None:
    assert {file.name for file in FOLDER.iterdir() if file.name.endswith(".yaml")} == {
        f"{name}.yaml" for name in GRAPHS
    }


@pytest.mark.parametrize("name", GRAPHS)
def test_it_has_the_graph_of_the_seed(name: str) -> None:
    assert {step.id: set(step.depends_on) for step in built_in(name).steps} == GRAPHS[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_each_step_goes_to_the_queue_of_its_job_type(name: str) -> None:
    for step in built_in(name).steps:
        assert step.queue == JOB_TYPES.get(step.type, step.type)
        assert step.retry == DEFAULT_RETRY


@pytest.mark.parametrize("name", GRAPHS)
def test_a_video_receives_everything_that_was_made_for_it(name: str) -> None:
    steps = built_in(name).steps
    for step in steps:
        if step.type == "PROMOTIONAL_VIDEO":
            assert set(step.depends_on) == {other.id for other in steps} - {step.id}


@pytest.mark.parametrize("name", GRAPHS)
def test_it_says_what_it_is_for(name: str) -> None:
    assert built_in(name).description.endswith(".")
