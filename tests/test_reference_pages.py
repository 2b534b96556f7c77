"""The pages of docs/reference that are written by hand leave out nothing that the code has."""

import json
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from oraculo.api.problems import _KINDS
from oraculo.api.schemas import COMPONENTS
from oraculo.core.history import Happened
from oraculo.pipeline.bridges import _BLOCK_KEYS
from oraculo.pipeline.definition import _PIPELINE_KEYS, _RETRY_KEYS, _STEP_KEYS, JOB_TYPES
from oraculo.wire import naming
from oraculo.wire.message import Message

from .api.service import running

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    """Return a page without its blocks of code."""
    text = (ROOT / "docs" / "reference" / f"{name}.md").read_text("utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def section(text: str, heading: str) -> str:
    return re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of its tables, without their heads."""
    return [line.split(" | ") for line in re.findall(r"^\| (.*) \|$(?!\n\|-)", text, re.MULTILINE)]


def names(cells: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cells))


def first_cells(text: str) -> set[str]:
    return {name for cells in rows(text) for name in names(cells[0])}


# -- HTTP ---------------------------------------------------------------------------------------------------------


async def test_the_page_of_http_has_every_call_parameter_and_header(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        document = (await service.client.get("/openapi.json")).text.replace("{correlation_id}", "{id}")
    paths: dict[str, Any] = json.loads(document)["paths"]
    text = page("http")
    operations = {
        f"{method.upper()} {path}": operation for path, calls in paths.items() for method, operation in calls.items()
    }
    assert first_cells(section(text, "Calls")) == operations.keys()
    asked = {
        (given["in"], given["name"]) for operation in operations.values() for given in operation.get("parameters", ())
    }
    said = {name.partition("=")[0].removesuffix(": wait") for name in names(text)}
    assert {name for place, name in asked if place != "path"} <= said


def test_the_page_of_http_has_every_field_of_requests_and_answers() -> None:
    text = page("http")
    fields = {
        field
        for schema in ("Pedido", "Aceita", "Agregado", "Resumo", "Links", "Orquestracao", "Filas", "Prontidao")
        for field in _fields(COMPONENTS[schema])
    }
    fields |= {field for schema in ("CartasMortas", "Reenvio", "Pipelines") for field in _fields(COMPONENTS[schema])}
    said = {word for name in names(text) for word in re.findall(r"\w+", name)}
    assert fields <= said


def _fields(schema: dict[str, Any]) -> set[str]:
    below = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    below += [schema["items"]] if "items" in schema else []
    return {*schema.get("properties", {}), *(field for each in below for field in _fields(each))}


def test_the_page_of_problems_has_every_type_with_its_status() -> None:
    code = "".join(path.read_text("utf-8") for path in (ROOT / "src" / "oraculo" / "api").rglob("*.py"))
    statuses = {int(status) for status in re.findall(r"(?:HTTPException|refuse)\((\d{3})", code)}
    raised = {(HTTPStatus(status).phrase.lower().replace(" ", "-"), status) for status in {*statuses, 405}}
    kinds = {(slug, status) for _, status, slug, _ in _KINDS}
    said = {(cells[0].strip("`"), int(cells[1])) for cells in rows(page("problem-types")) if cells[1].isdigit()}
    assert said == raised | kinds | {("service-unavailable", 503), ("no-thread", 503)}


# -- messages, pipelines, history -------------------------------------------------------------------------------------


def test_the_page_of_messages_has_every_field_and_event() -> None:
    text = page("messages")
    assert first_cells(section(text, "Fields")) == {field.name for field in msgspec.structs.fields(Message)}
    events = {*naming.COMMAND_EVENTS, *naming.ANSWER_EVENTS, naming.START_RUN, naming.PROGRESS, naming.RUN_ENDED}
    assert first_cells(section(text, "Events")) == events


def test_the_page_of_pipelines_has_every_field() -> None:
    text = page("pipelines")
    assert first_cells(section(text, "Fields of the pipeline")) == {*_PIPELINE_KEYS, "record", "amend"}
    assert first_cells(section(text, "Fields of a step")) == _STEP_KEYS
    assert first_cells(section(text, "retry")) == _RETRY_KEYS
    for kind, keys in _BLOCK_KEYS.items():
        assert first_cells(section(text, kind)) == keys
    assert {cells[0].strip("`"): cells[1].strip("`") for cells in rows(section(text, "Job types"))} == JOB_TYPES
    built_in = {path.stem for path in (ROOT / "src" / "oraculo" / "pipelines").glob("*.yaml")}
    assert built_in <= names(section(text, "Job types"))


def test_the_page_of_history_has_every_event() -> None:
    text = page("history-events")
    kinds = ("Events of the run", "Events of a task", "Events of a delivery")
    assert {name for kind in kinds for name in first_cells(section(text, kind))} == set(Happened)
