"""Each test leaves the process's logging as it was."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from oraculo.telemetry import logs

TOUCHED = ("", *logs._OWN_HANDLERS, *logs._CHATTY)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in TOUCHED]
    handlers = list(logging.getLogger().handlers)
    yield
    for logger, level in before:
        logger.setLevel(level)
    logging.getLogger().handlers[:] = handlers
    structlog.reset_defaults()
    logs._Ready.is_expected = False
