"""Looks at the open jobs themselves now and then, for what no event said.

Events are missed when a bridge dies with some in its hands, when their stream was trimmed before anybody read it, and
when a queue is drained or obliterated, which says nothing. All bridges share one turn.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from oraculo.bridges.bullmq.events import newest_endings
from oraculo.bridges.bullmq.job import Record
from oraculo.bridges.bullmq.layout import Layout
from oraculo.bridges.bullmq.ledger import JobState, Ledger
from oraculo.bridges.bullmq.results import JobReport, Results
from oraculo.ports.clock import Clock
from oraculo.wire.answers import NOT_IN_TIME

UNUSED = 600.0  # seconds without an open job, after which the events of a queue are no longer read
HEARING = 3.0  # seconds for a published event to be heard
GONE = "removed: the job is no longer in {queue}, and its result was not kept; was the queue drained or obliterated?"

_log = structlog.get_logger("oraculo.bullmq")


class Sweep:
    def __init__(
        self, client: Any, ledger: Ledger, layout: Layout, results: Results, *, keep: float, clock: Clock
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._layout = layout
        self._results = results
        self._keep = keep
        self._clock = clock
        self._missing_since: dict[str, float] = {}  # old Bull's jobs, whose end may still be heard

    async def run(self) -> None:
        """Sweep until Redis fails. The first sweep needs no turn: the bridge that had the last one may be the one that
        died."""
        await self._sweep()
        while True:
            await asyncio.sleep(self._layout.sweep_pause)
            if await self._ledger.takes_turn(self._layout.sweep_pause * 0.8):
                await self._sweep()

    async def _sweep(self) -> None:
        started = self._clock.now()
        async for records in self._ledger.open_jobs():
            await self._ledger.note_used({record.queue for record in records.values()})
            await self.check(records)
        await self._ledger.forget_queues(started - UNUSED)
        while await self._ledger.forget(self._clock.now() - self._keep):
            pass

    async def check(self, records: dict[str, Record]) -> None:
        """Answer for jobs that have ended or are gone, and remove those that nobody began in time."""
        await self._results.send_all(self._reports(records))

    async def _reports(self, records: dict[str, Record]) -> AsyncIterator[JobReport]:
        states = await self._ledger.states(records)
        for job_id, state in states.items():
            if (report := await self._report(job_id, records[job_id], state)) is not None:
                yield report
        gone = {job_id: records[job_id] for job_id, state in states.items() if state is JobState.MISSING}
        for queue in {record.queue for record in gone.values()}:
            async for report in self._gone(queue, {key: one for key, one in gone.items() if one.queue == queue}):
                yield report

    async def _report(self, job_id: str, record: Record, state: JobState) -> JobReport | None:
        if state in (JobState.COMPLETED, JobState.FAILED):
            return await self._results.of_state(job_id, record, state)
        if state is JobState.MISSING or not record.is_late(self._clock.now()):
            return None
        is_over = state is JobState.UNREADABLE or await self._ledger.remove(job_id, record)
        return self._results.failed(job_id, record, NOT_IN_TIME, retry=False) if is_over else None

    async def _gone(self, queue: str, gone: dict[str, Record]) -> AsyncIterator[JobReport]:
        """Answer for jobs that BullMQ no longer has. A worker with removeOnComplete leaves nothing but the event."""
        if self._layout.keeps_events:
            async for event in newest_endings(self._client, self._layout.key(queue, "events")):
                if (record := gone.pop(event["jobId"], None)) is not None:
                    yield await self._results.of_event(event["jobId"], record, event)
                if not gone:
                    return
        else:
            gone = self._unheard(gone)
        for job_id, record in gone.items():
            _log.warning("a job is gone", job=job_id, queue=queue)
            yield self._results.failed(job_id, record, GONE.format(queue=queue), retry=False)

    def _unheard(self, gone: dict[str, Record]) -> dict[str, Record]:
        """Return those that were gone a moment ago too: what old Bull published of the others may be on its way."""
        now = asyncio.get_running_loop().time()
        self._missing_since = {key: since for key, since in self._missing_since.items() if now - since < 10 * HEARING}
        return {key: one for key, one in gone.items() if now - self._missing_since.setdefault(key, now) > HEARING}
