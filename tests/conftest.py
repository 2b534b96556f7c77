"""For all tests: logs are short, because rendering a traceback with its locals costs more than what it tells here."""

import logging

import structlog

structlog.configure(
    processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()],
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
)
