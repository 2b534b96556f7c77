"""For all tests: logs are short, because rendering a traceback with its locals costs more than what it tells here; and
how fast a machine makes up examples decides nothing."""

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.servers.fleet import Fleet

_configure = structlog.configure


def _configure_without_cache(**given: Any) -> None:
    """A logger that is cached would write to the streams of the first test for ever, and later ones hear nothing."""
    _configure(**given | {"cache_logger_on_first_use": False})


def _short_logs() -> None:
    _configure(
        processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(),
    )


gc.set_threshold(20_000, 20, 20)  # as in a process that serves: a twentieth of the time
structlog.configure = _configure_without_cache
_short_logs()

settings.register_profile("oraculo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oraculo")

_TOGETHER = "ORACULO_TEST_TOGETHER"  # the folder of the servers that all processes of this run share
_is_first = _TOGETHER not in os.environ
_together = Path(os.environ.setdefault(_TOGETHER, tempfile.mkdtemp(prefix="oraculo-together-") if _is_first else ""))
_fleet = Fleet(_together)
_SKIPPED = "oraculo_skipped"  # what a process of a parallel run tells the one that prints the summary


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """What a test plays in its own process sets up the logs of that process, and a simulation puts them out."""
    yield
    _short_logs()


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The real servers: each process of a parallel run has its own, but for those that take long to start."""
    yield _fleet
    _fleet.stop()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_on_shared_servers() -> Iterator[None]:
    yield
    _fleet.end_module()


def pytest_unconfigure() -> None:
    if _is_first:  # the processes that it started are gone
        _fleet.stop_together()
        shutil.rmtree(_together, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_SKIPPED] = dict(_fleet.skipped)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _fleet.skipped.update(getattr(node, "workeroutput", {}).get(_SKIPPED, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seed = terminalreporter.config.getoption("randomly_seed", None)
    if seed is not None and (terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")):
        terminalreporter.write_line(f'the same order again: make test ARGS="-p randomly --randomly-seed={seed}"')
    for name, reason in sorted(_fleet.skipped.items()):
        terminalreporter.write_line(f"NOT TESTED: {name}: {reason}", yellow=True)
