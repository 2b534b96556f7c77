"""The bridge's memory, in the same Redis as the jobs: which of them are ours, and which still owe an answer.

A job and its record are written in one transaction, so each open record has a job, or had one. Whatever happens to a
bridge, the next one finds here what is still to be answered. The keys, behind `oraculo:<prefix>ponte-bullmq:`, hold:

- `jobs`: every record, by the job's id
- `open`: the jobs that owe an answer, by the time when they were added
- `ended`: the jobs that were answered, by the time of the answer; a repeated command is answered again
- `answers`: the answers of jobs that BullMQ did not keep
- `used`: the BullMQ queues whose events are read, by the time when a job there was last added or seen open
- `turn`: the sweep that one of the bridges does now
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import structlog
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.job import NewJob, Record, decode_record, encode_record
from oraculo.bridges.bullmq.layout import Layout
from oraculo.bridges.bullmq.server import is_passing
from oraculo.ports.clock import Clock

PAGE = 500
_ADDING = 4  # commands that add a job and its record

_log = structlog.get_logger("oraculo.bullmq")


class JobState(Enum):
    """The state of a job in BullMQ."""

    MISSING = auto()
    OPEN = auto()  # waiting or active
    COMPLETED = auto()
    FAILED = auto()
    UNREADABLE = auto()  # Redis refuses to look at it


class Known(NamedTuple):
    """A command's job as the ledger knows it, before it is added."""

    is_repeat: bool
    answer: str | None  # the one that was given, where BullMQ has not kept the job


