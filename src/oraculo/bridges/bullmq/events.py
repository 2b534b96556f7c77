"""Reads what BullMQ tells of its jobs: one stream a queue, `<prefix>:<queue>:events`.

All bridges read through one consumer group, so each event comes to one of them and none is missed while no bridge runs.
Nothing is acked: what a bridge had read and not told when it died is found by the sweep, from the state of the jobs.
"""

import asyncio
import contextlib
from typing import Any

import msgspec
import structlog
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.layout import Look
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.portions import Portion
from oraculo.bridges.bullmq.records import Record
from oraculo.bridges.bullmq.reports import Report, Reporter
from oraculo.bridges.bullmq.server import BLOCKING_TIMEOUT, BullmqRedis, close_client, is_passing
from oraculo.ports.clock import Clock
from oraculo.wire.json_guard import is_too_deep

BLOCK = 1.0  # seconds that one reading waits; after each the queues are looked up again
CONSUMER = "oraculo"
STALLED = "the job stalled: its worker was lost, and BullMQ gives it to another"
ENDINGS = ("completed", "failed")

_log = structlog.get_logger("oraculo.bullmq")
_STREAM_LOST = ("NOGROUP", "no longer exist", "WRONGTYPE")
_TOLD = frozenset({"completed", "failed", "removed", "progress", "stalled"})


class Event(msgspec.Struct):
    kind: str
    queue: str
    job_id: str
    fields: dict[str, str]

    @property
    def is_end(self) -> bool:
        return self.kind not in ("progress", "stalled")

    @property
    def is_news(self) -> bool:
        """A job that was removed after its end was told already, when it ended."""
        return self.kind != "removed" or self.fields.get("prev") not in ENDINGS


