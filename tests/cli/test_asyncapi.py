"""`oraculo asyncapi`: from a server, and without one."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oraculo.cli.app import app
from tests.cli.processes import Cli

NOWHERE = "http://127.0.0.1:9"
PIPELINE = "name: meu\nsteps: [{type: fila_nova}]\n"


def asyncapi(*args: str, **env: str) -> Any:
    return CliRunner().invoke(app, ["asyncapi", *args], env=env)


def document(*args: str, **env: str) -> dict[str, Any]:
    result = asyncapi(*args, **env)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def complaint(result: Any) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("oraculo: ")
    return str(line)


def test_without_a_server_it_is_made_of_the_settings_and_what_is_built_in(tmp_path: Path) -> None:
    (tmp_path / "oraculo.toml").write_text('[rotas]\nminha = ["fila_da_rota"]\n')
    made = document(ORACULO_PREFIX="px.", ORACULO_BROKER_URL="amqp://user:segredo@rabbit/v")
    assert made["asyncapi"] == "3.0.0"
    assert made["channels"]["fila_da_rota"]["address"] == "px.fila_da_rota"
    assert {"escavador_youtube", "video-queue"} <= set(made["channels"])
    assert made["servers"]["rabbitmq"]["host"] == "rabbit"
    assert "segredo" not in json.dumps(made)
    assert [path.name for path in tmp_path.iterdir()] == ["oraculo.toml"]  # no store was made for it


def test_a_pipeline_of_the_folder_is_there_and_wins_over_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    assert document(ORACULO_PIPELINES="p") == document()
    (tmp_path / "p" / "meu.yaml").write_text(PIPELINE)
    (tmp_path / "p" / "outro.yaml").write_text("name: voice-over-only\nsteps: [{type: outra_voz}]\n")
    channels = document(ORACULO_PIPELINES="p")["channels"]
    assert "pipeline `meu`" in channels["fila_nova"]["description"]
    assert "`voice-over-only`" in channels["outra_voz"]["description"]
    assert "`voice-over-only`" not in channels["voiceover-queue"]["description"]


def test_it_is_json_whether_asked_for_or_not() -> None:
    assert document("--json") == document()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"ORACULO_API_PORT": "many"}, "ORACULO_API_PORT"),
        ({"ORACULO_PIPELINES": "no-such"}, "no-such"),
        ({"ORACULO_PIPELINES": "p"}, "bad.yaml"),
        ({"ORACULO_URL": NOWHERE}, NOWHERE),
    ],
)
def test_what_is_wrong_is_one_line_and_2(tmp_path: Path, env: dict[str, str], words: str) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "bad.yaml").write_text("name: x\n")
    assert words in complaint(asyncapi(**env))


def test_a_server_that_is_named_is_asked(cli: Cli) -> None:
    ours = document()
    assert document("--url", cli.url) == ours
    assert document(ORACULO_URL=cli.url, ORACULO_PREFIX="px.") == ours  # the server's prefix counts, not ours
