"""What became of a task, told to its run over our own broker."""

import contextlib

from oraculo.bridges.celery.events import SentTasks
from oraculo.bridges.celery.reports import Report, reason_of
from oraculo.bridges.celery.tasks import ReturnAddress, task_id_of
from oraculo.clients.subscription import Backoff
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Broker, Outgoing
from oraculo.ports.clock import Entropy
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.wire import naming
from oraculo.wire.answers import AnswerWriter

DUTY = "ponte celery"


class TaskAnswers:
    def __init__(
        self, broker: Broker, writer: AnswerWriter, sent: SentTasks, entropy: Entropy, telemetry: Telemetry
    ) -> None:
        self._broker = broker
        self._writer = writer
        self._sent = sent
        self._entropy = entropy
        self._telemetry = telemetry

    async def give(self, report: Report) -> None:
        """Returns once it is confirmed. Raises BrokerError when not even its refusal can be told."""
        command = report.command
        self._sent.forget(task_id_of(command))
        kind, reply_to = naming.kind_of(command.tipo_evento), self._writer.reply_queue(command)
        body, stands_in = self._written(kind, report), False
        while True:
            try:
                await self.publish(Outgoing(reply_to, body, prefer=command.via))
                return
            except BrokerError as error:
                refusal = self._writer.refused(kind, command, error, stands_in=stands_in)
            if refusal.stand_in is None:
                raise BrokerError(refusal.reason)
            body, stands_in = refusal.stand_in, True

    def _written(self, kind: str, report: Report) -> bytes:
        if report.reason is None:
            return self._writer.success(kind, report.command, report.value)
        return self._writer.failure(kind, report.command, [report.reason], retry=report.retry)

    async def publish(self, message: Outgoing) -> None:
        """However long our broker is away. Raises BrokerError when it refuses."""
        backoff = Backoff(self._entropy)
        while True:
            try:
                await self._broker.publish([message])
                return
            except BrokerUnavailable as error:
                self._telemetry.emit(LoopFailed(DUTY, f"an answer waits: {error}"))
            await backoff.pause()

    async def give_for_event(self, report: Report) -> None:
        try:
            await self.give(report)
        except Exception as error:  # noqa: BLE001 - an event has no queue in which it could rest: the deadline is left
            told = f"run {report.command.correlation_id}: {reason_of(error)}"
            self._telemetry.emit(LoopFailed(DUTY, told))

    async def tell_retry(self, command: ReturnAddress, text: str) -> None:
        """As progress, which is not worth waiting for when it cannot be told."""
        body = self._writer.progress(command, 0.0, text)
        with contextlib.suppress(BrokerError):
            await self._broker.publish([Outgoing(self._writer.reply_queue(command), body, prefer=command.via)])
