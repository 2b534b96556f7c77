"""For all tests: logs are short, because rendering a traceback with its locals costs more than what it tells here; and
how fast a machine makes up examples decides nothing."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.servers.fleet import Fleet

structlog.configure(
    processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()],
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
)

settings.register_profile("oraculo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oraculo")

_fleet = Fleet()


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The real brokers."""
    yield _fleet
    _fleet.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in sorted(_fleet.skipped):
        terminalreporter.write_line(f"NOT TESTED: {name} was left out by ORACULO_TEST_SKIP", yellow=True)
