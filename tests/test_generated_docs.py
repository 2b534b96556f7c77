"""The files made from the code are fresh, and the published schema accepts and refuses what the code does."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from scripts import generate_docs as script
from scripts import state_machine_page as drawing
from scripts.layers_drawing import layers_picture
from scripts.settings_page import settings_page

from oraculo.core.run import TaskStatus
from oraculo.core.transitions import RUN_TRANSITIONS, TASK_TRANSITIONS, Trigger
from oraculo.errors import InvalidMessage
from oraculo.settings import load_settings
from oraculo.wire.message import decode_message

ROOT = script.ROOT
schema = json.loads((ROOT / "mensagem_schema.json").read_text("utf-8"))
validator = Draft202012Validator(schema)

# -- fresh files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", script.generated())
def test_the_file_is_fresh(path: str) -> None:
    assert (ROOT / path).read_text("utf-8") == script.generated()[path], "run: make docs"


def test_check_names_what_is_stale_and_writing_mends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"], tmp_path) == 1
    assert len(capsys.readouterr().err.splitlines()) == len(script.generated())
    assert script.main([], tmp_path) == 0
    assert script.main(["--check"], tmp_path) == 0
    (tmp_path / "docs/explanation/state-machine.md").write_text("old", "utf-8")
    assert script.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err.startswith("docs/explanation/state-machine.md is stale")


# -- the state machine's page -----------------------------------------------------------------------------------


def test_two_ways_from_one_status_to_another_have_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = {Trigger.SUCCEED: TaskStatus.SUCCEEDED, Trigger.AMEND: TaskStatus.SUCCEEDED}
    monkeypatch.setattr(drawing, "TASK_TRANSITIONS", {TaskStatus.RUNNING: moves})
    page = drawing.state_machine_page()
    assert "| `em_execucao` | answer: success | `concluida` |\n" in page
    assert "| `em_execucao` | late answer with onLate: amend | `concluida` |\n" in page


def arrows(picture: str) -> set[tuple[str, str, str]]:
    return set(re.findall(r"<title>(\w+) → (\w+): (.*?)</title>", drawing.state_machine_pictures()[picture]))


def test_every_transition_is_drawn_and_no_other() -> None:
    tasks = {(a, b, trigger) for a, moves in TASK_TRANSITIONS.items() for trigger, b in moves.items()}
    assert arrows(drawing.TASK_PICTURE) == tasks
    runs = {(a, b, trigger) for a, moves in RUN_TRANSITIONS.items() for trigger, ends in moves.items() for b in ends}
    assert arrows(drawing.RUN_PICTURE) == runs


# -- the other pages --------------------------------------------------------------------------------------------


def test_what_the_page_of_settings_says_unless_set_is_what_is_so(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`ORACULO_.+?) \| (?:`(.+?)`)? \|", settings_page(), re.MULTILINE)
    said = {name: value for names, value in rows for name in re.findall(r"`(\w+)`", names)}
    nothing_set = tmp_path / "oraculo.toml"
    nothing_set.touch()
    assert {"ORACULO_PREFIX", "ORACULO_BROKER_PREFIX", "ORACULO_PIPELINES", "ORACULO_LOG_LEVEL"} <= said.keys()
    assert load_settings(said, nothing_set) == load_settings({}, nothing_set)


def test_the_layers_are_drawn_as_import_linter_holds_them(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        '[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["cli", "api | testing", "core"]\n'
    )
    named = re.findall(r'<(text|tspan) class="name"(?: x="(\S+)" y="(\S+)")?>(.*?)<', layers_picture(pyproject))
    assert [room for _, _, _, room in named] == ["cli", "api", "testing", "core"]
    (api_left, api_top), (testing_left, testing_top) = ((float(x), float(y)) for _, x, y, _ in named[1:3])
    assert api_top == testing_top
    assert api_left < testing_left


def test_a_package_that_the_picture_does_not_describe_is_refused(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text('[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["cli", "novo"]\n')
    with pytest.raises(KeyError, match="novo"):
        layers_picture(pyproject)


# -- the schema -------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "correlation_id": "abc123",
    "tipo_evento": "iniciar_coleta",
    "payload": {"fonte": "youtube", "parametros": {"canal": "canal_exemplo", "periodo": "2025-10"}},
    "timestamp": "2025-10-14T12:00:00Z",
}
EXAMPLES = [
    GOOD,
    GOOD | {"payload": {"fonte": "youtube", "parametros": {}}},
    GOOD | {"payload": {"fonte": "youtube", "parametros": {"canal": "canal_exemplo"}}},
    {
        "correlation_id": "abc123",
        "tipo_evento": "resultado_execucao",
        "payload": {"resultado": "ok", "arquivo": "relatorio.pdf"},
        "timestamp": "2025-10-14T12:05:00Z",
    },
    GOOD | {"correlation_id": "123e4567-e89b-12d3-a456-426614174000", "payload": {"param": "valor"}},
]
FULL = GOOD | {
    "tarefa": "escavador_youtube",
    "tentativa": 1,
    "responder_em": "resultados",
    "prazo": "2025-10-14T12:05:00+00:00",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "campo_desconhecido": [1, 2],
}
BAD = [
    *({key: value for key, value in GOOD.items() if key != missing} for missing in GOOD),
    GOOD | {"correlation_id": ""},
    GOOD | {"correlation_id": "x" * 129},
    GOOD | {"correlation_id": 7},
    GOOD | {"tipo_evento": None},
    GOOD | {"payload": []},
    GOOD | {"payload": "texto"},
    GOOD | {"timestamp": 1760443200},
    GOOD | {"tarefa": 1},
    GOOD | {"tentativa": 0},
    GOOD | {"tentativa": "1"},
    GOOD | {"responder_em": {}},
]


def test_the_schema_is_itself_valid_and_of_2020_12() -> None:
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_package_ships_the_same_schema() -> None:
    assert json.loads((files("oraculo") / "mensagem_schema.json").read_text("utf-8")) == schema


@pytest.mark.parametrize("message", [*EXAMPLES, FULL])
def test_schema_and_code_accept(message: dict[str, Any]) -> None:
    validator.validate(message)
    assert decode_message(json.dumps(message).encode()).correlation_id == message["correlation_id"]


@pytest.mark.parametrize("message", BAD)
def test_schema_and_code_refuse(message: dict[str, Any]) -> None:
    assert not validator.is_valid(message)
    with pytest.raises(InvalidMessage):
        decode_message(json.dumps(message).encode())
