"""Writes what became of jobs as answers, publishes them, and notes them in the ledger."""

from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from oraculo.bridges.bullmq.job import Record
from oraculo.bridges.bullmq.ledger import JobState, Ledger
from oraculo.clients.subscription import Backoff
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidJson
from oraculo.ports.broker import Broker, Outgoing, Receipt
from oraculo.ports.clock import Entropy
from oraculo.wire.answers import MAX_PROGRESS_TEXT, AnswerWriter
from oraculo.wire.json_guard import depth_fault, has_half_a_pair, is_too_deep, json_fault

SEND_BYTES = 1024 * 1024  # published together: a broker has seconds to confirm it, and a line may be slow

_PERCENT_FIELDS = ("percent", "percentage", "percentual", "progress", "progresso", "value")
_TEXT_FIELDS = ("message", "mensagem", "text", "note", "status", "stage", "step")
_NO_REASONS = (None, "", "null", "undefined")  # what versions of BullMQ write for an error without a message

_log = structlog.get_logger("oraculo.bullmq")
_raw = msgspec.json.Decoder(msgspec.Raw)


class JobReport(msgspec.Struct):
    """A message about a job. An answer ends the job's task; other reports are progress."""

    job_id: str
    record: Record
    body: bytes
    is_answer: bool = True
    stands_in: bool = False  # for an answer that the broker refused
    unsendable: str | None = None  # why it goes to the dead letters


class Results:
    def __init__(self, broker: Broker, ledger: Ledger, writer: AnswerWriter, answers: str, entropy: Entropy) -> None:
        """`answers`: the queue whose dead letters take the answers that no other queue takes."""
        self._broker = broker
        self._ledger = ledger
        self._writer = writer
        self._answers = answers
        self._backoff = Backoff(entropy)

    # -- writing ----------------------------------------------------------------------------------------------

    async def of_state(self, job_id: str, record: Record, state: JobState) -> JobReport | None:
        """Return the answer of a job that has ended, from what BullMQ keeps of it; None when that is gone by now."""
        kept, value, reason, stacktrace = await self._ledger.fields(
            job_id, record, "timestamp", "returnvalue", "failedReason", "stacktrace"
        )
        if kept is None:
            return None
        if state is JobState.COMPLETED:
            return self.completed(job_id, record, value)
        return self.failed(job_id, record, reason, retry=not is_unrecoverable(stacktrace))

    async def of_event(self, job_id: str, record: Record, event: Mapping[str, str]) -> JobReport:
        """Return the answer of a job that has ended, from the event that says so."""
        if event["event"] == "completed":
            return self.completed(job_id, record, event.get("returnvalue"))
        [stacktrace] = await self._ledger.fields(job_id, record, "stacktrace")
        return self.failed(job_id, record, event.get("failedReason"), retry=not is_unrecoverable(stacktrace))

    def completed(self, job_id: str, record: Record, value: str | None) -> JobReport:
        """Return the answer with the job's value. A value that nobody could read is a failure for good: another
        attempt would return the same."""
        try:
            returned = _json_of(value)
        except InvalidJson as error:
            return self.failed(job_id, record, f"the value that the job returned: {error}", retry=False)
        return JobReport(job_id, record, self._writer.success(record.kind, record.command, returned))

    def failed(self, job_id: str, record: Record, reason: str | None, *, retry: bool = True) -> JobReport:
        if reason in _NO_REASONS:
            reason = "the job failed and did not say why (who throws something else than an Error does not)"
        return JobReport(job_id, record, self._writer.failure(record.kind, record.command, [reason], retry=retry))

    def progressed(self, job_id: str, record: Record, data: object) -> JobReport:
        percent, text = read_progress(data)
        return JobReport(job_id, record, self._writer.progress(record.command, percent, text), is_answer=False)

    # -- sending ----------------------------------------------------------------------------------------------

    async def send_all(self, reports: AsyncIterable[JobReport]) -> None:
        """Send reports, each when there is room for it: together they may be large."""
        part: list[JobReport] = []
        size = 0
        async for report in reports:
            part.append(report)
            size += len(report.body)
            if size >= SEND_BYTES:
                await self.send(part)
                part, size = [], 0
        await self.send(part)

    async def send(self, reports: Sequence[JobReport]) -> None:
        """Publish reports and note the answers among them. Raises what redis-py raises when they cannot be noted: then
        the sweep finds their jobs, and answers again."""
        await self.publish(reports)
        answers = [(report.job_id, report.record, report.body) for report in reports if report.is_answer]
        if answers:
            await self._ledger.close(answers)

    async def publish(self, reports: Sequence[JobReport]) -> None:
        """Return once the broker has confirmed all of them, or a smaller answer or a dead letter in their place."""
        while reports:
            try:
                receipts = await self._broker.publish([self._message(report) for report in reports])
            except BrokerError as error:
                receipts = [Receipt(error=error)] * len(reports)
            left: list[JobReport] = []
            for report, receipt in zip(reports, receipts, strict=True):
                if isinstance(receipt.error, BrokerUnavailable):
                    left.append(report)
                elif receipt.error is not None:
                    await self._refused(report, receipt.error)
            if left:
                reason = next(str(each.error) for each in receipts if isinstance(each.error, BrokerUnavailable))
                _log.warning("answers of bullmq's jobs cannot be published; trying again", reason=reason)
                await self._backoff.pause()
            else:
                self._backoff.reset()
            reports = left

    async def _refused(self, report: JobReport, error: BrokerError) -> None:
        """Publish a smaller answer that stands in for a refused one, else a dead letter."""
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

    def _message(self, report: JobReport) -> Outgoing:
        if report.unsendable is not None:
            return Outgoing(self._answers, report.body, reason=report.unsendable)
        record = report.record
        return Outgoing(self._writer.reply_queue(record.command), report.body, prefer=record.via)


def is_unrecoverable(stacktrace: str | None) -> bool:
    """Return whether the last attempt threw BullMQ's UnrecoverableError. Only the stack trace names the error."""
    try:
        traces = msgspec.json.decode(stacktrace or "[]", type=list[str])
    except msgspec.DecodeError:
        return False
    return bool(traces) and "UnrecoverableError" in traces[-1].partition("\n")[0]


def _json_of(value: str | None) -> object:
    """Return the job's value as the worker wrote it; a text when it is no JSON, which only other kinds of workers
    write. Raises InvalidJson for what Node writes and most readers refuse."""
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


def decode_progress(text: str | None) -> object:
    """Return the progress that an event holds; its text where nobody could read it, or write it again."""
    try:
        return text if is_too_deep((text or "").encode()) else msgspec.json.decode(text or "null")
    except msgspec.DecodeError:
        return text


def read_progress(data: object) -> tuple[float | None, str]:
    """Return the percent and the words of a job's progress, which may be anything that its worker chose."""
    if isinstance(data, bool) or data is None:
        return None, ""
    if isinstance(data, int | float):
        return _percent(data), ""
    if isinstance(data, str):
        return None, data[:MAX_PROGRESS_TEXT]
    if not isinstance(data, dict):
        return None, _json_text(data)
    percent = next((found for name in _PERCENT_FIELDS if (found := _percent(data.get(name))) is not None), None)
    text = next((found for name in _TEXT_FIELDS if isinstance(found := data.get(name), str)), None)
    if text is None and percent is None:
        text = _json_text(data)
    return percent, (text or "")[:MAX_PROGRESS_TEXT]


def _percent(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(min(100, max(0, value)))


def _json_text(data: object) -> str:
    return msgspec.json.encode(data).decode()[:MAX_PROGRESS_TEXT]
