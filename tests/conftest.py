"""For all tests: logs are short, because rendering a traceback with its locals costs more than what it tells here; and
how fast a machine makes up examples decides nothing."""

import logging

import structlog
from hypothesis import HealthCheck, settings

structlog.configure(
    processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()],
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
)

settings.register_profile("oraculo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oraculo")
