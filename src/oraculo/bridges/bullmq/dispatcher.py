"""Adds a job to a BullMQ queue for each command. A command is acked once its job, with its record, is in Redis."""

from collections.abc import Sequence

import msgspec
import structlog

from oraculo.bridges.bullmq.events import Events
from oraculo.bridges.bullmq.job import NewJob, Record, job_id_of, record_of
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.results import JobReport, Results
from oraculo.bridges.bullmq.server import BullmqRedis, is_passing
from oraculo.bridges.bullmq.sweep import Sweep
from oraculo.clients.subscription import LONGEST_HELD, Backoff, Subscription
from oraculo.errors import InvalidInput, InvalidMessage
from oraculo.pipeline.bridge_rules import BullmqAllow
from oraculo.pipeline.bridges import BULLMQ, Bridge
from oraculo.ports.broker import Delivery
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeadLettered, Telemetry
from oraculo.wire import naming
from oraculo.wire.answers import NOT_IN_TIME, describe
from oraculo.wire.message import Message, decode_message, priority_of
from oraculo.wire.naming import QueueNames

_DEFAULT_NAME = "oraculo"  # of a job whose command names no task

_log = structlog.get_logger("oraculo.bullmq")


class Dispatcher:
    def __init__(
        self,
        server: BullmqRedis,
        ledger: Ledger,
        events: Events,
        sweep: Sweep,
        results: Results,
        *,
        names: QueueNames,
        allow: BullmqAllow,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._events = events
        self._sweep = sweep
        self._results = results
        self._names = names
        self._allow = allow
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry

    async def take(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        """Add the jobs of these commands. While Redis is away they are held, and no others are taken."""
        jobs: list[NewJob] = []
        readable: list[Delivery] = []
        for delivery in deliveries:
            try:
                job, fault = self._read(delivery)
            except InvalidInput as error:
                if await subscription.dead_letter(delivery, str(error)):
                    self._telemetry.emit(DeadLettered(self._names.logical(delivery.queue), str(error)))
                continue
            readable.append(delivery)
            if fault is None:
                jobs.append(job)
            else:
                await self._results.publish([self._results.failed(job.id, job.record, fault, retry=False)])
        await self._add_surely(subscription, readable, jobs)
        await subscription.ack(readable)

    # -- reading ----------------------------------------------------------------------------------------------

    def _read(self, delivery: Delivery) -> tuple[NewJob, str | None]:
        """Return the command's job, and why the settings forbid it. Raises InvalidInput."""
        command = decode_message(delivery.body)
        if command.tipo_evento not in naming.COMMAND_EVENTS:
            wrong, right = naming.shown(command.tipo_evento), " and ".join(naming.COMMAND_EVENTS)
            raise InvalidMessage.at("tipo_evento", f"{wrong} is not a command; a bridge takes {right}")
        queue = self._names.logical(delivery.queue)
        is_named_by_settings = not queue.startswith(naming.BRIDGE_PREFIX)
        # A command on a queue that the settings name goes on to the BullMQ queue of the same name.
        place = Bridge(BULLMQ, queue) if is_named_by_settings else _place_of(command)
        job = NewJob(
            id=job_id_of(self._names.prefix, command, delivery.body),
            name=place.name or command.tarefa or _DEFAULT_NAME,
            attempts=place.attempts or 1,
            data=bytes(command.payload).decode(),
            record=record_of(place.target, command, delivery.via),
            priority=priority_of(command),
        )
        return job, None if is_named_by_settings else self._allow.fault(place, command.tarefa or "")

    # -- adding -----------------------------------------------------------------------------------------------

    async def _add_surely(
        self, subscription: Subscription, deliveries: Sequence[Delivery], jobs: Sequence[NewJob]
    ) -> None:
        backoff = Backoff(self._entropy, LONGEST_HELD)
        while jobs:
            try:
                await self._add(jobs)
                return
            except Exception as error:  # noqa: BLE001 - unless Redis is away, it is the fault of one command
                # Redis refuses one of them: that one is answered, and holds up no other. What the bridge itself needs
                # is waited for, also where it lacks a right.
                if not is_passing(error) and await self._server.takes_writes():
                    await self._add_singly(subscription, deliveries, jobs, error)
                    return
            await backoff.pause()
            await subscription.extend(deliveries)

    async def _add_singly(
        self, subscription: Subscription, deliveries: Sequence[Delivery], jobs: Sequence[NewJob], error: Exception
    ) -> None:
        if len(jobs) > 1:
            for job in jobs:
                await self._add_surely(subscription, deliveries, [job])
            return
        [job] = jobs
        _log.error("bullmq refused a job", job=job.id, queue=job.record.queue, reason=str(error))
        await self._results.send(
            [self._results.failed(job.id, job.record, f"BullMQ refused the job: {describe(error)}")]
        )

    async def _add(self, jobs: Sequence[NewJob]) -> None:
        """Add jobs. A repeated command adds nothing, and is answered again."""
        new: dict[str, NewJob] = {}
        answers: list[JobReport] = []
        begun: dict[str, Record] = {}
        for job, known in zip(jobs, await self._ledger.known(jobs), strict=True):
            if known.answer is not None:
                answers.append(JobReport(job.id, job.record, known.answer.encode()))
            elif known.is_repeat:
                begun[job.id] = job.record
            elif job.record.is_late(self._clock.now()):
                await self._results.publish([self._results.failed(job.id, job.record, NOT_IN_TIME, retry=False)])
            else:
                new[job.id] = job
        if new:
            await self._events.listen_to({job.record.queue for job in new.values()})
            await self._ledger.add(list(new.values()))
        await self._results.send(answers)
        await self._sweep.check(begun)


def _place_of(command: Message) -> Bridge:
    """Return the BullMQ queue that a command on the bridge's own queue names. Raises InvalidMessage."""
    try:
        place = msgspec.convert(command.ponte, Bridge)
    except msgspec.ValidationError as error:
        raise InvalidMessage.at("ponte", f"must say where the command goes on: {error}") from None
    if place.kind != BULLMQ or not place.target or ":" in place.target:
        raise InvalidMessage.at("ponte", f"must name a BullMQ queue; got {naming.shown(place.url)}")
    return place
