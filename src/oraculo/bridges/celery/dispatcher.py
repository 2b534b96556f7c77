"""Takes commands from our broker and sends their tasks. A command is acked once Celery's broker confirmed its task."""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from oraculo.bridges.celery.answers import TaskAnswers
from oraculo.bridges.celery.connections import CeleryBroker, CeleryQueueUnavailable, CeleryUnavailable, TaskRefused
from oraculo.bridges.celery.listener import STOP_GRACE
from oraculo.bridges.celery.replies import Outcome, text_of
from oraculo.bridges.celery.sender import TaskSender
from oraculo.bridges.celery.tasks import CeleryTask, ReturnAddress, address_of, make_task, read_destination
from oraculo.clients.subscription import LONGEST_HELD, Backoff, QueueIntake, Subscription
from oraculo.errors import BrokerError
from oraculo.pipeline import bridges
from oraculo.pipeline.bridges import Bridge
from oraculo.ports.broker import Broker, Delivery
from oraculo.ports.clock import Clock, Entropy
from oraculo.settings import CelerySettings
from oraculo.wire.message import HIGHEST_PRIORITY, Message, decode_message, priority_of
from oraculo.wire.timestamps import from_iso

_PREFETCH = 100


class _Command(NamedTuple):
    delivery: Delivery
    message: Message
    destination: Bridge
    address: ReturnAddress
    task: CeleryTask


class TaskDispatcher:
    """The bridge's way out. `trouble` says why Celery's broker takes no tasks now."""

    def __init__(
        self,
        settings: CelerySettings,
        celery_broker: CeleryBroker,
        answers: TaskAnswers,
        *,
        broker: Broker,
        prefix: str,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._settings = settings
        self._celery_broker = celery_broker
        self._answers = answers
        self._clock = clock
        self._entropy = entropy
        self._sender = TaskSender(celery_broker)
        queue = prefix + bridges.QUEUES[bridges.CELERY]
        self._intake = QueueIntake(broker, queue, _PREFETCH, self._take, entropy, self._report)
        self.trouble: str | None = None

    def start(self) -> None:
        self._sending = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "oraculo-celery-out")
        self._reading = asyncio.create_task(self._intake.run(), name="oraculo-celery-commands")

    async def stop(self) -> None:
        with contextlib.suppress(TimeoutError):  # a task in the middle of its sending would run twice
            await asyncio.wait_for(self._sending.acquire(), STOP_GRACE)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._intake.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _take(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        """Send the tasks of these commands, and return when Celery's broker has them all."""
        waiting: list[_Command] = []
        for delivery in deliveries:
            try:
                waiting.append(self._read(delivery))
            except Exception as error:  # noqa: BLE001 - an unreadable command must not come again for ever
                await self._dead_letter(subscription, delivery, text_of(error))
        backoff = Backoff(self._entropy, LONGEST_HELD)
        while waiting and not subscription.closed:
            left = await self._send_all(subscription, waiting)
            if not left:
                return
            if len(left) < len(waiting):
                backoff.reset()
            if not await subscription.extend([command.delivery for command in left]):
                await subscription.close()  # another bridge may have these commands by now
            await backoff.pause()
            waiting = left

    def _read(self, delivery: Delivery) -> _Command:
        message = decode_message(delivery.body)
        address = address_of(message, delivery.via)
        destination = read_destination(message)
        task = make_task(
            message,
            destination,
            address=address,
            reply_exchange=self._celery_broker.replies.name,
            default_queue=self._settings.queue,
            priority=self._priority(message),
        )
        return _Command(delivery, message, destination, address, task)

    async def _send_all(self, subscription: Subscription, waiting: Sequence[_Command]) -> list[_Command]:
        """Try each task once, and return the commands that must wait. A full queue lets others pass."""
        left, trouble = list(waiting), None
        for command in waiting:
            if subscription.closed:
                break
            try:
                if await self._send(subscription, command):
                    await subscription.ack([command.delivery])
                left.remove(command)
            except CeleryUnavailable as error:
                trouble = str(error)
                if not isinstance(error, CeleryQueueUnavailable):
                    break
        if trouble is not None and self.trouble is None:
            self._answers.report(trouble)
        self.trouble = trouble
        return left

    async def _send(self, subscription: Subscription, command: _Command) -> bool:
        """Send a task, or answer its command if it cannot be sent. Raises CeleryUnavailable.

        False: the answer was refused too, and the command is among the dead letters.
        """
        task, sent = command.task, self._answers.sent
        if task.id in sent:  # a repeat of a command whose task Celery has
            return True
        if refusal := self._refusal_of(command):
            return await self._refuse(subscription, command, refusal)
        sent[task.id] = command.address
        try:
            async with self._sending:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.send, task)
        except TaskRefused as error:
            return await self._refuse(subscription, command, str(error))
        except BaseException:
            sent.pop(task.id, None)  # else the next delivery would count as a repeat
            raise
        return True

    def _refusal_of(self, command: _Command) -> str | None:
        if fault := self._settings.allow.fault(command.destination, command.message.tarefa or ""):
            return fault
        deadline = None if command.message.prazo is None else from_iso(command.message.prazo)
        is_late = deadline is not None and deadline <= self._clock.now()
        return "deadline passed before Celery could be given the task" if is_late else None

    async def _refuse(self, subscription: Subscription, command: _Command, reason: str) -> bool:
        try:
            await self._answers.give(Outcome(command.address, reason=reason, retry=False))
        except BrokerError as error:
            await self._dead_letter(subscription, command.delivery, f"{reason}; the answer was refused: {error}")
            return False
        return True

    async def _dead_letter(self, subscription: Subscription, delivery: Delivery, reason: str) -> None:
        if await subscription.dead_letter(delivery, reason):
            self._answers.note_dead_letter(reason)

    def _priority(self, message: Message) -> int:
        """Return the priority as Celery's broker has it. On Redis 0 is the highest, and the default of tasks."""
        if not self._celery_broker.is_redis:
            return priority_of(message)
        return HIGHEST_PRIORITY - priority_of(message) if self._settings.redis_priority else 0

    def _report(self, _queue: str, what: str, error: Exception) -> None:
        self._answers.report(f"{what}: {text_of(error)}")
