"""Structured logs: one JSON object a line with the field names of ECS, or coloured lines on a terminal.

All loggers of structlog and stdlib, uvicorn's included, use the same handler. An event has `correlation_id` when it is
given as a field, in stdlib's `extra`, or bound around a block:

    with structlog.contextvars.bound_contextvars(correlation_id=run_id): ...
"""

import io
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from oraculo.core.log_throttle import LogThrottle
from oraculo.core.run import Channel
from oraculo.ports.telemetry import (
    AnswerTaken,
    BatchCommitted,
    BrokerChanged,
    CommandsPublished,
    CommandsTakenBack,
    ConsumerRebuilt,
    DeadLettered,
    DeliveryAttempted,
    EnginesChanged,
    HistoryAdded,
    LoopFailed,
    PipelineFileMended,
    PipelineFileRejected,
    PublishFailed,
    Record,
    RunFinished,
    RunsPruned,
    StoreBack,
)
from oraculo.settings import LogSettings
from oraculo.telemetry.history_lines import TaskLines, lines_of

LOGGER = "oraculo"
ECS_VERSION = "8.11.0"
_HANDLER = "oraculo"
# Characters of a field. An exception may quote large payloads, and log collectors refuse very long lines.
_LONGEST = 30_000
_UTC_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
_LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR, "critical": CRITICAL}
_LEVEL_NAMES = {level: name for name, level in _LEVELS.items()}

# Loggers whose own handlers are removed, so that a line appears once and in our format.
_OWN_HANDLERS = ("uvicorn", "uvicorn.error", "uvicorn.access")
# Libraries that log each request at `info`.
_CHATTY = ("httpx", "httpx2", "httpcore", "httpcore2", "asyncio")


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Configure the logging of the process, to `stream` or stderr. A second call replaces the first."""
    target = sys.stderr if stream is None else stream
    as_json = settings.format == "json" or (settings.format == "auto" and not target.isatty())
    _install(_handler(target, as_json), _LEVELS[settings.level])
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _handler(stream: TextIO, as_json: bool) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.name = _HANDLER
    rendering = _json_rendering() if as_json else _console_rendering(colours=stream.isatty())
    _Ready.is_expected = as_json
    handler.setFormatter(
        _Formatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), _drop_colours, *_shared()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    return handler


class _Ready(str):
    """A line that is JSON already."""

    __slots__ = ()
    is_expected = False  # True when the process logs JSON


class _Formatter(structlog.stdlib.ProcessorFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return record.msg if type(record.msg) is _Ready else super().format(record)


def _install(handler: logging.Handler, level: int) -> None:
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.name == _HANDLER]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _OWN_HANDLERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)  # ours decides
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, WARNING))


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _drop_colours(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Drop the coloured copy of each message that uvicorn adds."""
    event.pop("color_message", None)
    return event


def _console_rendering(*, colours: bool) -> list[Processor]:
    """Return the processors for a terminal, with Python's own tracebacks.

    rich's, which structlog prefers, show the values of variables, passwords too, and take a quarter of a second each.
    """
    renderer = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=_write_traceback)
    return [_cut_fields, _in_local_time, renderer]


