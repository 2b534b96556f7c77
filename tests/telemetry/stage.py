"""A log that is written to memory, and its lines."""

import io
import json
from typing import Any, Literal

from oraculo.settings import LogSettings
from oraculo.telemetry.logs import configure_logging


def configured(
    level: Literal["debug", "info", "warning"] = "debug", layout: Literal["auto", "json", "console"] = "json"
) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(LogSettings(level=level, format=layout), stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]
