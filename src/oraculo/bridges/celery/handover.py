"""Commands, out: each is acked once Celery's broker has confirmed its task."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from celery import Celery

from oraculo.bridges.celery.answers import DUTY, TaskAnswers
from oraculo.bridges.celery.connections import Address, CeleryAway, QueueAway, TaskRefused, TaskSender
from oraculo.bridges.celery.events import SentTasks
from oraculo.bridges.celery.reports import Report, reason_of
from oraculo.bridges.celery.tasks import ReturnAddress, Task, address_of, make_task, read_destination
from oraculo.bridges.ended_runs import EndedRuns
from oraculo.clients.subscription import LONGEST_HELD, Backoff, QueueIntake, Subscription
from oraculo.errors import BrokerError, InvalidInput
from oraculo.pipeline import bridges
from oraculo.pipeline.bridges import Bridge
from oraculo.ports.broker import Broker, Delivery
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.settings import CelerySettings
from oraculo.wire.answers import describe
from oraculo.wire.message import HIGHEST_PRIORITY, Message, decode_message, priority_of
from oraculo.wire.timestamps import from_iso

PREFETCH = 100  # commands held, and reports held
STOP_GRACE = 5.0
QUEUE = bridges.QUEUES[bridges.CELERY]


class _Batch:
    """Commands that were taken together. Those that are with Celery are acked together."""

    def __init__(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        self.subscription = subscription
        self.waiting = deque(deliveries)
        self._done: list[Delivery] = []

    def first_is_done(self) -> None:
        self._done.append(self.waiting.popleft())

    async def let_go_of_ended(self, ended: EndedRuns) -> None:
        """Commands whose runs have ended are done."""
        if not ended.had_failures:  # then nothing need be read twice
            return
        runs = await ended.among(command for _, command in self._readable)
        over = {delivery.token for delivery, command in self._readable if command.correlation_id in runs}
        self._done += [delivery for delivery in self.waiting if delivery.token in over]
        self.waiting = deque(delivery for delivery in self.waiting if delivery.token not in over)

    @functools.cached_property
    def _readable(self) -> list[tuple[Delivery, Message]]:
        found: list[tuple[Delivery, Message]] = []
        for delivery in self.waiting:
            with contextlib.suppress(InvalidInput):  # it is told of when its turn has come
                found.append((delivery, decode_message(delivery.body)))
        return found

    async def settle(self) -> None:
        done, self._done = self._done, []
        await self.subscription.ack(done)


class TaskHandover:
    """`trouble`: why Celery cannot be given tasks now."""

    def __init__(
        self,
        app: Celery,
        settings: CelerySettings,
        address: Address,
        answers: TaskAnswers,
        sent: SentTasks,
        ended: EndedRuns,
        *,
        broker: Broker,
        queue: str,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._app = app
        self._settings = settings
        self._address = address
        self._answers = answers
        self._sent = sent
        self._ended = ended
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry
        self._sender = TaskSender(address)
        self._intake = QueueIntake(broker, queue, PREFETCH, self._take, entropy, self._tell_trouble)
        self.trouble: str | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "oraculo-celery-out")
        self._reading = asyncio.create_task(self._intake.run(), name="oraculo-celery-commands")

    async def stop(self) -> None:
        """A task that is being sent is seen through: given back, it would run twice."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._sending.acquire(), STOP_GRACE)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._intake.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await self._loop.run_in_executor(self._thread, self._sender.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _take(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        """Until all are with Celery."""
        batch = _Batch(subscription, deliveries)
        try:
            await self._hand_over_all(batch)
        finally:
            await batch.settle()  # whatever became of the others, these are with Celery

    async def _hand_over_all(self, batch: _Batch) -> None:
        """What waits for its queue lets the others pass."""
        backoff, passed_over = Backoff(self._entropy, LONGEST_HELD), 0
        await self._let_go_of_ended(batch)
        while batch.waiting and not batch.subscription.closed:
            try:
                async with self._sending:
                    await self._hand_over(batch, batch.waiting[0])
            except CeleryAway as error:
                self._note_away(str(error))
                if isinstance(error, QueueAway):
                    batch.waiting.rotate(-1)
                    passed_over += 1
                    if passed_over < len(batch.waiting):
                        continue
                passed_over = 0
                # What was sent must not be sent again, nor what waits be given to another who cannot send it either.
                await batch.settle()
                if not await batch.subscription.extend(list(batch.waiting)):
                    await batch.subscription.close()
                await backoff.pause()
                await self._let_go_of_ended(batch)
            else:
                batch.first_is_done()
                backoff.reset()
                if not passed_over or not batch.waiting:  # else there is one that its queue did not take
                    self.trouble = None

    async def _let_go_of_ended(self, batch: _Batch) -> None:
        await batch.let_go_of_ended(self._ended)
        if not batch.waiting:  # nothing is left whose sending would show that all is well again
            self.trouble = None

    async def _hand_over(self, batch: _Batch, delivery: Delivery) -> None:
        """Raises CeleryAway. What can go nowhere is answered, or quarantined when nobody can be told."""
        try:
            command = decode_message(delivery.body)
            address = address_of(command, delivery.via)
            destination = read_destination(command)
            task = self._task_of(command, destination, address)
        except Exception as error:  # noqa: BLE001 - what cannot be read must not come again for ever
            await self._quarantine(batch, delivery, reason_of(error))
            return
        if task.id in self._sent:  # a repeat: its task is with Celery already
            return
        if fault := self._settings.allow.fault(destination, command.tarefa or ""):
            await self._refuse(batch, delivery, address, fault)
            return
        if self._is_late(command):
            await self._refuse(batch, delivery, address, "deadline passed before Celery could be given the task")
            return
        self._sent.add(task.id, address)
        try:
            await self._loop.run_in_executor(self._thread, self._sender.send, task)
        except TaskRefused as error:
            await self._refuse(batch, delivery, address, str(error))
        except BaseException:
            self._sent.forget(task.id)  # else the delivery that comes again would be taken for a repeat
            raise

    async def _refuse(self, batch: _Batch, delivery: Delivery, address: ReturnAddress, reason: str) -> None:
        try:
            await self._answers.give(Report(address, reason=reason, retry=False))
        except BrokerError as error:
            await self._quarantine(batch, delivery, f"{reason}; its run could not be told: {error}")

    async def _quarantine(self, batch: _Batch, delivery: Delivery, reason: str) -> None:
        await batch.settle()  # before what may end the subscription
        if await batch.subscription.dead_letter(delivery, reason):
            self._telemetry.emit(DeadLettered(QUEUE, reason))

    def _task_of(self, command: Message, destination: Bridge, address: ReturnAddress) -> Task:
        return make_task(
            self._app,
            command,
            destination,
            address=address,
            reply_exchange=self._address.replies.name,
            default_queue=self._settings.queue,
            priority=self._priority(command),
        )

    def _priority(self, command: Message) -> int:
        """Return the priority for Celery's broker. On Redis 0 is the highest, and that of tasks that name none."""
        if not self._address.is_redis:
            return priority_of(command)
        return HIGHEST_PRIORITY - priority_of(command) if self._settings.redis_priority else 0

    def _is_late(self, command: Message) -> bool:
        deadline = None if command.prazo is None else from_iso(command.prazo)
        return deadline is not None and deadline <= self._clock.now()

    def _note_away(self, trouble: str) -> None:
        self._ended.note_failure()
        if self.trouble is None:
            self._telemetry.emit(LoopFailed(DUTY, trouble))
        self.trouble = trouble

    def _tell_trouble(self, _queue: str, what: str, error: Exception) -> None:
        self._telemetry.emit(LoopFailed(DUTY, f"{what}: {describe(error)}"))
