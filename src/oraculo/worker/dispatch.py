"""The path of a command to its answer: read it, find repeats, wait for a free place, call the handler."""

import asyncio
import contextvars
import functools
import inspect
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Executor

import msgspec

from oraculo.clients.subscription import Subscription
from oraculo.errors import InvalidInput, InvalidMessage, ObjectsError
from oraculo.ports.broker import Delivery
from oraculo.ports.clock import Clock, Entropy
from oraculo.wire import naming
from oraculo.wire.answers import NOT_IN_TIME
from oraculo.wire.message import Message, decode_message
from oraculo.wire.naming import shortened
from oraculo.wire.timestamps import from_iso
from oraculo.worker.answer_memory import Identity, RememberedAnswers, identity_of
from oraculo.worker.answers import AnswerWriter, DoNotRetry, answered_failure, as_answer, failure_of, traceback_of
from oraculo.worker.context import Context
from oraculo.worker.handlers import payload_fault
from oraculo.worker.jobs import Job, Lane, ReceivedCommand
from oraculo.worker.large_results import LargeAnswers, may_refer
from oraculo.worker.logs import FailureLog, WorkerLog
from oraculo.worker.outbox import AnswerOutbox
from oraculo.worker.poison import Suspects, trusted

_log = WorkerLog()
_STOPPING = "the worker stopped before it began this command"
TOO_LATE = "deadline passed"

# Seconds after a deadline until its handler is given up. The engine's own `timeout` of the task comes first.
DEADLINE_GRACE = 1.0
# Handlers that were given up and still run, for each place that others take over.
OVERDUE_PER_PLACE = 4


