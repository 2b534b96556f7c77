"""Whoever unpacks the source distribution can do there what this repository's Makefile does."""

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_source_distribution_has_what_make_test_needs(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "pyproject.toml", "requirements/run.txt", "requirements/dev.txt", "README.pt-BR.md"}
    assert needed <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").glob("*") if path.is_file()} <= names
