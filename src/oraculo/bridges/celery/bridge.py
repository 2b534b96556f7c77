"""`CeleryBridge`: commands out to Celery's workers, reports back in.

A command is acked once Celery's broker has confirmed the task; a report is acked there once its answer is confirmed
here. In between, all that is needed rests in one of the two brokers: the bridge may be killed at any moment.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import kombu
from celery import Celery

from oraculo.bridges.celery.connections import Address, CeleryAway, Listener, QueueAway, Refused, TaskSender
from oraculo.bridges.celery.events import SentTasks, TaskEvents
from oraculo.bridges.celery.reports import Report, read_report
from oraculo.bridges.celery.tasks import Task, make_task, read_destination, task_id_of
from oraculo.core import bridge as bridges
from oraculo.core import naming
from oraculo.core.answer_writer import AnswerWriter, describe
from oraculo.core.message import Message, decode_message
from oraculo.core.retry import RetryPolicy
from oraculo.core.timestamps import from_iso
from oraculo.errors import BrokerError, BrokerUnavailable, OraculoError
from oraculo.ports.broker import Broker, Consumer, Delivery, Outgoing
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.settings import CelerySettings

REPLIES = "oraculo-respostas"  # the exchange and the queue on Celery's broker, with our prefix
PREFETCH = 100  # commands held, and reports held
MOST_KEPT = 64 * 1024  # bytes of an unreadable report that our broker refuses to take whole
BIND_EVERY = 5.0  # seconds; a broker may lose what it was told, and nobody hears of that
STOP_GRACE = 5.0
_QUEUE = bridges.QUEUES[bridges.CELERY]
_DUTY = "ponte celery"
_BRISK, _IDLE = 0.005, 0.5  # seconds for which a thread waits for more, when it owes acks and when it does not
_PATIENCE = RetryPolicy(backoff=0.1, max_backoff=2.0)

# What is done about a report, and the report, by its tag.
_Owed = dict[Any, tuple["Future[None]", kombu.Message]]


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
        if settings.key_prefix:  # it speaks to the workers by connections of its own
            self._app.conf.broker_transport_options = {"global_keyprefix": settings.key_prefix}
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
        self._threads = [Listener("oraculo-celery-in", self._address, self._listen, self._tell_trouble)]
        if self._settings.events:
            events = TaskEvents(self._app, self._sent, self._ended, self._retried)
            self._threads.append(Listener("oraculo-celery-events", self._address, events.listen, self._tell_trouble))
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
                self._telemetry.emit(LoopFailed(_DUTY, f"{type(error).__name__}: {error}"))
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
        """Until all are with Celery. What waits for its queue lets the others pass."""
        waiting = deque(deliveries)
        done: list[Delivery] = []
        failures = passed_over = 0
        while waiting and self._started:
            try:
                await self._hand_over(consumer, waiting[0])
            except CeleryAway as error:
                self._note_away(str(error))
                if isinstance(error, QueueAway):
                    waiting.rotate(-1)
                    passed_over += 1
                    if passed_over < len(waiting):
                        continue
                failures, passed_over = failures + 1, 0
                # What was sent must not be sent again, nor what waits be given to another who cannot send it either.
                await consumer.ack(done)
                done = []
                await consumer.extend(list(waiting))
                await self._pause(failures)
            except BaseException:
                await consumer.ack(done)  # whatever became of this one, they are with Celery
                raise
            else:
                failures = 0
                done.append(waiting.popleft())
                if not passed_over or not waiting:  # else there is one that its queue did not take
                    self._trouble = None
        await consumer.ack(done)

    async def _hand_over(self, consumer: Consumer, delivery: Delivery) -> None:
        """Raises CeleryAway. What can go nowhere is answered, or quarantined when nobody can be told."""
        try:
            command = decode_message(delivery.body)
            task = self._task_of(command)
        except Exception as error:  # noqa: BLE001 - what cannot be read must not come again for ever
            await self._quarantine(consumer, delivery, _reason_of(error))
            return
        if task.id in self._sent:  # a repeat: its task is with Celery already
            return
        if self._is_late(command):
            await self._refuse(consumer, delivery, command, "deadline passed before Celery could be given the task")
            return
        self._sent.add(task.id, command)
        try:
            await self._loop.run_in_executor(self._sending, self._sender.send, task)
        except Refused as error:
            await self._refuse(consumer, delivery, command, str(error))
        except BaseException:
            self._sent.forget(task.id)  # else the delivery that comes again would be taken for a repeat
            raise

    async def _refuse(self, consumer: Consumer, delivery: Delivery, command: Message, reason: str) -> None:
        try:
            await self._answer(Report(command, reason=reason, retry=False), via=delivery.via)
        except BrokerError as error:
            await self._quarantine(consumer, delivery, f"{reason}; its run could not be told: {error}")

    async def _quarantine(self, consumer: Consumer, delivery: Delivery, reason: str) -> None:
        self._telemetry.emit(DeadLettered(_QUEUE, reason))
        await consumer.dead_letter(delivery, reason)

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
            self._telemetry.emit(LoopFailed(_DUTY, trouble))
        self._trouble = trouble

    # -- reports, in --------------------------------------------------------------------------------------------

    def _listen(self, listener: Listener, connection: kombu.Connection) -> None:
        """In a thread of its own. Each report is acked when its answer is confirmed: it is held meanwhile, however long
        that takes, and not given back."""
        owed: _Owed = {}

        def arrived(message: kombu.Message) -> None:
            if not _is_held(message, owed):
                taking = self._take_report(message.body, message.content_type, message.headers.get("task"))
                owed[message.delivery_tag] = (self._on_loop(taking), message)

        def broken(message: kombu.Message, error: Exception) -> None:
            if not _is_held(message, owed):
                setting_apart = self._set_apart(message.body, _reason_of(error))
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

    async def _take_report(self, body: bytes | str, content_type: str | None, task: object) -> None:
        """Whatever a report is, it is answered or set apart: one that raised would come again for ever."""
        try:
            await self._answer(read_report(body, content_type, task))
        except Exception as error:  # noqa: BLE001
            await self._set_apart(body, _reason_of(error))

    async def _set_apart(self, body: bytes | str, why: str) -> None:
        """To the dead letters of our own queue."""
        raw = body.encode(errors="replace") if isinstance(body, str) else bytes(body)
        reason = f"on Celery's queue {self._address.replies.name}: {why}"
        self._telemetry.emit(DeadLettered(_QUEUE, reason))
        failures = 0
        while True:
            try:
                await self._publish(Outgoing(self._queue, raw, reason=reason))
                return
            except Exception as error:  # noqa: BLE001 - it stays where it is, and is told again
                failures += 1
                raw = raw[:MOST_KEPT]
                self._telemetry.emit(LoopFailed(_DUTY, f"a dead letter was refused: {_reason_of(error)}"))
            await self._pause(failures)

    async def _answer(self, report: Report, *, via: str | None = None) -> None:
        """Returns once it is confirmed. Raises BrokerError when not even its refusal can be told."""
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
            await self._publish(Outgoing(reply_to, self._writer.failure(queue, command, [reason], retry=False)))

    async def _publish(self, message: Outgoing) -> None:
        """However long our broker is away. Raises BrokerError when it refuses."""
        failures = 0
        while True:
            try:
                await self._broker.publish([message])
                return
            except BrokerUnavailable as error:
                failures += 1
                self._telemetry.emit(LoopFailed(_DUTY, f"an answer waits: {error}"))
            await self._pause(failures)

    def _ended(self, report: Report) -> None:
        self._on_loop(self._answer_event(report))

    async def _answer_event(self, report: Report) -> None:
        try:
            await self._answer(report)
        except Exception as error:  # noqa: BLE001 - an event has no queue in which it could rest: the deadline is left
            told = f"run {report.command.correlation_id}: {_reason_of(error)}"
            self._telemetry.emit(LoopFailed(_DUTY, told))

    def _retried(self, command: Message, text: str) -> None:
        body = self._writer.progress(command, 0.0, text)
        self._on_loop(self._tell_once(Outgoing(self._writer.reply_queue(command), body)))

    async def _tell_once(self, message: Outgoing) -> None:
        """Progress that cannot be told is not worth waiting for."""
        with contextlib.suppress(BrokerError):
            await self._broker.publish([message])

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _tell_trouble(self, trouble: str) -> None:
        """Called in a listener's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would hear this
            self._loop.call_soon_threadsafe(self._telemetry.emit, LoopFailed(_DUTY, trouble))

    async def _pause(self, failures: int) -> None:
        await asyncio.sleep(_PATIENCE.delay(failures, self._entropy.jitter()))


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


def _reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, OraculoError) else describe(error)
