"""Reports, in: each is acked on Celery's broker once its answer is confirmed on ours."""

import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

import kombu

from oraculo.bridges.celery.answers import DUTY, TaskAnswers
from oraculo.bridges.celery.connections import Address, Listener
from oraculo.bridges.celery.events import SentTasks
from oraculo.bridges.celery.handover import PREFETCH, QUEUE, STOP_GRACE
from oraculo.bridges.celery.reasons import FailureReasons
from oraculo.bridges.celery.reports import PICKLED, Report, failure, is_pickle, read_report, reason_of
from oraculo.bridges.celery.tasks import FAILED
from oraculo.clients.subscription import Backoff
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import Entropy
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry

MOST_KEPT = 64 * 1024  # bytes of an unreadable report that our broker refuses to take whole
BIND_EVERY = 5.0  # seconds; a broker may lose what it was told, and nobody hears of that
_BRISK, _IDLE = 0.005, 0.5  # seconds for which a thread waits for more, when it owes acks and when it does not

# Begins what is to be done on the event loop, from any thread.
OnLoop = Callable[[Coroutine[Any, Any, None]], "Future[None]"]
# What is done about a report, and the report, by its tag.
_Owed = dict[Any, tuple["Future[None]", kombu.Message]]


class TaskReplies:
    """`queue`: ours, whose dead letters the unreadable ones become."""

    def __init__(
        self,
        address: Address,
        answers: TaskAnswers,
        sent: SentTasks,
        reasons: FailureReasons,
        queue: str,
        on_loop: OnLoop,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._address = address
        self._answers = answers
        self._sent = sent
        self._reasons = reasons
        self._queue = queue
        self._on_loop = on_loop
        self._entropy = entropy
        self._telemetry = telemetry

    def listen(self, listener: Listener, connection: kombu.Connection) -> None:
        """In a thread of its own. Each report is acked when its answer is confirmed: it is held meanwhile, however long
        that takes, and not given back."""
        owed: _Owed = {}

        def arrived(message: kombu.Message) -> None:
            if not _is_held(message, owed):
                taking = self._take(message.body, message.content_type, message.headers)
                owed[message.delivery_tag] = (self._on_loop(taking), message)

        def broken(message: kombu.Message, error: Exception) -> None:
            if not _is_held(message, owed):
                setting_apart = self._set_apart(message.body, reason_of(error))
                owed[message.delivery_tag] = (self._on_loop(setting_apart), message)

        self._address.declare_replies(connection)
        channel: Any = connection.channel()
        consumer = kombu.Consumer(
            channel,
            [self._address.replies],
            on_message=arrived,
            on_decode_error=broken,
            auto_declare=False,
            prefetch_count=PREFETCH,
        )
        try:
            with consumer:
                listener.is_ready()
                bound = time.monotonic()
                while not listener.stopping:
                    listener.drain(connection, _BRISK if owed else _IDLE)
                    _settle(owed)
                    if time.monotonic() - bound > BIND_EVERY:
                        self._address.bind_replies(connection, channel)
                        bound = time.monotonic()
            _settle_last(owed)
        finally:
            for taking, _ in owed.values():  # they come again, with the next connection
                taking.cancel()

    async def _take(self, body: bytes | str, content_type: str | None, headers: Mapping[str, Any]) -> None:
        """Whatever a report is, it is answered or set apart: one that raised would come again for ever."""
        try:
            report = self._pickled(headers) if is_pickle(content_type) else None
            report = report or read_report(body, content_type, headers.get("task"))
            await self._answers.give(await self._explained(report))
        except Exception as error:  # noqa: BLE001
            await self._set_apart(body, reason_of(error))

    def _pickled(self, headers: Mapping[str, Any]) -> Report | None:
        """Return a report without its content, where the headers lead to a task that was sent from here."""
        task_id = headers.get("parent_id")
        command = self._sent.get(task_id)
        if command is None:
            return None
        failed_id = str(task_id) if headers.get("task") == FAILED else ""
        return Report(command, reason=PICKLED, retry=bool(failed_id), failed_id=failed_id)

    async def _explained(self, report: Report) -> Report:
        reason = await self._reasons.of(report.failed_id) if report.failed_id else None
        return report if reason is None else failure(report.command, *reason)

    async def _set_apart(self, body: bytes | str, why: str) -> None:
        """To the dead letters of our own queue."""
        raw = body.encode(errors="replace") if isinstance(body, str) else bytes(body)
        reason = f"on Celery's queue {self._address.replies.name}: {why}"
        self._telemetry.emit(DeadLettered(QUEUE, reason))
        backoff = Backoff(self._entropy)
        while True:
            try:
                await self._answers.publish(Outgoing(self._queue, raw, reason=reason))
                return
            except Exception as error:  # noqa: BLE001 - it stays where it is, and is told again
                raw = raw[:MOST_KEPT]
                self._telemetry.emit(LoopFailed(DUTY, f"a dead letter was refused: {reason_of(error)}"))
            await backoff.pause()


def _is_held(message: kombu.Message, owed: _Owed) -> bool:
    """Redis' transport delivers again what is held for long, under the same tag: then the newer one is acked."""
    if message.delivery_tag not in owed:
        return False
    owed[message.delivery_tag] = (owed[message.delivery_tag][0], message)
    return True


def _settle(owed: _Owed) -> None:
    """Acks what was answered or set apart."""
    for tag, (taking, message) in list(owed.items()):
        if taking.done():
            taking.result()
            message.ack()
            del owed[tag]


def _settle_last(owed: _Owed) -> None:
    with contextlib.suppress(TimeoutError):
        for tag, (taking, message) in list(owed.items()):
            taking.result(STOP_GRACE / 2)
            message.ack()
            del owed[tag]
