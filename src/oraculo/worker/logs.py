"""The worker's log: a line that cannot be written costs nothing but itself."""

import sys
import time
import traceback
from contextlib import suppress
from typing import Any

import structlog

from oraculo.core.repeats import Repeats

_log = structlog.get_logger("oraculo.worker")


class WorkerLog:
    """Speaks as structlog does. It raises nothing: a log that is full, closed or of an encoding without the letter must
    not cost an answer, nor stop what keeps the worker alive. What it cannot write goes to stderr, in ASCII.

    Where nobody has set structlog up, tracebacks are Python's own: structlog's show what variables hold, passwords
    too, and each keeps the event loop for a quarter of a second."""

    def __init__(self, **named: object) -> None:
        self._named = named

    def bind(self, **named: object) -> "WorkerLog":
        return WorkerLog(**self._named | named)

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", event, fields)

    def critical(self, event: str, **fields: object) -> None:
        self._write("critical", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            if not structlog.is_configured() and isinstance(error := fields.get("exc_info"), BaseException):
                fields = fields | {"exc_info": None, "exception": "".join(traceback.format_exception(error))}
            getattr(_log, level)(event, **self._named | fields)
        except Exception as error:  # noqa: BLE001 - processors and streams are the user's, and may raise anything
            with suppress(Exception):
                told = f"oraculo: {level}: {event} {self._named | fields} (the log failed: {error})"
                print(told.encode("ascii", "backslashreplace").decode(), file=sys.stderr)


class TroubleLog:
    """Of what is seen to, and may come again every moment: the same is told once a minute, with how often it was."""

    def __init__(self) -> None:
        self._log = WorkerLog()
        self._repeats = Repeats()

    def warning(self, event: str, error: Exception, **fields: object) -> None:
        reason = str(error)
        if times := self._repeats.times((event, reason), time.monotonic()):
            self._log.warning(event, **fields, reason=reason, **{"times": times} if times > 1 else {})

    def of_queue(self, queue: str, what: str, error: Exception) -> None:
        self.warning(what, error, queue=queue)
