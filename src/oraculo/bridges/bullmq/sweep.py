"""The slow safety net: what no event told is found by looking at the jobs themselves.

Events are missed when a bridge dies with some in its hands, when their stream was trimmed before anybody read it, and
when a queue is drained or obliterated, which tells nothing. All bridges share one turn.
"""

import asyncio
from typing import Any

import structlog
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.events import ENDINGS
from oraculo.bridges.bullmq.layout import Layout, Look
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.portions import Portion, by_the_megabyte
from oraculo.bridges.bullmq.records import Record
from oraculo.bridges.bullmq.reports import Report, Reporter
from oraculo.bridges.bullmq.server import is_passing
from oraculo.ports.clock import Clock
from oraculo.wire.answers import NOT_IN_TIME

MOST_EVENTS = 50_000  # of a stream that are searched for the end of a job that is gone
UNUSED = 600.0  # seconds without an open job, after which the events of a queue are read no longer
HEARING = 3.0  # seconds for what was told of a job to be heard
GONE = "removed: the job is no longer in {queue}, and its result was not kept; was the queue drained or obliterated?"

_log = structlog.get_logger("oraculo.bullmq")


class Sweep:
    def __init__(
        self,
        client: Any,
        ledger: Ledger,
        layout: Layout,
        reporter: Reporter,
        *,
        bull_prefix: str,
        keep: float,
        clock: Clock,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._layout = layout
        self._reporter = reporter
        self._bull_prefix = bull_prefix
        self._keep = keep
        self._clock = clock
        self._missed: dict[str, float] = {}  # gone jobs of which something may still be heard, and since when

    async def run(self) -> None:
        """Until Redis fails. The first time without a turn: the last to have one may be the bridge that died."""
        await self.all()
        while True:
            await asyncio.sleep(self._layout.sweep_pause)
            if await self._ledger.takes_turn(self._layout.sweep_pause * 0.8):
                await self.all()

    async def all(self) -> None:
        started = self._clock.now()
        async for records in self._ledger.open_jobs():
            await self._ledger.note_used({record.queue for record in records.values()})
            await self.check(records)
        await self._ledger.forget_queues(started - UNUSED)
        while await self._ledger.forget(self._clock.now() - self._keep):
            pass

    async def check(self, records: dict[str, Record]) -> None:
        """Tells of those that have ended, or are gone; takes away those whose time was over before they began."""
        if not records:
            return
        sizes = await self._ledger.sizes(records)
        gone: dict[str, Record] = {}
        for part in by_the_megabyte(records, sizes.__getitem__):
            gone |= await self._check_part({job_id: records[job_id] for job_id in part})
        await self._tell_gone(gone)

    async def _check_part(self, records: dict[str, Record]) -> dict[str, Record]:
        """Returns those that are gone."""
        reports: list[Report] = []
        looks = await self._ledger.look(records)
        for job_id, look in looks.items():
            report = await self._report(job_id, records[job_id], look)
            if report is not None:
                reports.append(report)
        await self._reporter.send(reports)
        return {job_id: records[job_id] for job_id, look in looks.items() if not look.exists}

    async def _report(self, job_id: str, record: Record, look: Look) -> Report | None:
        """What is wrong with one queue must not hold up the others. Where a key is something else than BullMQ's, no
        job can end, so its run is told."""
        try:
            if look.fault is not None:
                raise look.fault
            if look.exists and look.ended is None and record.is_late(self._clock.now()):
                is_withdrawn = await self._layout.withdraw(record.queue, job_id)
                return self._reporter.failed(job_id, record, NOT_IN_TIME, retry=False) if is_withdrawn else None
        except ResponseError as error:
            if is_passing(error):
                raise
            reason = await self._ledger.reason(record.queue, error)
            _log.warning("a job cannot be looked at", job=job_id, queue=record.queue, reason=reason)
            return self._reporter.failed(job_id, record, reason, retry=False) if "WRONGTYPE" in str(error) else None
        return self._ended(job_id, record, look)

    def _ended(self, job_id: str, record: Record, look: Look) -> Report | None:
        if look.ended == "completed":
            return self._reporter.completed(job_id, record, look.value)
        if look.ended == "failed":
            return self._reporter.failed(job_id, record, look.reason, retry=not look.is_hopeless)
        return None

    # -- jobs that are gone -----------------------------------------------------------------------------------

    async def _tell_gone(self, gone: dict[str, Record]) -> None:
        """A worker with removeOnComplete leaves nothing but the event, written in the same step."""
        told: set[str] = set()
        if self._layout.keeps_events:
            for queue in {record.queue for record in gone.values()}:
                told |= await self._search(queue, {id_: one for id_, one in gone.items() if one.queue == queue})
        else:
            gone = self._given_up(gone)
        lost = {job_id: record for job_id, record in gone.items() if job_id not in told}
        for job_id, record in lost.items():
            _log.warning("a job is gone", job=job_id, queue=record.queue)
        await self._reporter.send(
            self._reporter.failed(job_id, record, GONE.format(queue=record.queue), retry=False)
            for job_id, record in lost.items()
        )

    def _given_up(self, gone: dict[str, Record]) -> dict[str, Record]:
        """Without a stream to search, what was told of a job may only be on its way: each is given a moment."""
        now = asyncio.get_running_loop().time()
        self._missed = {job_id: since for job_id, since in self._missed.items() if now - since < 10 * HEARING}
        return {
            job_id: record for job_id, record in gone.items() if now - self._missed.setdefault(job_id, now) > HEARING
        }

    async def _search(self, queue: str, gone: dict[str, Record]) -> set[str]:
        """Tells of those whose end is in the stream, from the newest on; returns which."""
        stream, latest, searched = f"{self._bull_prefix}:{queue}:events", "+", 0
        told: set[str] = set()
        portion = Portion()
        while searched < MOST_EVENTS and len(told) < len(gone):
            page = await self._page(stream, latest, portion.count)
            ended: dict[str, dict[str, str]] = {}
            for _, fields in page:
                job_id = fields.get("jobId", "")
                if fields.get("event") in ENDINGS and job_id in gone and job_id not in told:
                    ended.setdefault(job_id, fields)
            await self._reporter.send(self._told(job_id, gone[job_id], fields) for job_id, fields in ended.items())
            told |= ended.keys()
            if len(page) < portion.count:
                break
            portion.learn([fields for _, fields in page])
            searched += len(page)
            latest = f"({page[-1][0]}"
        return told

    async def _page(self, stream: str, latest: str, count: int) -> list[tuple[str, dict[str, str]]]:
        try:
            page: list[tuple[str, dict[str, str]]] = await self._client.xrevrange(stream, max=latest, count=count)
        except ResponseError as error:
            if is_passing(error):
                raise
            _log.warning("the events of a queue cannot be searched", stream=stream, reason=str(error))
            return []
        return page

    def _told(self, job_id: str, record: Record, fields: dict[str, str]) -> Report:
        if fields["event"] == "completed":
            return self._reporter.completed(job_id, record, fields.get("returnvalue"))
        return self._reporter.failed(job_id, record, fields.get("failedReason"))
