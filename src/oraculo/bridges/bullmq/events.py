"""Reads the events of BullMQ's queues: one stream for each, `<prefix>:<queue>:events`.

All bridges read through one consumer group, so each event comes to one of them, and none is missed while no bridge
runs. Nothing is acked: when a bridge dies before it has handled its events, the sweep finds their jobs.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import structlog
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.job import Record
from oraculo.bridges.bullmq.layout import Layout
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.results import JobReport, Results, decode_progress
from oraculo.bridges.bullmq.server import BLOCKING_TIMEOUT, BullmqRedis, Refusals, close_client, is_passing
from oraculo.ports.clock import Clock

BLOCK = 0.2  # seconds that one read waits; then the list of queues is read again, in case there is a new one
COUNT = 50  # entries of a stream in one read; each may hold a whole result
MOST_SEARCHED = 50_000  # entries of a stream that `newest_endings` reads
STALLED = "the job stalled: its worker was lost, and BullMQ gives it to another"
ENDINGS = ("completed", "failed")

_STREAM_LOST = ("NOGROUP", "no longer exist", "WRONGTYPE", "UNBLOCKED")
_KINDS = frozenset({*ENDINGS, "removed", "progress", "stalled"})

_log = structlog.get_logger("oraculo.bullmq")


class Events(Protocol):
    """The events of jobs, as Bull or BullMQ publishes them."""

    async def run(self) -> None:
        """Read events and report them, until Redis fails."""
        ...

    async def listen_to(self, queues: set[str]) -> None:
        """Listen to queues to which jobs are about to be added."""
        ...


class Event(msgspec.Struct):
    """One entry of a queue's stream."""

    kind: str
    queue: str
    job_id: str
    fields: dict[str, str]

    @property
    def is_end(self) -> bool:
        return self.kind not in ("progress", "stalled")

    @property
    def ended_before(self) -> bool:
        """Return whether the job ended before it was removed. Another event reported that end."""
        return self.kind == "removed" and self.fields.get("prev") in ENDINGS


class EventReader:
    def __init__(
        self,
        server: BullmqRedis,
        ledger: Ledger,
        layout: Layout,
        results: Results,
        refusals: Refusals,
        prefix: str,
        clock: Clock,
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._layout = layout
        self._results = results
        self._refusals = refusals
        self._clock = clock
        self._group = f"oraculo-{prefix}" if prefix else "oraculo"
        self._grouped: set[str] = set()

    async def run(self) -> None:
        client = self._server.connection(timeout=BLOCKING_TIMEOUT)
        try:
            while True:
                await self._make_groups(await self._ledger.queues())
                if self._grouped:
                    await self._read(client)
                else:
                    await asyncio.sleep(BLOCK)
        finally:
            self._grouped.clear()
            await close_client(client)

    async def listen_to(self, queues: set[str]) -> None:
        """Do nothing: a stream keeps its events for whoever reads it later."""

    async def _make_groups(self, queues: set[str]) -> None:
        """Make the missing consumer groups, each from the beginning of its stream.

        A stream that cannot be read does not stop the others.
        """
        self._grouped &= queues
        for queue in queues - self._grouped:
            stream = self._layout.key(queue, "events")
            try:
                await self._server.client.xgroup_create(stream, self._group, id="0", mkstream=True)
            except ResponseError as error:
                if is_passing(error):
                    raise
                if not str(error).startswith("BUSYGROUP"):
                    self._refusals.note(f"the reading of {stream}", error)
                    continue
            self._grouped.add(queue)

    async def _read(self, client: Any) -> None:
        queues = {self._layout.key(queue, "events"): queue for queue in self._grouped}
        streams = dict.fromkeys(queues, ">")
        try:
            read = await client.xreadgroup(
                self._group, "oraculo", streams, count=COUNT, block=int(BLOCK * 1000), noack=True
            )
        except ResponseError as error:
            if not any(sign in str(error) for sign in _STREAM_LOST):
                raise
            self._grouped.clear()  # a queue was obliterated, with its stream
            return
        entries = {queues[stream]: list(_fields_of(entries)) for stream, entries in _pairs(read)}
        events = [
            Event(fields["event"], queue, fields["jobId"], fields)
            for queue, each in entries.items()
            for fields in each
            if fields.get("event") in _KINDS and "jobId" in fields
        ]
        if events:
            await self._results.send_all(self._reports(events))

    async def _reports(self, events: Sequence[Event]) -> AsyncIterator[JobReport]:
        """Yield one report at a time, progress first. Of each job only the last progress is reported."""
        records = await self._ledger.records(list({event.job_id for event in events}))
        last: dict[tuple[bool, str], Event] = {}
        for event in events:
            record = records.get(event.job_id)
            if record is not None and record.queue == event.queue and not self._is_reported_elsewhere(event, record):
                last[event.is_end, event.job_id] = event
        for event in sorted(last.values(), key=lambda event: event.is_end):
            yield await self._report(event, records[event.job_id])

    def _is_reported_elsewhere(self, event: Event, record: Record) -> bool:
        """Return whether somebody else reports the end: another event, or the sweep that removed a late job."""
        return event.ended_before or (event.kind == "removed" and record.is_late(self._clock.now()))

    async def _report(self, event: Event, record: Record) -> JobReport:
        if event.kind == "progress":
            return self._results.progressed(event.job_id, record, decode_progress(event.fields.get("data")))
        if event.kind == "stalled":
            return self._results.progressed(event.job_id, record, STALLED)
        if event.kind == "removed":
            reason = f"removed: somebody took the job out of {event.queue} before it ended"
            return self._results.failed(event.job_id, record, reason, retry=False)
        return await self._results.of_event(event.job_id, record, event.fields)


async def newest_endings(client: Any, stream: str) -> AsyncIterator[Mapping[str, str]]:
    """Yield the events that ended jobs, newest first."""
    latest = "+"
    for _ in range(MOST_SEARCHED // COUNT):
        try:
            page = await client.xrevrange(stream, max=latest, count=COUNT)
        except ResponseError as error:
            if is_passing(error):
                raise
            _log.warning("the events of a queue cannot be searched", stream=stream, reason=str(error))
            return
        for _, fields in page:
            if fields.get("event") in ENDINGS and "jobId" in fields:
                yield fields
        if len(page) < COUNT:
            return
        latest = f"({page[-1][0]}"


def _pairs(read: Any) -> Iterable[tuple[str, Any]]:
    return read.items() if isinstance(read, dict) else read or ()


def _fields_of(entries: Any) -> Iterable[dict[str, str]]:
    # redis-py wraps the entries of a stream in one more list when it speaks the newer protocol.
    inner = entries[0] if entries and isinstance(entries[0], list) else entries
    return (fields for _, fields in inner if fields)
