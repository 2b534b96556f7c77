"""Simulated workers fail on purpose, thousands of times: nobody wants to read of it."""

from collections.abc import Iterator

import pytest
import structlog

from oraculo.testing.simulation.campaign import silence_logs


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    before = structlog.get_config()
    silence_logs()
    yield
    structlog.configure(**before)