class Ledger:
    def __init__(self, client: Any, layout: Layout, prefix: str, clock: Clock) -> None:
        self._client = client
        self._layout = layout
        self._clock = clock
        # Not under BullMQ's prefix: tools that list BullMQ's queues would take this for one.
        base = f"oraculo:{prefix}ponte-bullmq"
        self._jobs, self._open, self._ended = f"{base}:jobs", f"{base}:open", f"{base}:ended"
        self._answers, self._used, self._turn = f"{base}:answers", f"{base}:used", f"{base}:turn"

    # -- jobs that owe an answer ------------------------------------------------------------------------------

    async def known(self, jobs: Sequence[NewJob]) -> list[Known]:
        pipe = self._client.pipeline(transaction=True)
        for job in jobs:
            pipe.hexists(self._jobs, job.id)
            pipe.exists(self._layout.key(job.record.queue, job.id))
            pipe.zscore(self._open, job.id)
            pipe.hget(self._answers, job.id)
        replies = await pipe.execute()
        return [
            Known(answer is not None or bool(recorded and (exists or added_at is not None)), answer)
            for recorded, exists, added_at, answer in zip(*(replies[n::4] for n in range(4)), strict=True)
        ]

    async def add(self, jobs: Sequence[NewJob]) -> None:
        """Add each job with its record. Raises what redis-py raises; then those are there that Redis did not refuse."""
        now = self._clock.now()
        pipe = self._client.pipeline(transaction=True)
        for job in jobs:
            pipe.hset(self._jobs, job.id, encode_record(job.record))
            pipe.zadd(self._open, {job.id: now})
            pipe.zrem(self._ended, job.id)
            await self._layout.add(pipe, job)
        pipe.zadd(self._used, dict.fromkeys((job.record.queue for job in jobs), now))
        replies = await pipe.execute(raise_on_error=False)
        errors = {place // _ADDING: one for place, one in enumerate(replies) if isinstance(one, ResponseError)}
        if errors:
            await self._take_back([job for place, job in enumerate(jobs) if place in errors])
            raise next(iter(errors.values()))

    async def _take_back(self, jobs: Sequence[NewJob]) -> None:
        """Remove what a transaction left of refused jobs: it goes on past an error."""
        pipe = self._client.pipeline(transaction=True)
        for job in jobs:
            pipe.hdel(self._jobs, job.id)
            pipe.zrem(self._open, job.id)
            pipe.delete(self._layout.key(job.record.queue, job.id))
        await pipe.execute()

    async def records(self, job_ids: Sequence[str]) -> dict[str, Record]:
        """Return the records of those jobs that are ours."""
        if not job_ids:
            return {}
        texts = await self._client.hmget(self._jobs, list(job_ids))
        return {job_id: decode_record(text) for job_id, text in zip(job_ids, texts, strict=True) if text is not None}

    async def open_jobs(self) -> AsyncIterator[dict[str, Record]]:
        """Give out all jobs that owe an answer, page by page; one may come twice."""
        cursor = 0
        while True:
            cursor, page = await self._client.zscan(self._open, cursor, count=PAGE)
            if page:
                yield await self.records([job_id for job_id, _ in page])
            if not cursor:
                return

    # -- what BullMQ says of them -----------------------------------------------------------------------------

    async def states(self, records: Mapping[str, Record]) -> dict[str, JobState]:
        pipe = self._client.pipeline(transaction=False)  # one queue that may not be read must not hide the others
        for job_id, record in records.items():
            pipe.exists(self._layout.key(record.queue, job_id))
            pipe.zscore(self._layout.key(record.queue, "completed"), job_id)
            pipe.zscore(self._layout.key(record.queue, "failed"), job_id)
        replies = await pipe.execute(raise_on_error=False) if records else []
        return {job_id: _state_of(replies[3 * n : 3 * n + 3]) for n, job_id in enumerate(records)}

    async def fields(self, job_id: str, record: Record, *names: str) -> list[str | None]:
        """Return some fields of a job, as BullMQ wrote them."""
        found: list[str | None] = await self._client.hmget(self._layout.key(record.queue, job_id), names)
        return found

    # -- jobs that were answered ------------------------------------------------------------------------------

    async def close(self, answers: Sequence[tuple[str, Record, bytes]]) -> None:
        """Note answers that were published. Those whose job is gone are kept here, in the same transaction: a repeated
        command would else look like a new one."""
        pipe = self._client.pipeline(transaction=False)
        for job_id, record, _ in answers:
            pipe.exists(self._layout.key(record.queue, job_id))
        exist = await pipe.execute(raise_on_error=False)
        now = self._clock.now()
        pipe = self._client.pipeline(transaction=True)
        for (job_id, _, body), exists in zip(answers, exist, strict=True):
            pipe.zrem(self._open, job_id)
            pipe.zadd(self._ended, {job_id: now})
            if exists != 1:
                pipe.hset(self._answers, job_id, body)
        await pipe.execute()

    async def forget(self, ended_before: float) -> int:
        """Remove jobs that were answered before then, here and from BullMQ. Return how many there were."""
        job_ids = await self._client.zrangebyscore(self._ended, "-inf", ended_before, start=0, num=PAGE)
        if not job_ids:
            return 0
        records = await self.records(job_ids)
        for job_id, state in (await self.states(records)).items():
            if state in (JobState.COMPLETED, JobState.FAILED):
                await self.remove(job_id, records[job_id])
        pipe = self._client.pipeline(transaction=True)
        pipe.hdel(self._jobs, *job_ids)
        pipe.hdel(self._answers, *job_ids)
        pipe.zrem(self._ended, *job_ids)
        await pipe.execute()
        return len(job_ids)

    async def remove(self, job_id: str, record: Record) -> bool:
        """Remove a job from BullMQ unless a worker holds it. Return whether it was removed."""
        try:
            return await self._layout.remove(record.queue, job_id)
        except ResponseError as error:
            if is_passing(error):
                raise
            _log.warning("a job cannot be removed from bullmq", job=job_id, queue=record.queue, reason=str(error))
            return False

    # -- queues, and turns ------------------------------------------------------------------------------------

    async def queues(self) -> set[str]:
        return set(await self._client.zrange(self._used, 0, -1))

    async def note_used(self, queues: Collection[str]) -> None:
        if queues:
            await self._client.zadd(self._used, dict.fromkeys(queues, self._clock.now()))

    async def forget_queues(self, unused_since: float) -> None:
        """Forget queues without open jobs: callers name queues, so there would be ever more of them."""
        await self._client.zremrangebyscore(self._used, "-inf", f"({unused_since}")

    async def takes_turn(self, seconds: float) -> bool:
        """Return True to one of all bridges that ask within so many seconds."""
        return bool(await self._client.set(self._turn, "1", px=max(1, int(seconds * 1000)), nx=True))


def _state_of(replies: Sequence[Any]) -> JobState:
    exists, completed, failed = replies
    if any(isinstance(reply, ResponseError) for reply in replies):
        return JobState.UNREADABLE
    if not exists:
        return JobState.MISSING
    if completed is not None:
        return JobState.COMPLETED
    return JobState.OPEN if failed is None else JobState.FAILED
