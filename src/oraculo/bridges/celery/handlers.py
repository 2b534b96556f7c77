"""Runs one command in a pool process: read it, call the handler, publish the answer. Then Celery acks the command."""

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

from oraculo.bridges.celery.publisher import BlockingPublisher
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings, ObjectsError
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.ports.objects import Objects
from oraculo.settings import Settings
from oraculo.wire.answers import NOT_IN_TIME, AnswerWriter, describe
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
    """A failure, for Celery's log, its events and Flower. The orchestrator has the answer already."""


class _Answer(NamedTuple):
    body: bytes
    failure: str | None = None


class HandlerTask:
    """The work of one handler's Celery task. It is made before the pool forks, and connects in each process."""

    def __init__(
        self,
        handler: Handler,
        publisher: BlockingPublisher,
        settings: Settings,
        make_objects: Callable[[], Objects | None],
    ) -> None:
        self.handler = handler
        self._publisher = publisher
        self._make_objects = make_objects
        self._threshold = settings.objects.threshold_bytes
        names = QueueNames(settings.broker.prefix)
        self._queue = names.physical(handler.queue)
        self._clock = SystemClock()
        self._writer = AnswerWriter(self._clock, names)
        self._own = threading.local()

    def run(self, text: str) -> str:
        """Run a command, and return what Flower shows.

        Raises HandlerFailed once the failure is published, and Reject, by which Celery gives the command back, if the
        answer cannot be published.
        """
        command = decode_message(text.encode())
        context = self._context(command)
        answer: _Answer | None = None
        try:
            answer = self._answer(command, context)
            with contextlib.suppress(BrokerError, InvalidSettings):
                context.flush()
            self._publish(text, command, answer.body)
        except SoftTimeLimitExceeded as error:  # Celery raises it once, wherever the process is at that moment
            answer = answer or self._out_of_time(command, context, error)
            self._publish(text, command, answer.body)
        if answer.failure is not None:
            raise HandlerFailed(answer.failure)
        return f"answered {command.correlation_id}"

    def refuse(self, text: str, reason: str, *, retry: bool) -> None:
        """Answer a command whose process was ended from outside. Raises Reject if that cannot be published."""
        command = decode_message(text.encode())
        self._publish(text, command, self._failed(command, reason, retry=retry).body)

    def _publish(self, text: str, command: Message, body: bytes) -> None:
        try:
            self._publish_or_dead_letter(text, command, body)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            _log.warning("an answer could not be published", queue=self.handler.queue, reason=describe(error))
            raise Reject(describe(error), requeue=True) from error

    def _publish_or_dead_letter(self, text: str, command: Message, body: bytes) -> None:
        try:
            self._publisher.publish_answer(self._writer, self.handler.queue, command, body)
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            reason = f"the broker refused the answer: {error}"
            _log.warning("dead-lettered", queue=self._queue, reason=reason)
            self._publisher.publish(Outgoing(self._queue, text.encode(), reason=reason))

    def _answer(self, command: Message, context: "ProgressContext") -> _Answer:
        """Return an answer, whatever the handler raises: Celery acks the command of a failed task."""
        try:
            return self._outcome(command, context)
        except (SoftTimeLimitExceeded, TimeoutError) as error:
            return self._out_of_time(command, context, error)
        except (ObjectsError, InvalidSettings) as error:  # another worker may be set up better
            return self._failed(command, str(error))
        except BaseException as error:  # as in our own worker
            if isinstance(error, KeyboardInterrupt) or _is_termination(error):
                raise
            reason, retry = failure_of(error)
            return self._failed(command, reason, retry=retry)

    def _outcome(self, command: Message, context: "ProgressContext") -> _Answer:
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

    def _out_of_time(self, command: Message, context: "ProgressContext", error: Exception) -> _Answer:
        self._close_loop()
        is_late = context.remaining() == 0
        return self._failed(command, TOO_LATE if is_late else describe(error), retry=not is_late)

    def _call(self, payload: object, context: "ProgressContext") -> object:
        handler = self.handler
        value = handler.function(*((payload, context) if handler.wants_context else (payload,)))
        if not inspect.isawaitable(value):
            return value
        remaining = context.remaining()
        return self._run(_finished(value, None if remaining is None else remaining + DEADLINE_GRACE))

    def _failed(self, command: Message, reason: str, *, retry: bool = True) -> _Answer:
        return _Answer(self._writer.failure(self.handler.queue, command, [reason], retry=retry), reason)

    def _context(self, command: Message) -> "ProgressContext":
        def publish(percent: float, text: str) -> None:
            body = self._writer.progress(command, percent, text)
            self._publisher.publish(Outgoing(self._writer.reply_queue(command), body))

        return ProgressContext(
            publish,
            correlation_id=command.correlation_id,
            queue=self.handler.queue,
            tarefa=command.tarefa,
            tentativa=command.tentativa,
            deadline=None if command.prazo is None else from_iso(command.prazo),
            traceparent=command.traceparent,
            clock=self._clock,
        )

    # -- one event loop a thread, kept from one command to the next ---------------------------------------------

    def _run(self, work: Any) -> Any:
        if getattr(self._own, "runner", None) is None:
            self._own.runner = asyncio.Runner()
        return self._own.runner.run(work)

    def _close_loop(self) -> None:
        """Close the loop on which the interrupted handler may still be."""
        runner, self._own.runner = getattr(self._own, "runner", None), None
        if runner is not None:
            with contextlib.suppress(Exception):
                runner.close()

    def _large(self) -> LargeAnswers:
        if getattr(self._own, "large", None) is None:
            self._own.large = LargeAnswers(self._make_objects(), self._threshold)
        large: LargeAnswers = self._own.large
        return large


class ProgressContext(Context):
    """A context that publishes progress from the handler's own thread: no event loop runs beside it."""

    def __init__(self, publish: Callable[[float, str], None], **known: Any) -> None:
        super().__init__(**known)
        self._publish = publish
        self._published_at = float("-inf")

    def progress(self, percent: float, message: str = "") -> None:
        super().progress(percent, message)
        if time.monotonic() - self._published_at >= PROGRESS_INTERVAL:
            with contextlib.suppress(BrokerError):  # as in `Context`, the broker is not the handler's trouble
                self.flush()

    def flush(self) -> None:
        if self.has_news:
            self._published_at = time.monotonic()
            self._publish(*self.take_news())


def _is_termination(error: BaseException) -> bool:
    """Return whether Celery ends this pool process, by an exit with a negative status. Its parent answers then."""
    return isinstance(error, SystemExit) and isinstance(error.code, int) and error.code < 0


async def _finished(value: Any, limit: float | None) -> object:
    async with asyncio.timeout(limit):
        return await value
