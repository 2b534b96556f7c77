"""The how-to pages are true: their code compiles, their commands, settings and metrics exist, and their workers run."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from oraculo.cli.app import app
from oraculo.pipeline.text import read_pipeline
from oraculo.settings.loading import _NOT_SETTINGS, _VARIABLES
from oraculo.stores.objects import FolderObjects
from oraculo.testing.harness import Harness
from tests.test_examples import SETTINGS, code_of, module
from tests.waiting import until

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/how-to").glob("*.md"))
METRICS = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = typer.main.get_command(app)
ENDS = {"|", "&", "&&", ";", ">", "2>&1"}  # of a command in a line of the shell
on_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, *kinds: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text("utf-8")) if kind in kinds]


def shell(page: Path) -> str:
    """Return what a page lets its reader type, without what it prints."""
    typed = "".join(blocks(page, "sh"))
    for session in blocks(page, "console"):
        commands = re.findall(r"^\$ (.*\n(?:(?: {2,}|done).*\n)*)", session, re.MULTILINE)
        typed += "".join(commands)
    return typed


def oraculo_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each `oraculo …` in the page's blocks and sentences."""
    lines = [
        *shell(page).replace("\\\n", " ").splitlines(),
        *re.findall(r"`(oraculo [a-z][^`]*)`", page.read_text("utf-8")),
    ]
    for line in lines:
        for found in re.finditer(r"(?:^|[(|] *|[A-Z_]+=\S* )oraculo(?= [a-z])", re.sub(r"\s# .*", "", line)):
            words = shlex.split(line[found.end() :].split("|")[0].replace("$(", " "), comments=True)
            yield words[: min((words.index(end) for end in ENDS if end in words), default=len(words))]


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command, and the words behind its name."""
    command: Any = COMMANDS
    while words and (commands := getattr(command, "commands", None)):
        assert words[0] in commands, f"oraculo has no command {words[0]!r}"
        command, words = commands[words[0]], words[1:]
    return command, words


# -- code and data ----------------------------------------------------------------------------------------------


@on_each_page
def test_the_code_of_a_page_is_valid(page: Path) -> None:
    for body in blocks(page, "python"):
        ast.parse(body)
    for body in blocks(page, "toml"):
        tomllib.loads(body)
    for body in blocks(page, "json"):
        if "…" not in body:
            json.loads(body)
    for body in blocks(page, "yaml"):
        if "steps" in yaml.safe_load(body):
            read_pipeline(body.encode())


@on_each_page
def test_what_a_page_lets_you_type_is_a_script(page: Path) -> None:
    done = subprocess.run(["bash", "-n"], input=shell(page), text=True, capture_output=True, check=False)
    assert not done.stderr


@on_each_page
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for words in oraculo_commands(page):
        command, rest = resolved(words)
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        takes_more = command.context_settings.get("ignore_unknown_options", False)
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert takes_more or given <= known | {"--help"}, words


@on_each_page
def test_the_settings_and_metrics_of_a_page_exist(page: Path) -> None:
    text = page.read_text("utf-8").replace("ORACULO_BROKR_URL", "")  # a mistake that a page shows
    unknown = {name for name in re.findall(r"ORACULO_[A-Z_]+", text) if name not in _VARIABLES}
    assert [name for name in unknown if not _NOT_SETTINGS.fullmatch(name)] == []
    assert [name for name in re.findall(r"`(oraculo_\w+)[`{]", text) if f"`{name}`" not in METRICS] == []


@on_each_page
def test_a_page_shows_code_before_it_explains(page: Path) -> None:
    before, _, _ = page.read_text("utf-8").partition("```")
    assert len(before.split()) <= 70


# -- workers ----------------------------------------------------------------------------------------------------


def test_the_tests_on_the_page_about_tests_pass(tmp_path: Path) -> None:
    for name, text in (*code_of("docs/how-to/worker-python.md"), *code_of("docs/how-to/test-a-worker.md")):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


async def test_the_sdk_checks_a_payload_as_the_page_says() -> None:
    page = "docs/how-to/worker-python.md"
    reports = module(dict(code_of(page))["relatorios.py"])
    async with Harness(reports.app, settings=SETTINGS) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_relatorio"]})
    assert aggregate["falhas"]["executador_relatorio"]["motivo"] in (ROOT / page).read_text("utf-8")


async def test_the_pipeline_of_the_page_about_retries_ends_as_it_says() -> None:
    files = dict(code_of("docs/how-to/retries-deadlines-quorum.md"))
    pipeline = files["anuncio.yaml"].replace("timeout: 2 ", "timeout: 0.2")
    async with Harness(module(files["oficina.py"]).app, settings=SETTINGS) as oraculo:
        await oraculo.operations.put_pipeline("anuncio", pipeline.replace("backoff: 2", "backoff: 0.01").encode())
        aggregate = await oraculo.run({"pipeline": "anuncio"})
    assert aggregate["status"] == "parcial"
    assert aggregate["falhas"].keys() == {"texto"}


async def test_a_quorum_and_a_late_answer_are_as_the_page_says() -> None:
    files = dict(code_of("docs/how-to/retries-deadlines-quorum.md"))
    prices = files["precos.py"].replace("sleep(2.5)", "sleep(0.6)")
    async with Harness(module(prices).app, settings=SETTINGS) as oraculo:
        queues = ["escavador_a", "escavador_b", "escavador_c"]
        aggregate = await oraculo.run({"destinos": queues, "quorum": 2, "timeout": 30})
        assert aggregate["falhas"].keys() == {"escavador_b"}
        late = files["cotacao.yaml"].replace("timeout: 2", "timeout: 0.3")
        await oraculo.operations.put_pipeline("cotacao", late.encode())
        run_id = await oraculo.submit({"pipeline": "cotacao"})
        aggregate = await oraculo.ended(run_id)
        assert aggregate["falhas"].keys() == {"loja_b"}

        async def is_amended() -> bool:
            return (await oraculo.ended(run_id))["versao"] == 2

        await until(is_amended, saying="the late answer to amend the run")


async def test_a_large_result_reaches_the_next_step(tmp_path: Path) -> None:
    files = dict(code_of("docs/how-to/large-results.md"))
    async with Harness(module(files["grande.py"]).app, objects=FolderObjects(tmp_path)) as oraculo:
        await oraculo.operations.put_pipeline("grande", files["grande.yaml"].encode())
        aggregate = await oraculo.run({"pipeline": "grande"})
    assert aggregate["resultados"]["medida"]["resultado"] == 400_000
