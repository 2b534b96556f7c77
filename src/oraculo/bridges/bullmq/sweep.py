"""The slow safety net: what no event told is found by looking at the jobs themselves.

Events are missed when a bridge dies with some in its hands, when their stream was trimmed before anybody read it, and
when a queue is drained or obliterated, which tells nothing. All bridges share one turn.
"""

import asyncio
from typing import Any

import structlog

from oraculo.bridges.bullmq.layout import Layout, Look
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.records import Record
from oraculo.bridges.bullmq.reports import Report, Reporter
from oraculo.core.timestamps import from_iso
from oraculo.ports.clock import Clock

PAUSE = 15.0
PAGE = 1000
MOST_EVENTS = 50_000  # of a stream that are searched for the end of a job that is gone
HEARING = 3.0  # seconds for what was told of a job to be heard
OVERDUE = "deadline passed before it was started"
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
        pause: float = PAUSE,
        has_events: bool = True,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._layout = layout
        self._reporter = reporter
        self._bull_prefix = bull_prefix
        self._keep = keep
        self._clock = clock
        self._pause = pause
        self._has_events = has_events
        self._missed: dict[str, float] = {}  # gone jobs of which something may still be heard, and since when

    async def run(self) -> None:
        """Until Redis fails. The first time without a turn: the last to have one may be the bridge that died."""
        await self.all()
        while True:
            await asyncio.sleep(self._pause)
            if await self._ledger.takes_turn(self._pause * 0.8):
                await self.all()

    async def all(self) -> None:
        async for records in self._ledger.open_jobs():
            await self.check(records)
        while await self._ledger.forget(self._clock.now() - self._keep):
            pass

    async def check(self, records: dict[str, Record]) -> None:
        """Tells of those that have ended, or are gone; takes away those whose time was over before they began."""
        reports: list[Report] = []
        gone: dict[str, Record] = {}
        for job_id, look in (await self._ledger.look(records)).items():
            record = records[job_id]
            if not look.exists:
                gone[job_id] = record
            elif (report := self._ended(job_id, record, look)) is not None:
                reports.append(report)
            elif self._is_overdue(record) and await self._layout.withdraw(record.queue, job_id):
                reports.append(self._reporter.failed(job_id, record, OVERDUE, retry=False))
        reports += await self._reports_of_gone(gone)
        await self._reporter.send(reports)

    def _ended(self, job_id: str, record: Record, look: Look) -> Report | None:
        if look.ended == "completed":
            return self._reporter.completed(job_id, record, look.value)
        if look.ended == "failed":
            reason = look.reason or "the job failed and did not say why"
            return self._reporter.failed(job_id, record, reason, retry=not look.is_hopeless)
        return None

    def _is_overdue(self, record: Record) -> bool:
        deadline = from_iso(record.command.prazo) if record.command.prazo else None
        return deadline is not None and deadline <= self._clock.now()

    # -- jobs that are gone -----------------------------------------------------------------------------------

    async def _reports_of_gone(self, gone: dict[str, Record]) -> list[Report]:
        """A worker with removeOnComplete leaves nothing but the event, written in the same step."""
        found: dict[str, Report] = {}
        if self._has_events:
            for queue in {record.queue for record in gone.values()}:
                await self._search(queue, gone, found)
        else:
            gone = self._given_up(gone)
        for job_id, record in gone.items():
            if job_id not in found:
                _log.warning("a job is gone", job=job_id, queue=record.queue)
                found[job_id] = self._reporter.failed(job_id, record, GONE.format(queue=record.queue), retry=False)
        return list(found.values())

    def _given_up(self, gone: dict[str, Record]) -> dict[str, Record]:
        """Without a stream to search, what was told of a job may only be on its way: each is given a moment."""
        now = asyncio.get_running_loop().time()
        self._missed = {job_id: since for job_id, since in self._missed.items() if now - since < 10 * HEARING}
        return {
            job_id: record for job_id, record in gone.items() if now - self._missed.setdefault(job_id, now) > HEARING
        }

    async def _search(self, queue: str, gone: dict[str, Record], found: dict[str, Report]) -> None:
        stream, latest, searched = f"{self._bull_prefix}:{queue}:events", "+", 0
        while searched < MOST_EVENTS:
            page = await self._client.xrevrange(stream, max=latest, count=PAGE)
            for _, fields in page:
                job_id, kind = fields.get("jobId", ""), fields.get("event")
                if job_id in gone and job_id not in found and gone[job_id].queue == queue:
                    if kind == "completed":
                        found[job_id] = self._reporter.completed(job_id, gone[job_id], fields.get("returnvalue"))
                    elif kind == "failed":
                        found[job_id] = self._reporter.failed(job_id, gone[job_id], fields.get("failedReason", ""))
            if len(page) < PAGE:
                return
            searched += len(page)
            latest = f"({page[-1][0]}"
