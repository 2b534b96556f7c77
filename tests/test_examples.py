"""Every example runs: the files in examples/, and the code in the README, the tutorial and the page of the SDK."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from oraculo.pipeline.text import read_pipeline
from oraculo.settings import RunSettings, Settings
from oraculo.testing.harness import Harness

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NO_EXAMPLES = {"README.md", "__pycache__", "node_modules"}


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_pipeline_is_valid(path: Path) -> None:
    assert read_pipeline(path.read_bytes()).name == path.stem


def test_every_example_is_told_of() -> None:
    told = (EXAMPLES / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)]+)\)", told))
    examples = {path for folder in (EXAMPLES, EXAMPLES / "plain_workers") for path in folder.iterdir()}
    names = {path.relative_to(EXAMPLES).as_posix() for path in examples if path.name not in NO_EXAMPLES}
    assert names - {name.rstrip("/") for name in linked} == {"plain_workers"}, "each of these is linked by itself"


# -- code in the docs -------------------------------------------------------------------------------------------

SETTINGS = Settings(runs=RunSettings(backoff=0.01))
TITLED = re.compile(r'^```\w+ title="(.+?)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def code_of(page: str) -> list[tuple[str, str]]:
    """Return the name and text of each file that a page shows."""
    return TITLED.findall((ROOT / page).read_text("utf-8"))


def module(text: str) -> Any:
    made = ModuleType("shown")
    exec(compile(text, "shown.py", "exec"), made.__dict__)
    return made


@pytest.mark.parametrize("page", ["README.md", "README.pt-BR.md"])
async def test_the_readme_runs(page: str) -> None:
    files = dict(code_of(page))
    pipeline = files["report.yaml"].replace("timeout: 5", "timeout: 0.1")
    async with Harness(module(files["workers.py"]).app, settings=SETTINGS) as oraculo:
        await oraculo.operations.put_pipeline("report", pipeline.encode())
        aggregate = await oraculo.run({"pipeline": "report"})
    assert aggregate["status"] == "parcial"
    assert aggregate["resultados"]["report"]["resultado"] == {"arquivo": "report.pdf", "posts": 2}
    assert aggregate["falhas"].keys() == {"translation"}


@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/tutorial.pt-BR.md"])
async def test_the_tutorial_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (_, first), (_, pipeline), (_, second) = code_of(page)
    posts = tmp_path / "blog.txt"
    posts.write_text("Aurora opens\nCoffee for two\n")
    async with Harness(module(first).app) as oraculo:
        aggregate = await oraculo.run({"destinos": ["escavador_blog"]})
    assert aggregate["resultados"]["escavador_blog"]["dados"] == ["Aurora opens", "Coffee for two"]

    posts.rename(tmp_path / "drafts.txt")
    workers = module(second)
    workers.asyncio = SimpleNamespace(sleep=lambda _: asyncio.sleep(0))
    async with Harness(workers.app, settings=SETTINGS) as oraculo:
        await oraculo.operations.put_pipeline("report", pipeline.encode())
        run = await oraculo.submit({"pipeline": "report"})
        aggregate = await oraculo.ended(run)
        assert aggregate["status"] == "erro"
        assert aggregate["falhas"].keys() == {"blog", "report"}
        (tmp_path / "drafts.txt").rename(posts)
        assert (await oraculo.operations.redrive("escavador_blog")).reopened == 1
        aggregate = await oraculo.ended(run)
    assert aggregate["status"] == "concluida"
    assert aggregate["resultados"]["report"]["resultado"]["titulos"][-1] == "Aurora in eight minutes"


@pytest.mark.parametrize("page", ["docs/index.md", "docs/index.pt-BR.md"])
def test_the_first_page_prints_what_it_says(page: str, tmp_path: Path) -> None:
    ((name, text),) = code_of(page)
    (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in (ROOT / page).read_text("utf-8").splitlines()


async def test_the_page_of_the_sdk_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = dict(code_of("docs/reference/sdk.md"))
    workers = module(files["workers.py"])
    monkeypatch.setattr(asyncio, "run", lambda coroutine: coroutine.close())
    client = module(files["ask.py"])
    async with Harness(workers.app, settings=SETTINGS) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_relatorio"], "payload": {"titulo": "aurora"}})
        assert aggregate["resultados"]["executador_relatorio"]["arquivo"] == "aurora.pdf"
        client.make_broker = lambda *_: oraculo.broker
        await client.main()
    assert capsys.readouterr().out.endswith("erro {}\n"), "the request names no canal"
