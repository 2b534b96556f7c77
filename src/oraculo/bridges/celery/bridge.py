"""`CeleryBridge`: commands out to Celery's workers, reports back in.

A command is acked once Celery's broker has confirmed the task; a report is acked there once its answer is confirmed
here. In between, all that is needed rests in one of the two brokers: the bridge may be killed at any moment.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import kombu
from celery import Celery

from oraculo.bridges.celery.connections import Address, CeleryAway, Listener, Refused, TaskSender
from oraculo.bridges.celery.events import SentTasks, TaskEvents
from oraculo.bridges.celery.reports import Report, read_report
from oraculo.bridges.celery.tasks import Task, make_task, read_destination, task_id_of
from oraculo.core import bridge as bridges
from oraculo.core import naming
from oraculo.core.answer_writer import AnswerWriter
from oraculo.core.message import Message, decode_message
from oraculo.core.retry import RetryPolicy
from oraculo.core.timestamps import from_iso
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidInput
from oraculo.ports.broker import Broker, Consumer, Delivery, Outgoing
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.settings import CelerySettings

REPLIES = "oraculo-respostas"  # the exchange and the queue on Celery's broker, with our prefix
PREFETCH = 100  # commands held, and reports held
STOP_GRACE = 5.0
_QUEUE = bridges.QUEUES[bridges.CELERY]
_BRISK, _IDLE = 0.005, 0.5  # seconds for which a thread waits for more, when it owes acks and when it does not
_PATIENCE = RetryPolicy(backoff=0.1, max_backoff=2.0)


class CeleryBridge:
    def __init__(
        self,
        settings: CelerySettings,
        broker: Broker,
        prefix: str,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._names = naming.QueueNames(prefix)
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry
        self._queue = self._names.physical(_QUEUE)
        self._writer = AnswerWriter(clock, self._names)
        self._app = Celery("oraculo", broker=settings.broker_url, set_as_current=False)
        self._address = Address(settings.broker_url, settings.key_prefix, self._names.physical(REPLIES))
        self._sender = TaskSender(self._address)
        self._sent = SentTasks()
        self._threads: list[Listener] = []
        self._trouble: str | None = None  # of the way out
        self._started = False
        self._handing_over = False

    # -- the port -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return bridges.CELERY

    @property
    def trouble(self) -> str | None:
        return self._trouble or (self._threads[0].trouble if self._threads else None)

    @property
    def waiting(self) -> list[str]:
        """The ids of tasks that were sent from here and have not reported, the latest of them."""
        return list(self._sent)

    async def start(self) -> None:
        if self._started:
            return
        self._started = True
        self._loop = asyncio.get_running_loop()
        self._sending = ThreadPoolExecutor(1, "oraculo-celery-out")
        self._threads = [Listener("oraculo-celery-in", self._address, self._listen)]
        if self._settings.events:
            events = TaskEvents(self._app, self._sent, self._ended, self._retried)
            self._threads.append(Listener("oraculo-celery-events", self._address, events.listen))
        for thread in self._threads:
            thread.start()
        self._commands = asyncio.create_task(self._read_commands(), name="oraculo-celery-commands")

    async def stop(self) -> None:
        if not self._started:
            return
        self._started = False
        await self._end_commands()
        for thread in self._threads:
            thread.end()
        await asyncio.gather(*(asyncio.to_thread(thread.join, STOP_GRACE) for thread in self._threads))
        self._threads = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await self._loop.run_in_executor(self._sending, self._sender.close)
        self._sending.shutdown(wait=False, cancel_futures=True)

    async def _end_commands(self) -> None:
        """A task that is being sent is seen through: given back, it would run twice."""
        if self._handing_over:
            await asyncio.wait([self._commands], timeout=STOP_GRACE)
        self._commands.cancel()
        await asyncio.gather(self._commands, return_exceptions=True)

    # -- commands, out ------------------------------------------------------------------------------------------

    async def _read_commands(self) -> None:
        failures = 0
        while self._started:
            try:
                consumer = await self._broker.consume(self._queue, prefetch=PREFETCH)
                failures = 0
                await self._take_commands(consumer)
            except Exception as error:  # noqa: BLE001 - whatever our broker does, commands wait there
                self._telemetry.emit(LoopFailed("ponte celery", f"{type(error).__name__}: {error}"))
            failures += 1
            await self._pause(failures)

    async def _take_commands(self, consumer: Consumer) -> None:
        try:
            while self._started and (deliveries := await consumer.take(PREFETCH)):
                self._handing_over = True
                await self._hand_over_all(consumer, deliveries)
                self._handing_over = False
        finally:
            self._handing_over = False
            with contextlib.suppress(BrokerError):
                await consumer.close()

    async def _hand_over_all(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
        waiting = deque(deliveries)
        done: list[Delivery] = []
        failures = 0
        while waiting and self._started:
            try:
                await self._hand_over(consumer, waiting[0])
            except CeleryAway as error:
                failures += 1
                self._note_away(str(error))
                # What was sent must not be sent again, nor what waits be given to another who cannot send it either.
                await consumer.ack(done)
                done = []
                await consumer.extend(list(waiting))
                await self._pause(failures)
            else:
                failures = 0
                self._trouble = None
                done.append(waiting.popleft())
        await consumer.ack(done)

    async def _hand_over(self, consumer: Consumer, delivery: Delivery) -> None:
        """Raises CeleryAway. What can go nowhere is answered, or quarantined when nobody can be told."""
        try:
            command = decode_message(delivery.body)
            task = self._task_of(command)
        except InvalidInput as error:
            self._telemetry.emit(DeadLettered(self._queue, str(error)))
            await consumer.dead_letter(delivery, str(error))
            return
        if task.id in self._sent:  # a repeat: its task is with Celery already
            return
        if self._is_late(command):
            late = "deadline passed before Celery could be given the task"
            await self._answer(Report(command, reason=late, retry=False), via=delivery.via)
            return
        self._sent.add(task.id, command)
        try:
            await self._loop.run_in_executor(self._sending, self._sender.send, task)
        except Refused as error:
            await self._answer(Report(command, reason=str(error), retry=False), via=delivery.via)
        except BaseException:
            self._sent.forget(task.id)  # else the delivery that comes again would be taken for a repeat
            raise

    def _task_of(self, command: Message) -> Task:
        return make_task(
            self._app,
            command,
            read_destination(command),
            reply_exchange=self._address.replies.name,
            default_queue=self._settings.queue,
        )

    def _is_late(self, command: Message) -> bool:
        deadline = None if command.prazo is None else from_iso(command.prazo)
        return deadline is not None and deadline <= self._clock.now()

    def _note_away(self, trouble: str) -> None:
        if self._trouble is None:
            self._telemetry.emit(LoopFailed("ponte celery", trouble))
        self._trouble = trouble

    # -- reports, in --------------------------------------------------------------------------------------------

    def _listen(self, listener: Listener, connection: kombu.Connection) -> None:
        """In a thread of its own. Each report is acked when its answer is confirmed."""
        owed: deque[tuple[Future[None], kombu.Message]] = deque()

        def arrived(message: kombu.Message) -> None:
            taking = self._take_report(message.body, message.content_type, message.headers.get("task"))
            owed.append((self._on_loop(taking), message))

        channel = connection.channel()
        self._address.replies(channel).declare()
        consumer = kombu.Consumer(channel, [self._address.replies], on_message=arrived, prefetch_count=PREFETCH)
        with consumer:
            listener.is_ready()
            while not listener.stopping:
                listener.drain(connection, _BRISK if owed else _IDLE)
                _settle(owed)
        with contextlib.suppress(TimeoutError):
            for taking, message in owed:  # those that are left come again
                taking.result(STOP_GRACE / 2)
                message.ack()

    async def _take_report(self, body: bytes | str, content_type: str | None, task: object) -> None:
        try:
            report = read_report(body, content_type, task)
        except InvalidInput as error:
            raw = body if isinstance(body, bytes) else body.encode(errors="replace")
            reason = f"on Celery's queue {self._address.replies.name}: {error}"
            self._telemetry.emit(DeadLettered(self._queue, reason))
            await self._publish(Outgoing(self._queue, raw, reason=reason))
            return
        await self._answer(report)

    async def _answer(self, report: Report, *, via: str | None = None) -> None:
        """Returns once it is confirmed."""
        command = report.command
        self._sent.forget(task_id_of(command))
        queue = naming.COLLECTOR_PREFIX if command.tipo_evento == naming.START_COLLECT else _QUEUE
        if report.reason is None:
            body = self._writer.success(queue, command, report.value)
        else:
            body = self._writer.failure(queue, command, [report.reason], retry=report.retry)
        reply_to = self._writer.reply_queue(command)
        try:
            await self._publish(Outgoing(reply_to, body, prefer=via))
        except BrokerError as error:  # refused: the run is told that, in fewer bytes
            reason = f"the broker refused the answer: {error}"
            short = self._writer.failure(queue, command, [reason], retry=False)
            try:
                await self._publish(Outgoing(reply_to, short))
            except BrokerError:
                self._telemetry.emit(LoopFailed("ponte celery", f"run {command.correlation_id}: {reason}"))

    async def _publish(self, message: Outgoing) -> None:
        """However long our broker is away. Raises BrokerError when it refuses."""
        failures = 0
        while True:
            try:
                await self._broker.publish([message])
                return
            except BrokerUnavailable as error:
                failures += 1
                self._telemetry.emit(LoopFailed("ponte celery", f"an answer waits: {error}"))
            await self._pause(failures)

    def _ended(self, report: Report) -> None:
        self._on_loop(self._answer(report))

    def _retried(self, command: Message, text: str) -> None:
        body = self._writer.progress(command, 0.0, text)
        self._on_loop(self._tell_once(Outgoing(self._writer.reply_queue(command), body)))

    async def _tell_once(self, message: Outgoing) -> None:
        """Progress that cannot be told is not worth waiting for."""
        with contextlib.suppress(BrokerError):
            await self._broker.publish([message])

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _pause(self, failures: int) -> None:
        await asyncio.sleep(_PATIENCE.delay(failures, self._entropy.jitter()))


def _settle(owed: "deque[tuple[Future[None], kombu.Message]]") -> None:
    """Acks what was answered; what failed stays, and comes again with the next connection."""
    for _ in range(len(owed)):
        taking, message = owed.popleft()
        if not taking.done():
            owed.append((taking, message))
        elif taking.cancelled() or taking.exception() is not None:
            raise RuntimeError("a report could not be taken") from (None if taking.cancelled() else taking.exception())
        else:
            message.ack()
