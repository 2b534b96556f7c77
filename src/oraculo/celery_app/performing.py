"""One command worked on in Celery's pool: read, call the handler, publish the answer. Celery acks it after that."""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import structlog
from celery.exceptions import Reject, SoftTimeLimitExceeded

from oraculo.bootstrap import make_objects
from oraculo.celery_app.publishing import Publisher
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings, ObjectsError
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import Clock
from oraculo.settings import Settings
from oraculo.wire.answers import NOT_IN_TIME, AnswerWriter, Refusal, describe
from oraculo.wire.message import Message, decode_message
from oraculo.wire.naming import QueueNames
from oraculo.wire.timestamps import from_iso
from oraculo.worker import Context
from oraculo.worker.answers import answered_failure, as_answer, failure_of
from oraculo.worker.dispatch import DEADLINE_GRACE, TOO_LATE
from oraculo.worker.handlers import Handler, payload_fault
from oraculo.worker.large_results import LargeAnswers
from oraculo.worker.outbox import PROGRESS_INTERVAL

_log = structlog.get_logger("oraculo.celery")


class HandlerFailed(Exception):
    """So that Celery's log, its events and Flower say so too; the orchestrator has been told."""


class _Answer(NamedTuple):
    body: bytes
    failure: str | None = None  # why it is one, if it is


