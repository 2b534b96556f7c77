import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import Cli, Process

QUICK = {"ORACULO_RUNS_BACKOFF": "0.01", "ORACULO_RUNS_MAX_BACKOFF": "0.05", "ORACULO_ENGINE_POLL": "0.1"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but those of the test, and no files but its own."""
    for name in [name for name in os.environ if name.startswith("ORACULO_") and not name.startswith("ORACULO_TEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _logging_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is begun in this process must not take over the logging of all tests after it."""
    monkeypatch.setattr("oraculo.cli.serving.configure_logging", lambda _settings: None)


@pytest.fixture(scope="package")  # no longer: it looks ten times a second for what is due
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """`oraculo dev` with its sample workers, which do not dawdle."""
    process = Process("dev", "--pace", "0.02", cwd=tmp_path_factory.mktemp("dev"), env=QUICK)
    try:
        process.says("dead letter")  # the last of the sample runs
        yield process
    finally:
        process.end()


@pytest.fixture
def cli(dev: Process) -> Cli:
    return Cli(dev.url)
