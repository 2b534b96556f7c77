"""The outbox of answers and progress reports, published and acked in batches.

The next batch gathers while others wait for their confirms. So an idle worker answers at once, and a busy one makes
large batches. A command is acked only after the broker confirmed its answer.
"""

import asyncio
import contextlib
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeGuard

import msgspec

from oraculo.clients.subscription import Backoff, Subscription
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Broker, Delivery, Outgoing, Receipt
from oraculo.ports.clock import Entropy
from oraculo.wire import naming
from oraculo.worker.answer_memory import RememberedAnswers, identity_of
from oraculo.worker.answers import AnswerWriter
from oraculo.worker.jobs import Job, ReceivedCommand
from oraculo.worker.logs import TroubleLog, WorkerLog

MAX_BATCH = 500
MAX_BATCH_BYTES = 1024 * 1024  # a broker has seconds to confirm it, and a network may be slow
MOST_SENDING = 3  # batches that wait for confirms at a time, so that no answer waits for another's round trip
MOST_SETTLING = 16  # batches whose commands are being acked at a time
FULL_PAUSE = 1.0  # seconds until another try at a full queue
PROGRESS_INTERVAL = 0.2  # seconds between two progress messages of one command

_log = WorkerLog()


class _Reply(msgspec.Struct, eq=False):
    received: ReceivedCommand
    body: bytes
    stands_in: bool = False  # for an answer that the broker refused