class Dispatcher:
    """The scheduler of jobs. Lanes take turns; `limit` bounds all jobs, and each lane has a limit of its own."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        limit: int,
        outbox: AnswerOutbox,
        writer: AnswerWriter,
        remembered: RememberedAnswers,
        large: LargeAnswers,
        threads: Executor,
        clock: Clock,
        entropy: Entropy,
        delivery_limit: int,
        tracebacks: bool,
    ) -> None:
        self._lanes = deque(lanes)
        self._sends_tracebacks = tracebacks
        self._limit = limit
        self._outbox = outbox
        self._writer = writer
        self._remembered = remembered
        self._large = large
        self._threads = threads
        self._clock = clock
        self._failures = FailureLog()
        self._suspects = Suspects(trusted(delivery_limit), entropy, self._begin)
        self._unfinished: dict[Identity, Job] = {}
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._overdue: set[Job] = set()  # given up and answered, but still running
        self._most_overdue = limit * OVERDUE_PER_PLACE
        self._aborting = False
        self._loop = asyncio.get_running_loop()
        self._surroundings = contextvars.copy_context()

    async def receive(self, lane: Lane, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        """Take a batch. A message that is no command becomes a dead letter."""
        if lane.subscription is not subscription:
            lane.subscription = subscription
            self._drop_given_back(lane)
        for delivery in deliveries:
            try:
                self._accept(lane, subscription, delivery)
            except InvalidInput as error:
                if await subscription.dead_letter(delivery, str(error)):
                    _log.warning("dead-lettered", queue=lane.queue, reason=str(error))
        self._start_waiting()

    def _drop_given_back(self, lane: Lane) -> None:
        """Drop the waiting jobs of lost consumers: their commands are delivered again."""
        waiting, lane.backlog = lane.backlog, deque[Job]()
        for job in waiting:
            if job.was_given_back:
                self._close(job)
            else:
                lane.backlog.append(job)

    def _accept(self, lane: Lane, subscription: Subscription, delivery: Delivery) -> None:
        command = read_command(delivery.body)
        received = ReceivedCommand(subscription, delivery, command)
        identity = identity_of(command)
        if identity is None or not self._is_repeat(identity, received):
            deadline = None if command.prazo is None else from_iso(command.prazo)
            job = Job(lane, command, [received], identity, deadline)
            if not self._suspects.takes(job):
                lane.backlog.append(job)
            if identity is not None:
                self._unfinished[identity] = job

    def _is_repeat(self, identity: Identity, received: ReceivedCommand) -> bool:
        """Return whether the command is a repeat. It gets the answer of the first, now or when it is ready."""
        if (job := self._unfinished.get(identity)) is not None:
            job.add_delivery(received)
            return True
        if (body := self._remembered.get(identity)) is not None:
            self._outbox.answer(received, body)
            return True
        return False

    def _begin(self, job: Job) -> None:
        job.lane.backlog.appendleft(job)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._has_place() and (lane := self._next_lane()) is not None:
            job = lane.backlog.popleft()
            if job.was_given_back:
                self._close(job)
            else:
                lane.running += 1
                # A copy of the context: one job's end may start the next, which must not see its variables.
                self._tasks[job] = self._loop.create_task(self._perform(job), context=self._surroundings.copy())

    def _has_place(self) -> bool:
        running = len(self._tasks)
        return running < self._limit or running - min(len(self._overdue), self._most_overdue) < self._limit

    def _next_lane(self) -> Lane | None:
        for turn, lane in enumerate(self._lanes, start=1):
            if lane.backlog and lane.running < lane.limit:
                self._lanes.rotate(-turn)
                return lane
        return None

    async def _perform(self, job: Job) -> None:
        alarm = self._set_alarm(job)
        try:
            body = await self._answer(job)
            if not job.ended:
                self._finish(job, body)
        except BaseException as error:  # a command without an answer would keep its place in the prefetch
            if isinstance(error, asyncio.CancelledError) and (self._aborting or job.ended):
                raise
            self._fail(job, error)
        finally:
            if alarm is not None:
                alarm.cancel()
            self._leave(job)
            self._overdue.discard(job)
            del self._tasks[job]
            self._start_waiting()

    def _set_alarm(self, job: Job) -> asyncio.TimerHandle | None:
        if job.deadline is None:
            return None
        return self._loop.call_later(job.deadline - self._clock.now() + DEADLINE_GRACE, self._give_up, job)

    def _give_up(self, job: Job) -> None:
        """Answer a job whose deadline passed, free its place, and cancel it if possible.

        A handler in a thread runs on; the number of such handlers is bounded.
        """
        _log_of(job).warning("handler given up: its deadline passed", handler=job.lane.handler.name)
        self._finish(job, self._writer.failure(job.lane.queue, job.command, [TOO_LATE], retry=False))
        self._leave(job)
        self._overdue.add(job)
        if not job.in_thread:
            self._tasks[job].cancel()
        if len(self._overdue) > self._most_overdue:
            _log.error("too many handlers outlive their deadline; no others start in their place until some end")
        self._start_waiting()

    def _leave(self, job: Job) -> None:
        if not job.ended:
            self._close(job)
            job.lane.running -= 1

    def _finish(self, job: Job, body: bytes) -> None:
        if job.identity is not None:
            self._remembered.put(job.identity, body)
        self._outbox.last_report(job)
        for received in job.received:
            self._outbox.answer(received, body)

    def _close(self, job: Job) -> None:
        job.ended = True
        if job.identity is not None:
            self._unfinished.pop(job.identity, None)

    async def _answer(self, job: Job) -> bytes:
        if job.deadline is not None and job.deadline <= self._clock.now():
            return self._refuse(job, NOT_IN_TIME)
        given: bytes | msgspec.Raw = job.command.payload
        try:
            if may_refer(given):
                given = await self._large.resolved(job.command)
            payload = job.lane.handler.payload.decode(given)
        except ObjectsError as error:
            return self._unreadable(job, error)
        except msgspec.DecodeError as error:
            return self._refuse(job, payload_fault(error))
        value = as_answer(await self._call(job, payload))
        body = self._writer.success(job.lane.queue, job.command, value)
        if (reason := answered_failure(value, body)) is not None:
            _log_of(job).error("handler failed", handler=job.lane.handler.name, reason=shortened(reason))
        return body if len(body) <= self._large.threshold else await self._large.shortened(body)

    async def _call(self, job: Job, payload: object) -> object:
        handler = job.lane.handler
        arguments = (payload, self._context(job)) if handler.wants_context else (payload,)
        if handler.is_async:
            return await handler.function(*arguments)
        value = await self._call_in_thread(job, arguments)
        # A plain function may return a coroutine, as one wrapped by another decorator does.
        return await value if inspect.isawaitable(value) else value

    async def _call_in_thread(self, job: Job, arguments: tuple[object, ...]) -> object:
        call = functools.partial(contextvars.copy_context().run, _guarded, job, arguments)
        try:
            return await self._loop.run_in_executor(self._threads, call)
        finally:
            job.in_thread = False

    def _context(self, job: Job) -> Context:
        command = job.command
        job.context = Context(
            correlation_id=command.correlation_id,
            queue=job.lane.queue,
            tarefa=command.tarefa,
            tentativa=command.tentativa,
            deadline=job.deadline,
            traceparent=command.traceparent,
            clock=self._clock,
            announce=functools.partial(self._outbox.announce, job),
        )
        return job.context

    def _refuse(self, job: Job, reason: str) -> bytes:
        _log_of(job).warning("command refused", reason=reason)
        return self._writer.failure(job.lane.queue, job.command, [reason], retry=False)

    def _unreadable(self, job: Job, error: ObjectsError) -> bytes:
        """Fail the attempt. Another one may find the object store, or a worker with its URL."""
        _log_of(job).error("the results that the command needs cannot be read", reason=str(error))
        return self._writer.failure(job.lane.queue, job.command, [str(error)])

    def _fail(self, job: Job, error: BaseException) -> None:
        """Answer with the failure that the exception stands for, and log it."""
        reason, retry = failure_of(error)
        on_purpose = isinstance(error, DoNotRetry)
        if not job.ended:
            trace = traceback_of(error) if self._sends_tracebacks and not on_purpose else None
            self._finish(job, self._writer.failure(job.lane.queue, job.command, [reason], retry=retry, traceback=trace))
        self._failures.log(_log_of(job), job.lane.handler.name, error, reason, on_purpose=on_purpose)

    async def give_back_waiting(self) -> None:
        """Give commands that have not begun to other workers. No job starts meanwhile: the lanes are emptied first."""
        waiting = [*self._suspects.dismiss(), *(job for lane in self._lanes for job in lane.backlog)]
        for lane in self._lanes:
            lane.backlog.clear()
        held: defaultdict[Subscription, list[Delivery]] = defaultdict(list)
        for job in waiting:
            self._close(job)
            for received in job.received:
                held[received.subscription].append(received.delivery)
        # Together: a silent broker takes its timeout for each queue.
        await asyncio.gather(*(_give_back(subscription, deliveries) for subscription, deliveries in held.items()))

    async def wait(self, timeout: float) -> None:
        """Wait until every job that owes an answer has ended, or the time is up."""
        owing = [task for job, task in self._tasks.items() if not job.ended]
        if owing:
            await asyncio.wait(owing, timeout=timeout)

    async def abort(self, timeout: float) -> None:
        """Cancel what still runs. It gets no answer, so its commands are given back when their consumer closes."""
        self._aborting = True
        for job, task in self._tasks.items():
            if not job.ended:
                _log_of(job).warning("cancelled by the worker's stop; the command is given back")
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout)


async def _give_back(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    for delivery in deliveries:
        await subscription.give_back(delivery, _STOPPING)


def read_command(body: bytes) -> Message:
    """Decode a command. Raises InvalidInput."""
    message = decode_message(body)
    if message.tipo_evento not in naming.COMMAND_EVENTS:
        wrong, right = naming.shown(message.tipo_evento), " and ".join(naming.COMMAND_EVENTS)
        raise InvalidMessage.at("tipo_evento", f"{wrong} is not a command; a worker takes {right}")
    return message


def _guarded(job: Job, arguments: tuple[object, ...]) -> object:
    job.in_thread = True  # before, while the call waits for a thread, it can be cancelled
    try:
        return job.lane.handler.function(*arguments)
    except StopIteration as error:  # a future cannot carry it, and the command would hang
        raise RuntimeError("the handler raised StopIteration") from error


def _log_of(job: Job) -> WorkerLog:
    command = job.command
    return _log.bind(
        correlation_id=command.correlation_id,
        tarefa=command.tarefa,
        tentativa=command.tentativa,
        fila=job.lane.queue,
    )