def _in_local_time(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Show moments in local time with its zone; JSON keeps UTC."""
    return {name: _local(value) if isinstance(value, str) else value for name, value in event.items()}


def _local(text: str) -> str:
    if not _UTC_MOMENT.fullmatch(text):
        return text
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _json_rendering() -> list[Processor]:
    return [structlog.processors.format_exc_info, _cut_fields, _name_as_ecs, structlog.processors.JSONRenderer()]


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    written = io.StringIO()
    structlog.dev.plain_traceback(written, error)
    stream.write(_cut(written.getvalue()))


def _cut_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {name: _cut(value) if isinstance(value, str) else value for name, value in event.items()}


def _cut(text: str) -> str:
    """Cut the middle out of a long text: a traceback has its place at the start and its error at the end."""
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"


_ECS_NAMES = {
    "timestamp": "@timestamp",
    "level": "log.level",
    "event": "message",
    "logger": "log.logger",
    "exception": "error.stack_trace",
}


def _name_as_ecs(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Rename the fields, those of every line first, so that people can read JSON lines too."""
    named = {theirs: event.pop(ours) for ours, theirs in _ECS_NAMES.items() if ours in event}
    return {**named, "ecs.version": ECS_VERSION, **event}


_encode = json.JSONEncoder(default=repr).encode


def _named_as_ecs(event: str, level: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON line, in the order that structlog's lines have."""
    at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    head = {"@timestamp": at, "log.level": _LEVEL_NAMES[level], "message": event, "log.logger": LOGGER}
    rest = {name: _cut(value) if isinstance(value, str) else value for name, value in fields.items()}
    return head | {"ecs.version": ECS_VERSION} | rest


# -- records ----------------------------------------------------------------------------------------------------


_Line = tuple[str, int]  # text and level


def _always(event: str, level: int) -> Callable[[Record], _Line]:
    return lambda _record: (event, level)


_STRAY_LEVELS = {"applied": DEBUG, "duplicate": DEBUG, "late": INFO, "unknown": WARNING}
_DELIVERY_LEVELS = {"delivered": INFO, "failed": WARNING, "given_up": ERROR}


def _of_answer(record: AnswerTaken) -> _Line:
    return "answer taken", _STRAY_LEVELS.get(record.verdict, INFO)


def _of_delivery(record: DeliveryAttempted) -> _Line:
    return "delivery attempted", _DELIVERY_LEVELS.get(record.outcome, WARNING)


def _of_broker(record: BrokerChanged) -> _Line:
    return ("a broker is back", WARNING) if record.trouble is None else ("a broker was lost", ERROR)


_LINES: Mapping[type[Record], Callable[[Any], _Line]] = {
    BatchCommitted: _always("batch committed", DEBUG),
    RunFinished: _always("run finished", INFO),
    AnswerTaken: _of_answer,
    CommandsPublished: _always("commands published", DEBUG),
    PublishFailed: _always("publish failed", WARNING),
    DeadLettered: _always("dead-lettered", WARNING),
    DeliveryAttempted: _of_delivery,
    LoopFailed: _always("background duty failed and goes on", ERROR),
    PipelineFileRejected: _always("pipeline file rejected", ERROR),
    PipelineFileMended: _always("pipeline file mended", INFO),
    RunsPruned: _always("runs pruned", INFO),
    EnginesChanged: _always("engines that share the store", INFO),
    ConsumerRebuilt: _always("a consumer was deaf and is made again", ERROR),
    BrokerChanged: _of_broker,
    StoreBack: _always("the store is back", WARNING),
    CommandsTakenBack: _always("what a lost broker took is sent again", WARNING),
}
_UNFORESEEN = _always("something happened", INFO)


def _same_delivery(record: DeliveryAttempted) -> Hashable:
    """Return a key for failures of reply queues, which share the broker. Webhook receivers fail one by one."""
    is_ours = record.channel == Channel.QUEUE and record.outcome == "failed"
    return (DeliveryAttempted, record.reason) if is_ours else None


# The key of records that repeat while a server is away; None when a record is never a repeat.
_SAMENESS: Mapping[type[Record], Callable[[Any], Hashable]] = {
    DeliveryAttempted: _same_delivery,
    LoopFailed: lambda record: (LoopFailed, record.duty, record.reason),
    PublishFailed: lambda record: (PublishFailed, record.reason),
}


class LogSubscriber:
    """The telemetry subscriber that writes log lines."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._repeats = LogThrottle()
        self._task_lines = TaskLines()
        self._logger = logging.getLogger(LOGGER)
        self._log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(LOGGER)

    def __call__(self, record: Record) -> None:
        now = self._now()
        for run_id, counts in self._task_lines.left_out(now):
            self._write_left_out(run_id, counts)
        if type(record) is RunFinished:
            self._write_left_out(record.run_id, self._task_lines.end(record.run_id))
        if type(record) is HistoryAdded:
            self._write_history(record, now)
            return
        event, level = _LINES.get(type(record), _UNFORESEEN)(record)
        if self._logger.isEnabledFor(level) and (times := self._times(record, now)):
            fields = _fields(record)
            if "tarefa" not in fields or self._task_lines.allows(fields["correlation_id"], event, now):
                self._write(level, event, fields | {"times": times} if times > 1 else fields)

    def _write_history(self, record: HistoryAdded, now: float) -> None:
        if not self._logger.isEnabledFor(INFO):
            return
        for event, level, fields in lines_of(record, with_debug=self._logger.isEnabledFor(DEBUG)):
            is_bounded = level >= INFO and "tarefa" in fields
            if not is_bounded or self._task_lines.allows(record.run_id, event, now):
                self._write(level, event, fields)

    def _write_left_out(self, run_id: str, counts: dict[str, int]) -> None:
        if counts:
            self._write(INFO, "lines about tasks were left out", {"correlation_id": run_id, "left_out": counts})

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        """Write one line. JSON is made here: structlog and logging take ten times as long, and every run has two."""
        if not _Ready.is_expected:
            self._log.log(level, event, **fields)
            return
        ready = _Ready(_encode(_named_as_ecs(event, level, fields)))
        self._logger.handle(logging.LogRecord(LOGGER, level, "", 0, ready, (), None))

    def _times(self, record: Record, now: float) -> int:
        """Return the number of records that the line stands for, or 0 for a repeat that is not logged."""
        sameness = _SAMENESS.get(type(record))
        same = None if sameness is None else sameness(record)
        return 1 if same is None else self._repeats.times(same, now)


_NAMES = {"run_id": "correlation_id", "task": "tarefa", "attempt": "tentativa", "queue": "fila"}


def _fields(record: Record) -> dict[str, Any]:
    asked = msgspec.structs.asdict(record).items()
    fields = {_NAMES.get(key, key): value for key, value in asked if value is not None}
    if "seconds" in fields:
        fields["seconds"] = round(fields["seconds"], 6)
    return fields
