"""Publishes answers on our broker, with a short failure in the place of an answer that the broker refuses."""

import contextlib
from collections.abc import Awaitable, Callable

from oraculo.bridges.celery.recent import RecentDict
from oraculo.bridges.celery.replies import Outcome, text_of
from oraculo.bridges.celery.tasks import ReturnAddress, task_id_of
from oraculo.clients.subscription import Backoff
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.pipeline import bridges
from oraculo.ports.broker import Broker, Outgoing, publish_all
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.wire import naming
from oraculo.wire.answers import AnswerWriter
from oraculo.wire.message import Message

_MAX_SENT = 10_000
_MAX_DEAD_LETTER = 64 * 1024  # bytes that are kept of an unreadable reply


async def publish_answer(
    publish: Callable[[Outgoing], Awaitable[None]],
    writer: AnswerWriter,
    kind: str,
    command: Message,
    body: bytes,
    via: str | None = None,
) -> None:
    """Publish an answer, or the failure that says why the broker refused it.

    Raises BrokerUnavailable, and BrokerError if the broker refuses the failure too.
    """
    queue = writer.reply_queue(command)
    try:
        await publish(Outgoing(queue, body, prefer=via))
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        refusal = writer.refused(kind, command, error, stands_in=False)
        assert refusal.stand_in is not None
        await publish(Outgoing(queue, refusal.stand_in, prefer=via))


class TaskAnswers:
    """The publisher of all that the bridge has to say: answers, progress, dead letters and troubles.

    `sent` holds the commands of tasks that were sent and have not ended, by task id.
    """

    def __init__(self, broker: Broker, prefix: str, clock: Clock, entropy: Entropy, telemetry: Telemetry) -> None:
        names = naming.QueueNames(prefix)
        self.sent = RecentDict[str, ReturnAddress](_MAX_SENT)
        self._broker = broker
        self._queue = names.physical(bridges.QUEUES[bridges.CELERY])
        self._writer = AnswerWriter(clock, names)
        self._entropy = entropy
        self._telemetry = telemetry

    def report(self, trouble: str) -> None:
        self._telemetry.emit(LoopFailed("ponte celery", trouble))

    async def give(self, outcome: Outcome) -> None:
        """Return once the answer is confirmed. Raises BrokerError if the broker refuses every form of it."""
        command = outcome.command
        self.sent.pop(task_id_of(command), None)
        kind = naming.kind_of(command.tipo_evento)
        if outcome.reason is None:
            body = self._writer.success(kind, command, outcome.value)
        else:
            body = self._writer.failure(kind, command, [outcome.reason], retry=outcome.retry)
        await publish_answer(self._publish, self._writer, kind, command, body, command.via)

    async def give_for_event(self, outcome: Outcome) -> None:
        """Give an answer that rests in no queue. If the broker refuses it, the run's deadline is left."""
        try:
            await self.give(outcome)
        except Exception as error:  # noqa: BLE001 - nobody awaits this
            self.report(f"run {outcome.command.correlation_id}: {text_of(error)}")

    async def give_progress(self, command: ReturnAddress, text: str) -> None:
        """Publish progress once. It is not worth waiting for a broker that is away."""
        body = self._writer.progress(command, 0.0, text)
        with contextlib.suppress(BrokerError):
            await publish_all(self._broker, [Outgoing(self._writer.reply_queue(command), body, prefer=command.via)])

    async def dead_letter(self, body: bytes, reason: str) -> None:
        """Put a reply among the dead letters of the bridge's queue, however often that fails."""
        self.note_dead_letter(reason)
        backoff = Backoff(self._entropy)
        while True:
            try:
                await self._publish(Outgoing(self._queue, body[:_MAX_DEAD_LETTER], reason=reason))
                return
            except Exception as error:  # noqa: BLE001 - the reply stays unacked until it rests somewhere
                self.report(f"a dead letter was refused: {text_of(error)}")
            await backoff.pause()

    def note_dead_letter(self, reason: str) -> None:
        self._telemetry.emit(DeadLettered(bridges.QUEUES[bridges.CELERY], reason))

    async def _publish(self, message: Outgoing) -> None:
        """Publish a message, however long our broker is away. Raises BrokerError if the broker refuses it."""
        backoff = Backoff(self._entropy)
        while True:
            try:
                await publish_all(self._broker, [message])
                return
            except BrokerUnavailable as error:
                self.report(f"an answer waits: {error}")
            await backoff.pause()