class Performer:
    """What the Celery task of one handler does. It is made before the pool forks, and connects in each process."""

    def __init__(self, handler: Handler, publisher: Publisher, settings: Settings, clock: Clock) -> None:
        self.handler = handler
        self._publisher = publisher
        self._settings = settings
        self.clock = clock
        names = QueueNames(settings.broker.prefix)
        self._queue = names.physical(handler.queue)
        self._writer = AnswerWriter(clock, names)
        self._own = threading.local()

    def perform(self, text: str) -> str:
        """Returns what Flower shows; raises HandlerFailed once the failure was told. A command whose answer cannot be
        published is given back."""
        command = decode_message(text.encode())
        context = self._context(command)
        answer: _Answer | None = None
        try:
            answer = self._answer(command, context)
            with contextlib.suppress(BrokerError, InvalidSettings):
                context.flush()
            self._reply(text, command, answer.body)
        except SoftTimeLimitExceeded as error:  # it comes once, wherever the task is just then
            answer = answer or self._out_of_time(command, context, error)
            self._reply(text, command, answer.body)
        if answer.failure is not None:
            raise HandlerFailed(answer.failure)
        return f"answered {command.correlation_id}"

    def refuse(self, text: str, reason: str, *, retry: bool) -> None:
        """For a command whose process was ended from outside. Raises Reject when nobody can be told."""
        command = decode_message(text.encode())
        self._reply(text, command, self._failed(command, reason, retry=retry).body)

    def _reply(self, text: str, command: Message, body: bytes) -> None:
        """Returns once it is confirmed; else the command is given back, to be answered by whoever can."""
        try:
            self._publish_answer(text, command, body)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            _log.warning("an answer could not be published", queue=self.handler.queue, reason=describe(error))
            raise Reject(describe(error), requeue=True) from error

    def _publish_answer(self, text: str, command: Message, body: bytes) -> None:
        refusal = self._refusal_of(command, body)
        if refusal is not None and refusal.stand_in is not None:
            refusal = self._refusal_of(command, refusal.stand_in, stands_in=True)
        if refusal is not None:
            _log.warning("dead-lettered", queue=self._queue, reason=refusal.reason)
            self._publisher.publish([Outgoing(self._queue, text.encode(), reason=refusal.reason)])

    def _refusal_of(self, command: Message, body: bytes, *, stands_in: bool = False) -> Refusal | None:
        """None: it is confirmed. Raises BrokerUnavailable."""
        try:
            self._publisher.publish([Outgoing(self._writer.reply_queue(command), body)])
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            return self._writer.refused(self.handler.queue, command, error, stands_in=stands_in)
        return None

    def _answer(self, command: Message, context: "ProgressContext") -> "_Answer":
        """Whatever happens there is one: Celery acks the command of a task that has failed."""
        try:
            return self._outcome(command, context)
        except (SoftTimeLimitExceeded, TimeoutError) as error:
            return self._out_of_time(command, context, error)
        except (ObjectsError, InvalidSettings) as error:  # of this worker: another may be better off
            return self._failed(command, str(error))
        except BaseException as error:  # as in our own worker
            if isinstance(error, KeyboardInterrupt) or _is_termination(error):
                raise
            reason, retry = failure_of(error)
            return self._failed(command, reason, retry=retry)

    def _outcome(self, command: Message, context: "ProgressContext") -> "_Answer":
        if context.remaining() == 0:
            return self._failed(command, NOT_IN_TIME, retry=False)
        given = self._run(self._large().resolved(command))
        try:
            payload = self.handler.payload.decode(given)
        except msgspec.DecodeError as error:
            return self._failed(command, payload_fault(error), retry=False)
        value = as_answer(self._call(payload, context))
        body = self._writer.success(self.handler.queue, command, value)
        return _Answer(self._run(self._large().shortened(body)), answered_failure(value, body))

    def _out_of_time(self, command: Message, context: "ProgressContext", error: Exception) -> "_Answer":
        self._forget_loop()
        is_late = context.remaining() == 0
        return self._failed(command, TOO_LATE if is_late else describe(error), retry=not is_late)

    def _call(self, payload: object, context: "ProgressContext") -> object:
        handler = self.handler
        value = handler.function(*((payload, context) if handler.wants_context else (payload,)))
        if not inspect.isawaitable(value):
            return value
        remaining = context.remaining()
        limit = None if remaining is None else remaining + DEADLINE_GRACE
        return self._run(_finished(value, limit))

    def _failed(self, command: Message, reason: str, *, retry: bool = True) -> "_Answer":
        return _Answer(self._writer.failure(self.handler.queue, command, [reason], retry=retry), reason)

    def _context(self, command: Message) -> "ProgressContext":
        deadline = None if command.prazo is None else from_iso(command.prazo)

        def tell(percent: float, text: str) -> None:
            body = self._writer.progress(command, percent, text)
            self._publisher.publish([Outgoing(self._writer.reply_queue(command), body)])

        return ProgressContext(
            tell,
            correlation_id=command.correlation_id,
            queue=self.handler.queue,
            tarefa=command.tarefa,
            tentativa=command.tentativa,
            deadline=deadline,
            traceparent=command.traceparent,
            clock=self.clock,
        )

    # -- one event loop for each thread that works, kept from one command to the next ---------------------------

    def _run(self, work: Any) -> Any:
        if getattr(self._own, "runner", None) is None:
            self._own.runner = asyncio.Runner()
        return self._own.runner.run(work)

    def _forget_loop(self) -> None:
        """What was interrupted may still be on it."""
        runner, self._own.runner = getattr(self._own, "runner", None), None
        if runner is not None:
            with contextlib.suppress(Exception):
                runner.close()

    def _large(self) -> LargeAnswers:
        if getattr(self._own, "large", None) is None:
            objects = make_objects(self._settings) if self._settings.objects.url else None
            self._own.large = LargeAnswers(objects, self._settings.objects.threshold_bytes)
        large: LargeAnswers = self._own.large
        return large


class ProgressContext(Context):
    """Publishes progress by itself, from the handler's own thread: there is no loop beside it here."""

    def __init__(self, tell: Callable[[float, str], None], **known: Any) -> None:
        super().__init__(**known)
        self._tell = tell
        self._told_at = float("-inf")

    def progress(self, percent: float, message: str = "") -> None:
        super().progress(percent, message)
        if time.monotonic() - self._told_at >= PROGRESS_INTERVAL:
            with contextlib.suppress(BrokerError):  # as in `Context`: it is not the handler's trouble
                self.flush()

    def flush(self) -> None:
        if self.has_news:
            self._told_at = time.monotonic()
            self._tell(*self.take_news())


def _is_termination(error: BaseException) -> bool:
    """Celery ends a process of its pool by an exit with a negative status. Its parent answers then."""
    return isinstance(error, SystemExit) and isinstance(error.code, int) and error.code < 0


async def _finished(value: Any, limit: float | None) -> object:
    async with asyncio.timeout(limit):
        return await value
