"""Takes the replies of tasks from Celery's broker. Each is acked there once its answer is confirmed on ours."""

import contextlib
import time
from concurrent.futures import Future
from typing import Any

import kombu
import msgspec

from oraculo.bridges.celery.answers import TaskAnswers
from oraculo.bridges.celery.connections import CeleryBroker, SetupTimeout
from oraculo.bridges.celery.events import OnLoop
from oraculo.bridges.celery.failure_reasons import FailureReasons
from oraculo.bridges.celery.listener import STOP_GRACE, Listener
from oraculo.bridges.celery.replies import failure, read_reply, text_of

_PREFETCH = 100
_DECLARE_EVERY = 5.0  # seconds; a broker may lose what was declared, and reports that to nobody
_BUSY, _IDLE = 0.005, 0.5  # seconds to wait for more replies, with and without acks to give


class _Held(msgspec.Struct):
    """A reply that is not acked, and the work on it."""

    message: kombu.Message
    work: "Future[None]"


class ReplyConsumer:
    def __init__(
        self, celery_broker: CeleryBroker, answers: TaskAnswers, reasons: FailureReasons, on_loop: OnLoop
    ) -> None:
        self._celery_broker = celery_broker
        self._answers = answers
        self._reasons = reasons
        self._on_loop = on_loop

    def listen(self, listener: Listener, connection: kombu.Connection) -> None:
        """Read replies in a listener's thread. A reply is held, not given back, while our broker is away."""
        held: dict[Any, _Held] = {}
        channel: Any = connection.channel()
        self._celery_broker.declare_replies(channel)
        try:
            with self._consumer(channel, held):
                listener.ready()
                declared_at = time.monotonic()
                while not listener.stopping:
                    listener.drain(connection, _BUSY if held else _IDLE)
                    _ack_done(held)
                    if time.monotonic() - declared_at > _DECLARE_EVERY:
                        with SetupTimeout(connection):
                            self._celery_broker.declare_replies(channel)
                        declared_at = time.monotonic()
            with contextlib.suppress(TimeoutError):
                for each in held.values():
                    each.work.result(STOP_GRACE / 2)
            _ack_done(held)
        finally:
            for each in held.values():  # the next connection delivers them again
                each.work.cancel()

    def _consumer(self, channel: Any, held: dict[Any, _Held]) -> kombu.Consumer:
        def received(message: kombu.Message, error: Exception | None = None) -> None:
            if message.delivery_tag in held:  # Redis delivers again, under the same tag, what is held for long
                held[message.delivery_tag].message = message
            else:
                held[message.delivery_tag] = _Held(message, self._on_loop(self._take(message, error)))

        return kombu.Consumer(
            channel,
            [self._celery_broker.replies],
            on_message=received,
            on_decode_error=received,
            auto_declare=False,
            prefetch_count=_PREFETCH,
        )

    async def _take(self, message: kombu.Message, error: Exception | None) -> None:
        """Answer a reply, or put it among the dead letters: it must not come again for ever."""
        try:
            if error is not None:
                raise error
            outcome = read_reply(message.body, message.content_type, message.headers.get("task"))
            if outcome.failed_id and (reason := await self._reasons.of(outcome.failed_id)) is not None:
                outcome = failure(outcome.command, reason)
            await self._answers.give(outcome)
        except Exception as fault:  # noqa: BLE001 - the bytes of others may break anything
            body = message.body
            raw = body.encode(errors="replace") if isinstance(body, str) else bytes(body)
            await self._answers.dead_letter(
                raw, f"on Celery's queue {self._celery_broker.replies.name}: {text_of(fault)}"
            )


def _ack_done(held: dict[Any, _Held]) -> None:
    for tag, each in list(held.items()):
        if each.work.done():
            each.work.result()
            each.message.ack()
            del held[tag]
