"""From a command of ours to a job of BullMQ: it is acked once the job, and the record of it, are in Redis."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from oraculo.bridges.bullmq.ledger import Known, Ledger
from oraculo.bridges.bullmq.records import NewJob, Record, job_id_of, record_of
from oraculo.bridges.bullmq.reports import Report, Reporter
from oraculo.bridges.bullmq.server import BullmqRedis, is_passing
from oraculo.bridges.bullmq.sweep import Sweep
from oraculo.bridges.ended_runs import EndedRuns
from oraculo.clients.subscription import LONGEST_HELD, Backoff, Subscription
from oraculo.errors import InvalidInput, InvalidMessage
from oraculo.pipeline.bridge_rules import BullmqAllow
from oraculo.pipeline.bridges import BULLMQ, Bridge
from oraculo.ports.broker import Delivery
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeadLettered, Telemetry
from oraculo.wire import naming
from oraculo.wire.answers import NOT_IN_TIME
from oraculo.wire.message import Message, decode_message, priority_of
from oraculo.wire.naming import QueueNames

_DEFAULT_NAME = "oraculo"  # of a job whose command names no task

_log = structlog.get_logger("oraculo.bullmq")


class Handover:
    def __init__(
        self,
        server: BullmqRedis,
        ledger: Ledger,
        sweep: Sweep,
        reporter: Reporter,
        ended: EndedRuns,
        *,
        names: QueueNames,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
        heed: Callable[[set[str]], Awaitable[None]],
        allow: BullmqAllow,
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._sweep = sweep
        self._reporter = reporter
        self._ended = ended
        self._names = names
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry
        self._heed = heed
        self._allow = allow

    async def take(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        """Waits for Redis as long as it takes; meanwhile no more than this batch is held."""
        jobs: list[NewJob] = []
        readable: list[Delivery] = []
        refused: list[Report] = []
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
                refused.append(self._reporter.failed(job.id, job.record, fault, retry=False))
        await self._reporter.publish(refused)
        await self._hand_over_surely(subscription, readable, jobs)
        await subscription.ack(readable)

    def _read(self, delivery: Delivery) -> tuple[NewJob, str | None]:
        """Return the job, and why it may not be added where the settings do not allow it. Raises InvalidInput."""
        command = decode_message(delivery.body)
        if command.tipo_evento not in naming.COMMAND_EVENTS:
            wrong, right = naming.shown(command.tipo_evento), " and ".join(naming.COMMAND_EVENTS)
            raise InvalidMessage.at("tipo_evento", f"{wrong} is not a command; a bridge takes {right}")
        queue = self._names.logical(delivery.queue)
        place = self._place(command, queue)
        is_named = queue.startswith(naming.BRIDGE_PREFIX)  # else the settings name the queue itself
        fault = self._allow.fault(place, command.tarefa or "") if is_named else None
        job = NewJob(
            id=job_id_of(self._names.prefix, command, delivery.body),
            name=place.name or command.tarefa or _DEFAULT_NAME,
            attempts=place.attempts or 1,
            data=bytes(command.payload).decode(),
            record=record_of(place.target, command, delivery.via),
            priority=priority_of(command),
        )
        return job, fault

    def _place(self, command: Message, queue: str) -> Bridge:
        """A command on the bridge's own queue says where it goes on; one on another of ours goes to its namesake."""
        if not queue.startswith(naming.BRIDGE_PREFIX):
            return Bridge(BULLMQ, queue)
        try:
            place = msgspec.convert(command.ponte, Bridge)
        except msgspec.ValidationError as error:
            raise InvalidMessage.at("ponte", f"must say where the command goes on: {error}") from None
        if place.kind != BULLMQ or not place.target or ":" in place.target:
            raise InvalidMessage.at("ponte", f"must name a BullMQ queue; got {naming.shown(place.url)}")
        return place

    async def _hand_over_surely(
        self, subscription: Subscription, deliveries: Sequence[Delivery], jobs: Sequence[NewJob]
    ) -> None:
        backoff = Backoff(self._entropy, LONGEST_HELD)
        while jobs := await self._wanted(jobs):
            try:
                await self._hand_over(jobs)
                return
            except Exception as error:  # noqa: BLE001 - what is not Redis' being away is one command's fault
                if await self._is_refusal(error):
                    await self._refuse_singly(subscription, deliveries, jobs, error)
                    return
            self._ended.note_failure()
            await backoff.pause()
            await subscription.extend(deliveries)

    async def _wanted(self, jobs: Sequence[NewJob]) -> Sequence[NewJob]:
        ended = await self._ended.among(job.record.command for job in jobs)
        return [job for job in jobs if job.record.command.correlation_id not in ended] if ended else jobs

    async def _is_refusal(self, error: Exception) -> bool:
        """Whether it is about one of them. Who may not touch a key is waited for if it is ours, for then it is all."""
        return not is_passing(error) and await self._server.ask()

    async def _refuse_singly(
        self, subscription: Subscription, deliveries: Sequence[Delivery], jobs: Sequence[NewJob], error: Exception
    ) -> None:
        """Redis answers, and says no to one of them: it must not hold up the others, and its run is told."""
        if len(jobs) == 1:
            await self._reporter.publish([await self._refusal(jobs[0], error)])
            return
        for job in jobs:
            await self._hand_over_surely(subscription, deliveries, [job])

    async def _refusal(self, job: NewJob, error: Exception) -> Report:
        reason = await self._ledger.reason(job.record.queue, error)
        _log.error("bullmq refused a job", job=job.id, queue=job.record.queue, reason=reason)
        return self._reporter.failed(job.id, job.record, f"BullMQ refused the job: {reason}")

    async def _hand_over(self, jobs: Sequence[NewJob]) -> None:
        """A repeated command adds nothing: it is told again what there is to tell."""
        new: dict[str, NewJob] = {}
        late: list[Report] = []
        again: list[Report] = []
        begun: dict[str, Record] = {}
        for job, known in zip(jobs, await self._ledger.known(jobs), strict=True):
            if known.is_repeat:
                self._sort_repeat(job, known, again, begun)
            elif job.record.is_late(self._clock.now()):
                late.append(self._reporter.failed(job.id, job.record, NOT_IN_TIME, retry=False))
            else:
                new[job.id] = job
        await self._reporter.publish(late)
        queues = {job.record.queue for job in new.values()}
        await self._heed(queues)  # before: old Bull tells of an end once, to those who listen then
        refused = await self._ledger.add(list(new.values()))
        await self._reporter.publish([await self._refusal(new[job_id], error) for job_id, error in refused.items()])
        await self._reporter.send(again)
        await self._sweep.check(begun)
        await self._heed(queues)  # after: the reading that waits for events finds them in the ledger now

    def _sort_repeat(self, job: NewJob, known: Known, again: list[Report], begun: dict[str, Record]) -> None:
        if known.answer is not None:
            again.append(self._reporter.repeated(job.id, job.record, known.answer))
        else:
            begun[job.id] = job.record
