"""The worker's log: a line that cannot be written costs nothing but itself."""

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


_MOST_TOLD = 20  # exceptions of one failure that are looked at: enough to tell it from another


class FailureLog:
    """Of what handlers raise. Where all attempts fail, their traces would take more of the event loop than the attempts
    themselves: that of the same failure is written once a minute, and none of one that was raised on purpose."""

    def __init__(self) -> None:
        self._repeats = LogThrottle()

    def tell(self, log: WorkerLog, handler: str, error: BaseException, reason: str, *, on_purpose: bool) -> None:
        if on_purpose:
            log.error("handler failed", handler=handler, reason=shortened(reason))
            return
        same = handler, *map(_way, _story(error))
        if times := self._repeats.times(same, time.monotonic()):
            log.error("handler failed", handler=handler, exc_info=error, **_often(times))
        else:
            log.error("handler failed", handler=handler, reason=shortened(reason))


def _story(error: BaseException) -> list[BaseException]:
    """It, and what its trace tells of besides: what it came of, and the members of a group."""
    told, rest = list[BaseException](), [error]
    while rest and len(told) < _MOST_TOLD:
        each = rest.pop()
        if all(each is not other for other in told):  # whatever a handler's own class says of equality
            told.append(each)
            rest += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            rest += filter(None, (each.__cause__, None if each.__suppress_context__ else each.__context__))
    return told


def _way(error: BaseException) -> tuple[type, int]:
    """By which lines it came, in short."""
    return type(error), hash(tuple((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)))


def _often(times: int) -> dict[str, int]:
    return {"times": times} if times > 1 else {}


class TroubleLog:
    """Of what is seen to, and may come again every moment: the same is told once a minute, with how often it was."""

    def __init__(self) -> None:
        self._log = WorkerLog()
        self._repeats = LogThrottle()

    def warning(self, event: str, error: Exception, **fields: object) -> None:
        reason = str(error)
        if times := self._repeats.times((event, reason), time.monotonic()):
            self._log.warning(event, **fields, reason=reason, **_often(times))

    def of_queue(self, queue: str, what: str, error: Exception) -> None:
        self.warning(what, error, queue=queue)
