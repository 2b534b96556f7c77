"""The worker's log, which never raises, and its limits for repeated lines."""

import sys
import time
import traceback
from contextlib import suppress
from typing import Any

import structlog

from oraculo.core.log_throttle import LogThrottle
from oraculo.wire.naming import shortened

_log = structlog.get_logger("oraculo.worker")


class WorkerLog:
    """A logger with structlog's methods that never raises: a full disk or a closed log must not cost an answer.

    A line that it cannot write goes to stderr, in ASCII. Where structlog is not configured, tracebacks are Python's
    own. structlog's show the values of variables, passwords too, and take a quarter of a second each.
    """

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
                line = f"oraculo: {level}: {event} {self._named | fields} (the log failed: {error})"
                print(line.encode("ascii", "backslashreplace").decode(), file=sys.stderr)


class FailureLog:
    """The log of what handlers raise. The traceback of the same failure is written once a minute; of DoNotRetry none.

    Where all attempts fail, formatting every traceback would take longer than the attempts.
    """

    def __init__(self) -> None:
        self._repeats = LogThrottle()

    def log(self, log: WorkerLog, handler: str, error: BaseException, reason: str, *, on_purpose: bool) -> None:
        if on_purpose:
            log.error("handler failed", handler=handler, reason=shortened(reason))
            return
        # The lines of code that raised it. A cause further back does not count.
        same = handler, type(error), *((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__))
        if times := self._repeats.times(same, time.monotonic()):
            log.error("handler failed", handler=handler, exc_info=error, **_often(times))
        else:
            log.error("handler failed", handler=handler, reason=shortened(reason))


def _often(times: int) -> dict[str, int]:
    return {"times": times} if times > 1 else {}


class TroubleLog:
    """The log of faults that the worker retries. The same fault is written once a minute, with its count."""

    def __init__(self) -> None:
        self._log = WorkerLog()
        self._repeats = LogThrottle()

    def warning(self, event: str, error: Exception, **fields: object) -> None:
        reason = str(error)
        if times := self._repeats.times((event, reason), time.monotonic()):
            self._log.warning(event, **fields, reason=reason, **_often(times))

    def of_queue(self, queue: str, what: str, error: Exception) -> None:
        self.warning(what, error, queue=queue)
