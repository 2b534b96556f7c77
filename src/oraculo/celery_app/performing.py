"""One command worked on in Celery's pool: read, call the handler, publish the answer. Celery acks it after that."""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from celery.exceptions import Reject, SoftTimeLimitExceeded

from oraculo.bootstrap import make_objects
from oraculo.celery_app.publishing import Publisher
from oraculo.core.answer_writer import AnswerWriter, describe
from oraculo.core.message import Message, decode_message, fault_of
from oraculo.core.naming import QueueNames
from oraculo.core.timestamps import from_iso
from oraculo.errors import BrokerError, BrokerUnavailable, Fault, ObjectsError
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import Clock
from oraculo.settings import Settings
from oraculo.worker import Context, DoNotRetry
from oraculo.worker.handlers import Handler
from oraculo.worker.large import LargeAnswers

PROGRESS_INTERVAL = 0.2  # seconds between two progress messages of one command
DEADLINE_GRACE = 1.0  # seconds after a deadline at which its handler is given up; the orchestrator tells it first
TOO_LATE = "deadline passed"


class HandlerFailed(Exception):
    """So that Celery's log, its events and Flower say so too; the orchestrator has been told."""


class Performer:
    """What the Celery task of one handler does. It is made before the pool forks, and connects in each process."""

    def __init__(self, handler: Handler, publisher: Publisher, settings: Settings, clock: Clock) -> None:
        self.handler = handler
        self._publisher = publisher
        self._settings = settings
        self.clock = clock
        self._writer = AnswerWriter(clock, QueueNames(settings.broker.prefix))
        self._own = threading.local()

    def perform(self, text: str) -> str:
        """Returns what Flower shows; raises HandlerFailed once the failure was told. A command whose answer cannot be
        published is given back."""
        command = decode_message(text.encode())
        context = self._context(command)
        body, failure = self._answer(command, context)
        with contextlib.suppress(BrokerError):
            context.flush()
        self._reply(command, body)
        if failure is not None:
            raise HandlerFailed(failure)
        return f"answered {command.correlation_id}"

    def refuse(self, text: str, reason: str, *, retry: bool) -> None:
        """For a command whose process was ended from outside."""
        command = decode_message(text.encode())
        self._reply(command, self._failure(command, reason, retry=retry))

    def _reply(self, command: Message, body: bytes) -> None:
        reply_to = self._writer.reply_queue(command)
        try:
            self._publisher.publish([Outgoing(reply_to, body)])
        except BrokerUnavailable as error:
            raise Reject(str(error), requeue=True) from error
        except BrokerError as error:  # refused: the run is told that, in fewer bytes
            short = self._failure(command, f"the broker refused the answer: {error}", retry=False)
            self._publisher.publish([Outgoing(reply_to, short)])

    def _answer(self, command: Message, context: "ProgressContext") -> tuple[bytes, str | None]:
        """The answer, and why it is a failure, if it is one."""
        if context.remaining() == 0:
            return self._failed(command, "deadline passed before it was started", retry=False)
        try:
            payload = self.handler.payload.decode(self._run(self._large().resolved(command)))
        except ObjectsError as error:
            return self._failed(command, str(error))
        except msgspec.DecodeError as error:
            return self._failed(command, _payload_fault(error), retry=False)
        try:
            value = self._call(payload, context)
        except (SoftTimeLimitExceeded, TimeoutError) as error:
            self._forget_loop()
            is_late = context.remaining() == 0
            return self._failed(command, TOO_LATE if is_late else describe(error), retry=not is_late)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if _is_termination(error):
                raise
            return self._failed(command, describe(error), retry=not isinstance(error, DoNotRetry))
        body = self._writer.success(self.handler.queue, command, value)
        return self._run(self._large().shortened(body)), None

    def _call(self, payload: object, context: "ProgressContext") -> object:
        handler = self.handler
        value = handler.function(*((payload, context) if handler.wants_context else (payload,)))
        if not inspect.isawaitable(value):
            return value
        remaining = context.remaining()
        limit = None if remaining is None else remaining + DEADLINE_GRACE
        return self._run(_finished(value, limit))

    def _failed(self, command: Message, reason: str, *, retry: bool = True) -> tuple[bytes, str]:
        return self._failure(command, reason, retry=retry), reason

    def _failure(self, command: Message, reason: str, *, retry: bool) -> bytes:
        return self._writer.failure(self.handler.queue, command, [reason], retry=retry)

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


def _payload_fault(error: msgspec.DecodeError) -> str:
    if not isinstance(error, msgspec.ValidationError):
        return f"payload: {error}"
    fault = fault_of(error)
    return str(Fault(f"payload.{fault.field}".rstrip("."), fault.problem))