class AnswerOutbox:
    """The outbox of one worker. Only `announce` may be called from other threads."""

    def __init__(
        self,
        broker: Broker,
        writer: AnswerWriter,
        remembered: RememberedAnswers,
        names: naming.QueueNames,
        entropy: Entropy,
    ) -> None:
        self._broker = broker
        self._writer = writer
        self._remembered = remembered
        self._names = names
        self._replies: list[_Reply] = []
        self._reports: dict[Job, None] = {}
        self._reported_at: dict[Job, float] = {}
        self._wake = asyncio.Event()
        self._backoff = Backoff(entropy)
        self._troubles = TroubleLog()
        self._sending: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._pausing: set[asyncio.Task[None]] = set()  # answers whose queue had no room
        self._closing = False
        self._fault: BaseException | None = None  # a defect that ended a sending
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def answer(self, received: ReceivedCommand, body: bytes) -> None:
        self._replies.append(_Reply(received, body))
        self._wake.set()

    def announce(self, job: Job) -> None:
        """Send a progress report soon: the job's context has news."""
        if threading.get_ident() == self._thread:
            self._schedule_report(job)
            return
        # A closed loop raises: this thread has outlived its worker.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._schedule_report, job)

    def last_report(self, job: Job) -> None:
        """Send the last report of a job that has ended, before its answer."""
        self._reported_at.pop(job, None)
        if job.context is not None and job.context.has_news:
            self._reports[job] = None

    def _schedule_report(self, job: Job) -> None:
        due = self._reported_at.get(job, 0.0) + PROGRESS_INTERVAL
        wait = due - self._loop.time()
        if wait <= 0:
            self._report(job)
        else:
            self._loop.call_later(wait, self._report, job)

    def _report(self, job: Job) -> None:
        if not job.ended and job.context is not None and job.context.has_news:
            self._reports[job] = None
            self._reported_at[job] = self._loop.time()
            self._wake.set()

    def close(self) -> None:
        """Let `run` return once everything present is published."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Publish until `close`. Raises the defect that ended a sending; its commands are delivered again."""
        try:
            while self._fault is None and not (
                self._closing and not self._replies and not self._sending and not self._pausing
            ):
                await self._wake.wait()
                # One turn of the loop gathers answers of other queues: answers that arrive together cost the engine one
                # commit.
                await asyncio.sleep(0)
                self._wake.clear()
                while self._replies or self._reports:
                    await self._room_to_send()
                    self._send_beside(self._send_batch(*self._next_batch()))
        finally:
            for task in self._sending | self._pausing:  # only after a defect or a cancellation
                task.cancel()
        if self._fault is not None:
            raise self._fault
        if self._settling:
            await asyncio.wait(self._settling)

    async def _room_to_send(self) -> None:
        """Wait until another batch may be sent: one at a time while the broker fails."""
        most = 1 if self._backoff.is_failing else MOST_SENDING
        while len(self._sending) >= most:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)

    def _send_beside(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending, name="oraculo-answers")
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        if not task.cancelled():
            self._fault = self._fault or task.exception()
        self._wake.set()  # it may have put answers back, or be the last one before the end

    def _next_batch(self) -> tuple[list[Job], list[_Reply], list[Outgoing]]:
        """Return the next jobs with news, the next answers, and the messages of both."""
        jobs = [job for job in self._reports if job.context is not None and job.context.has_news]
        sizes = accumulate(len(reply.body) for reply in self._replies[:MAX_BATCH])
        count = max(1, bisect_right(list(sizes), MAX_BATCH_BYTES))
        batch, self._replies = self._replies[:count], self._replies[count:]
        self._reports = {}
        return jobs, batch, [*self._report_messages(jobs), *map(self._reply_message, batch)]

    async def _send_batch(self, jobs: list[Job], batch: list[_Reply], messages: list[Outgoing]) -> None:
        if not messages:
            return
        try:
            receipts = await self._broker.publish(messages)
        except Exception as error:  # noqa: BLE001 - an adapter's fault must not lose answers nor end the worker
            if not _is_refusal(error):
                await self._put_back(batch, error)
                return
            receipts = [Receipt(error=error)] * len(messages)
        self._backoff.reset()
        await self._read_receipts(batch, receipts[len(messages) - len(batch) :], jobs)  # after those of the reports

    async def _read_receipts(self, batch: list[_Reply], receipts: Sequence[Receipt], jobs: list[Job]) -> None:
        """Settle what was taken. Answers for a full queue pause by themselves, and hold up no other queue."""
        outcomes = list(zip(batch, receipts, strict=True))
        if full := {reply: each.error for reply, each in outcomes if isinstance(each.error, BrokerUnavailable)}:
            why = next(iter(full.values()))
            self._troubles.warning("answers were not taken; trying again", why, count=len(full))
            self._pause(list(full))
        for reply, receipt in outcomes:
            if receipt.error is not None and reply not in full:
                await self._handle_refusal(reply, receipt.error)
        await self._settle_soon([reply for reply, receipt in outcomes if receipt.error is None], jobs)

    async def _settle_soon(self, batch: list[_Reply], jobs: list[Job]) -> None:
        """Ack commands in the background, so that the next batch need not wait."""
        task = asyncio.create_task(self._settle_and_renew(batch, jobs), name="oraculo-settle")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        if len(self._settling) > MOST_SETTLING:
            await asyncio.wait(self._settling, return_when=asyncio.FIRST_COMPLETED)

    async def _settle_and_renew(self, batch: list[_Reply], jobs: list[Job]) -> None:
        await self._settle(batch)
        await self._renew(jobs)

    def _pause(self, batch: list[_Reply]) -> None:
        pausing = asyncio.create_task(self._return_later(batch), name="oraculo-full")
        self._pausing.add(pausing)
        pausing.add_done_callback(self._returned)

    async def _return_later(self, batch: list[_Reply]) -> None:
        await asyncio.sleep(FULL_PAUSE)
        self._replies[:0] = batch

    def _returned(self, task: "asyncio.Task[None]") -> None:
        self._pausing.discard(task)
        self._wake.set()

    async def _put_back(self, batch: list[_Reply], error: Exception) -> None:
        self._troubles.warning("answers could not be published; trying again", error, count=len(batch))
        self._replies[:0] = batch
        await self._backoff.pause()

    async def _handle_refusal(self, reply: _Reply, error: Exception) -> None:
        """Publish a failure in the place of a refused answer. When that is refused too, dead-letter the command.

        The answer is remembered until then: the command may come again, and must not run again.
        """
        received, command = reply.received, reply.received.command
        queue = self._names.logical(received.delivery.queue)
        reason, stand_in = self._writer.refused(queue, command, error, stands_in=reply.stands_in)
        _log.warning("answer refused", correlation_id=command.correlation_id, reason=reason)
        identity = identity_of(command)
        if stand_in is None:
            if await received.subscription.dead_letter(received.delivery, reason) and identity is not None:
                self._remembered.forget(identity)
            return
        if identity is not None:
            self._remembered.put(identity, stand_in)
        self._replies.append(_Reply(received, stand_in, stands_in=True))

    async def _settle(self, batch: list[_Reply]) -> None:
        done: defaultdict[Subscription, list[Delivery]] = defaultdict(list)
        for reply in batch:
            done[reply.received.subscription].append(reply.received.delivery)
        # Together: a broker may write all of them to its disk at once.
        await asyncio.gather(*(subscription.ack(deliveries) for subscription, deliveries in done.items()))

    async def _renew(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.ended:
                for received in job.received:
                    await received.subscription.extend([received.delivery])

    def _report_messages(self, jobs: list[Job]) -> Iterator[Outgoing]:
        for job in jobs:
            assert job.context is not None
            try:
                body = self._writer.progress(job.command, *job.context.take_news())
            except Exception as error:  # noqa: BLE001 - one report that cannot be written must not hold up the answers
                _log.warning("progress dropped", correlation_id=job.command.correlation_id, reason=str(error))
            else:
                yield Outgoing(self._writer.reply_queue(job.command), body)

    def _reply_message(self, reply: _Reply) -> Outgoing:
        return Outgoing(
            self._writer.reply_queue(reply.received.command), reply.body, prefer=reply.received.delivery.via
        )


def _is_refusal(error: Exception) -> TypeGuard[BrokerError]:
    """Return whether the broker refused, so that trying again would not help."""
    return isinstance(error, BrokerError) and not isinstance(error, BrokerUnavailable)