class EventReader:
    def __init__(
        self,
        server: BullmqRedis,
        ledger: Ledger,
        reporter: Reporter,
        bull_prefix: str,
        *,
        prefix: str,
        clock: Clock,
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._reporter = reporter
        self._bull_prefix = bull_prefix
        self._clock = clock
        self._group = f"oraculo-{prefix}" if prefix else "oraculo"
        self._grouped: set[str] = set()
        self._unreadable: set[str] = set()
        self._portion = Portion()
        self._client: Any = None
        self._connection_id: int | None = None
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Until Redis fails."""
        self._client = self._server.connection(timeout=BLOCKING_TIMEOUT)
        try:
            while True:
                queues = await self._ledger.queues()
                if queues:
                    await self._read(queues)
                else:
                    await self._rest()
        finally:
            self._grouped.clear()
            await close_client(self._client)

    async def heed(self, queues: set[str]) -> None:
        """Jobs were added to these: if one was never read, the reading that waits now must not be waited for."""
        if self._client is None or queues <= self._grouped:
            return
        self._woken.set()
        if self._connection_id is None:
            return
        try:
            await self._server.client.client_unblock(self._connection_id)
        except ResponseError as error:  # some providers do not permit it: then it takes a second
            _log.debug("the reading of events was not woken", reason=str(error))

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLOCK):
                await self._woken.wait()
        self._woken.clear()

    async def _read(self, queues: set[str]) -> None:
        async with self._client.client() as one:  # one connection, whose number is known
            self._connection_id = await one.client_id()
            try:
                while queues:
                    await self._make_groups(queues)
                    await self._take(one, queues & self._grouped)
                    queues = await self._ledger.queues()
            finally:
                self._connection_id = None

    async def _take(self, one: Any, queues: set[str]) -> None:
        if not queues:
            await asyncio.sleep(BLOCK)
            return
        streams = {self._stream(queue): ">" for queue in queues}
        try:
            found = await one.xreadgroup(
                self._group, CONSUMER, streams, count=self._portion.count, block=int(BLOCK * 1000), noack=True
            )
        except ResponseError as error:
            if str(error).startswith("UNBLOCKED"):
                return
            if not any(sign in str(error) for sign in _STREAM_LOST):
                raise
            self._grouped.clear()  # a queue was obliterated, with its stream; or that is something else now
            return
        read = found.items() if isinstance(found, dict) else found or ()
        entries = {stream: _fields(entries) for stream, entries in read}
        self._portion.learn([fields for each in entries.values() for fields in each], len(entries))
        events = [event for stream, each in entries.items() for event in self._events(stream, each)]
        if events:
            await self._tell(events)

    async def _make_groups(self, queues: set[str]) -> None:
        """From the beginning: what happened before the group was there is for it too."""
        self._grouped &= queues
        self._unreadable &= queues
        for queue in queues - self._grouped:
            try:
                await self._server.client.xgroup_create(self._stream(queue), self._group, id="0", mkstream=True)
            except ResponseError as error:
                if is_passing(error):
                    raise
                if not str(error).startswith("BUSYGROUP"):
                    self._leave_out(queue, error)
                    continue
            self._grouped.add(queue)
            self._unreadable.discard(queue)

    def _leave_out(self, queue: str, error: ResponseError) -> None:
        """Its events cannot be read, which must not hold up those of the others."""
        if queue not in self._unreadable:
            _log.warning("the events of a queue cannot be read", stream=self._stream(queue), reason=str(error))
        self._unreadable.add(queue)

    def _stream(self, queue: str) -> str:
        return f"{self._bull_prefix}:{queue}:events"

    def _events(self, stream: str, entries: list[dict[str, str]]) -> list[Event]:
        queue = stream.removeprefix(f"{self._bull_prefix}:").removesuffix(":events")
        return [
            Event(fields["event"], queue, fields["jobId"], fields)
            for fields in entries
            if fields.get("event") in _TOLD and "jobId" in fields
        ]

    # -- telling ----------------------------------------------------------------------------------------------

    async def _tell(self, events: list[Event]) -> None:
        """Each report is written when its turn to be sent has come, for together they may be large."""
        records = await self._ledger.records(list({event.job_id for event in events}))
        ours = [event for event in events if (record := records.get(event.job_id)) and record.queue == event.queue]
        failed = {event.job_id: records[event.job_id] for event in ours if event.kind == "failed"}
        looks = await self._ledger.look(failed)
        # Of a job's progress only the last is worth telling.
        news = [event for event in ours if event.is_news and not self._is_withdrawal(event, records[event.job_id])]
        last = {(event.is_end, event.job_id): event for event in news}
        told = sorted(last.values(), key=lambda event: event.is_end)
        await self._reporter.send(self._report(event, records[event.job_id], looks) for event in told)

    def _is_withdrawal(self, event: Event, record: Record) -> bool:
        """The sweep takes out what nobody began in time, and tells of it. It finds what others took out, too."""
        return event.kind == "removed" and record.is_late(self._clock.now())

    def _report(self, event: Event, record: Record, looks: dict[str, Look]) -> Report:
        if event.kind == "completed":
            return self._reporter.completed(event.job_id, record, event.fields.get("returnvalue"))
        if event.kind == "progress":
            return self._reporter.progressed(event.job_id, record, _decoded(event.fields.get("data")))
        if event.kind == "stalled":
            return self._reporter.progressed(event.job_id, record, STALLED)
        if event.kind == "failed":
            hopeless = looks[event.job_id].is_hopeless
            return self._reporter.failed(event.job_id, record, event.fields.get("failedReason"), retry=not hopeless)
        reason = f"removed: somebody took the job out of {event.queue} before it ended"
        return self._reporter.failed(event.job_id, record, reason, retry=False)


def _fields(read: Any) -> list[dict[str, str]]:
    # redis-py wraps the entries of a stream in one more list when it speaks the newer protocol.
    entries = read[0] if read and isinstance(read[0], list) else read
    return [fields for _, fields in entries if fields]


def _decoded(text: str | None) -> object:
    """As it was written, where nobody could read it, or write it again."""
    try:
        return text if is_too_deep((text or "").encode()) else msgspec.json.decode(text or "null")
    except msgspec.DecodeError:
        return text
