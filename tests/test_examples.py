"""Every example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from oraculo.pipeline.text import read_pipeline

EXAMPLES = Path(__file__).parents[1] / "examples"
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
