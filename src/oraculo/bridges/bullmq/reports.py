"""From what happened to a job to the message that tells the orchestrator, and to the note that it was told."""

from collections.abc import Iterable
from typing import Any

import msgspec
import structlog

from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.portions import by_the_megabyte
from oraculo.bridges.bullmq.records import Record
from oraculo.clients.subscription import Backoff
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidJson
from oraculo.ports.broker import Broker, NotTaken, Outgoing
from oraculo.ports.clock import Entropy
from oraculo.wire.answers import MAX_PROGRESS_TEXT, AnswerWriter
from oraculo.wire.json_guard import depth_fault, has_half_a_pair, is_too_deep, json_fault

_PERCENT_FIELDS = ("percent", "percentage", "percentual", "progress", "progresso", "value")
_TEXT_FIELDS = ("message", "mensagem", "text", "note", "status", "stage", "step")

_NO_REASONS = (None, "", "null", "undefined")  # as different versions write that an error had no message

_log = structlog.get_logger("oraculo.bullmq")
_raw = msgspec.json.Decoder(msgspec.Raw)


class Report(msgspec.Struct):
    """A message to be sent about a job; `is_answer`: it ends the job's task. `stands_in`: for an answer that was
    refused. `unsendable`: why it goes to the dead letters instead."""

    job_id: str
    record: Record
    body: bytes
    is_answer: bool = True
    stands_in: bool = False
    unsendable: str | None = None


class Reporter:
    """Writes reports, publishes them until they are confirmed, and notes those that end something."""

    def __init__(
        self, broker: Broker, ledger: Ledger, writer: AnswerWriter, resting_place: str, entropy: Entropy
    ) -> None:
        self._broker = broker
        self._resting_place = resting_place
        self._ledger = ledger
        self._writer = writer
        self._backoff = Backoff(entropy)

    # -- writing ----------------------------------------------------------------------------------------------

    def completed(self, job_id: str, record: Record, value: str | None) -> Report:
        """One that nobody else could read ends its task all the same: another attempt would return the same."""
        try:
            returned = _json_of(value)
        except InvalidJson as error:
            return self.failed(job_id, record, f"the value that the job returned: {error}", retry=False)
        return Report(job_id, record, self._writer.success(record.kind, record.command, returned))

    def failed(self, job_id: str, record: Record, reason: str | None, *, retry: bool = True) -> Report:
        if reason in _NO_REASONS:
            reason = "the job failed and did not say why (who throws something else than an Error does not)"
        return Report(job_id, record, self._writer.failure(record.kind, record.command, [reason], retry=retry))

    def progressed(self, job_id: str, record: Record, data: object) -> Report:
        percent, text = read_progress(data)
        return Report(job_id, record, self._writer.progress(record.command, percent, text), is_answer=False)

    def repeated(self, job_id: str, record: Record, body: str) -> Report:
        """An answer that was given before."""
        return Report(job_id, record, body.encode())

    # -- sending ----------------------------------------------------------------------------------------------

    async def send(self, reports: Iterable[Report]) -> None:
        """Returns once the broker has taken them. Raises what Redis raises when they cannot be noted: then they are
        found, and told, again."""
        for part in by_the_megabyte(reports, lambda report: len(report.body)):
            await self.publish(part)
            answers = [(report.job_id, report.record, report.body) for report in part if report.is_answer]
            if answers:
                await self._ledger.answered(answers)

    async def publish(self, reports: list[Report]) -> None:
        """Returns once the broker has taken them, without a note of it."""
        while reports:
            try:
                await self._broker.publish([self._message(report) for report in reports])
            except BrokerUnavailable as error:
                if isinstance(error, NotTaken):  # by a queue that is full: the others need not be sent again
                    reports = [report for report, via in zip(reports, error.vias, strict=True) if via is None]
                _log.warning("answers of bullmq's jobs cannot be published; trying again", reason=str(error))
                await self._backoff.pause()
            except BrokerError as error:
                await self._refused(reports, error)
                return
            else:
                self._backoff.reset()
                return

    async def _refused(self, reports: list[Report], error: BrokerError) -> None:
        """One of them is at fault: it must not hold up the others."""
        if len(reports) > 1:
            for report in reports:
                await self.publish([report])
            return
        [report] = reports
        record = report.record
        reason, stand_in = self._writer.refused(record.kind, record.command, error, stands_in=report.stands_in)
        _log.warning("answer refused", correlation_id=record.command.correlation_id, reason=reason)
        if not report.is_answer or report.unsendable is not None:
            return
        if stand_in is not None:
            report.body, report.stands_in = stand_in, True
        else:
            report.unsendable = reason
        await self.publish([report])

    def _message(self, report: Report) -> Outgoing:
        if report.unsendable is not None:
            return Outgoing(self._resting_place, report.body, reason=report.unsendable)
        record = report.record
        return Outgoing(self._writer.reply_queue(record.command), report.body, prefer=record.via)


def _json_of(value: str | None) -> object:
    """What a job returned, as it wrote it; a text when it is no JSON, which only a worker of another kind writes.
    Raises InvalidJson for what Node writes, and most others cannot read."""
    if not value:
        return None
    body = value.encode()
    if is_too_deep(body):
        raise InvalidJson(depth_fault())
    try:
        return _raw.decode(body)
    except msgspec.DecodeError as error:
        if has_half_a_pair(body):
            raise InvalidJson(json_fault(body, error)) from None
        return value


def read_progress(data: object) -> tuple[float | None, str]:
    """Percent and words of a job's progress, which may be anything that its worker chose."""
    if isinstance(data, bool) or data is None:
        return None, ""
    if isinstance(data, int | float):
        return _percent(data), ""
    if isinstance(data, str):
        return None, data[:MAX_PROGRESS_TEXT]
    if not isinstance(data, dict):
        return None, _shown(data)
    percent = next((found for name in _PERCENT_FIELDS if (found := _percent(data.get(name))) is not None), None)
    text = next((found for name in _TEXT_FIELDS if isinstance(found := data.get(name), str)), None)
    if text is None and percent is None:
        text = _shown(data)
    return percent, (text or "")[:MAX_PROGRESS_TEXT]


def _percent(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(min(100, max(0, value)))


def _shown(data: object) -> str:
    return msgspec.json.encode(data).decode()[:MAX_PROGRESS_TEXT]
