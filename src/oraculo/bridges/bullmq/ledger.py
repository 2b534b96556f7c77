"""The bridge's memory, in the same Redis as the jobs: which of them are ours, and which still owe an answer.

A job and the record of it are written in one transaction, so each record that is open has a job, or had one. Whatever
happens to a bridge, the next one finds here what is still to be told.

`jobs`: every record by the job's id. `open`: ids that owe an answer, by when they were added. `ended`: ids that were
answered, by when; kept for a while, so that a repeated command is answered again. `answers`: what was answered, for
those whose job is gone from BullMQ by then. `used`: BullMQ's queues whose events are read, by when a job of theirs was
last added or seen open.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import structlog
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.layout import Layout, Look, ask_size, ask_state, misfits, read_sizes, read_state
from oraculo.bridges.bullmq.records import NewJob, Record, decode_record, encode_record
from oraculo.bridges.bullmq.server import is_passing
from oraculo.ports.clock import Clock

PAGE = 500
_ADDING = 5  # commands that add a job and its record

_log = structlog.get_logger("oraculo.bullmq")


class Known:
    """What there is of a job that a command is about to add."""

    __slots__ = ("answer", "job_exists", "owes_answer")

    def __init__(self, is_recorded: bool, job_exists: bool, owes_answer: bool, answer: str | None) -> None:
        self.job_exists = is_recorded and job_exists
        self.owes_answer = is_recorded and owes_answer
        self.answer = answer

    @property
    def is_repeat(self) -> bool:
        return self.job_exists or self.owes_answer or self.answer is not None


class Ledger:
    def __init__(self, client: Any, layout: Layout, bull_prefix: str, prefix: str, clock: Clock) -> None:
        self._client = client
        self._layout = layout
        self._bull_prefix = bull_prefix
        self._clock = clock
        # Not under BullMQ's prefix: tools that list its queues would take this for one.
        base = f"oraculo:{prefix}ponte-bullmq"
        self._jobs, self._open, self._ended = f"{base}:jobs", f"{base}:open", f"{base}:ended"
        self._answers, self._used, self._turn = f"{base}:answers", f"{base}:used", f"{base}:turn"

    # -- commands ---------------------------------------------------------------------------------------------

    async def known(self, jobs: Sequence[NewJob]) -> list[Known]:
        pipe = self._client.pipeline(transaction=True)
        for job in jobs:
            pipe.hexists(self._jobs, job.id)
            pipe.exists(self._layout.job_key(job.record.queue, job.id))
            pipe.zscore(self._open, job.id)
            pipe.hget(self._answers, job.id)
        replies = await pipe.execute()
        return [
            Known(bool(recorded), bool(exists), score is not None, answer)
            for recorded, exists, score, answer in zip(*(replies[n::4] for n in range(4)), strict=True)
        ]

    async def add(self, jobs: Sequence[NewJob]) -> dict[str, ResponseError]:
        """Each job with its record, or neither. Returns those that Redis said no to: a transaction goes on past an
        error, and takes nothing back."""
        if not jobs:
            return {}
        now = self._clock.now()
        pipe = self._client.pipeline(transaction=True)
        for job in jobs:
            pipe.hset(self._jobs, job.id, encode_record(job.record))
            pipe.zadd(self._open, {job.id: now})
            pipe.zrem(self._ended, job.id)
            # A job with a priority does not touch the list, and no worker gets past one of another kind.
            pipe.llen(self._layout.job_key(job.record.queue, "wait"))
            await self._layout.add(pipe, job)
        pipe.zadd(self._used, dict.fromkeys((job.record.queue for job in jobs), now))
        *replies, noted = await pipe.execute(raise_on_error=False)
        refused = {
            jobs[place // _ADDING].id: reply for place, reply in enumerate(replies) if isinstance(reply, ResponseError)
        }
        if refused:
            await self._take_back([job for job in jobs if job.id in refused])
        for error in refused.values():
            if is_passing(error):
                raise error
        if isinstance(noted, ResponseError):
            raise noted
        return refused

    async def _take_back(self, jobs: Sequence[NewJob]) -> None:
        """What there is of them: a script takes nothing back either."""
        pipe = self._client.pipeline(transaction=True)
        for job in jobs:
            pipe.hdel(self._jobs, job.id)
            pipe.zrem(self._open, job.id)
            for waiting in ("wait", "paused"):
                pipe.lrem(self._layout.job_key(job.record.queue, waiting), 0, job.id)
            for ranked in ("prioritized", "priority"):  # BullMQ's, and old Bull's
                pipe.zrem(self._layout.job_key(job.record.queue, ranked), job.id)
            pipe.delete(self._layout.job_key(job.record.queue, job.id))
        await pipe.execute(raise_on_error=False)

    async def reason(self, queue: str, error: Exception) -> str:
        """Why Redis said no, in words; with the key that is at fault, if one is."""
        named = await misfits(self._client, self._bull_prefix, queue) if "WRONGTYPE" in str(error) else ""
        return named or f"{type(error).__name__}: {error}"

    # -- what happened to them --------------------------------------------------------------------------------

    async def queues(self) -> set[str]:
        return set(await self._client.zrange(self._used, 0, -1))

    async def note_used(self, queues: Collection[str]) -> None:
        if queues:
            await self._client.zadd(self._used, dict.fromkeys(queues, self._clock.now()))

    async def forget_queues(self, unused_since: float) -> None:
        """Callers name them: they would become ever more. One that is used at this moment has a newer time."""
        await self._client.zremrangebyscore(self._used, "-inf", f"({unused_since}")

    async def records(self, job_ids: Sequence[str]) -> dict[str, Record]:
        """Of those that are ours."""
        if not job_ids:
            return {}
        texts = await self._client.hmget(self._jobs, list(job_ids))
        return {job_id: decode_record(text) for job_id, text in zip(job_ids, texts, strict=True) if text is not None}

    async def look(self, records: dict[str, Record]) -> dict[str, Look]:
        if not records:
            return {}
        pipe = self._client.pipeline(transaction=True)
        for job_id, record in records.items():
            ask_state(pipe, self._layout, self._bull_prefix, record.queue, job_id)
        replies = await pipe.execute(raise_on_error=False)
        return {job_id: read_state(replies[3 * n : 3 * n + 3]) for n, job_id in enumerate(records)}

    async def sizes(self, records: dict[str, Record]) -> dict[str, int]:
        """About how many bytes `look` would read of each."""
        pipe = self._client.pipeline(transaction=False)
        for job_id, record in records.items():
            ask_size(pipe, self._layout, record.queue, job_id)
        return dict(zip(records, read_sizes(await pipe.execute(raise_on_error=False)), strict=True))

    async def open_jobs(self) -> AsyncIterator[dict[str, Record]]:
        """All that owe an answer, page by page; one may come twice."""
        cursor = 0
        while True:
            cursor, page = await self._client.zscan(self._open, cursor, count=PAGE)
            if page:
                yield await self.records([job_id for job_id, _ in page])
            if not cursor:
                return

    async def answered(self, reports: Sequence[tuple[str, Record, bytes]]) -> None:
        """They were told, durably. The answer is kept here where BullMQ no longer has the job: with the note that
        nothing is owed, for between the two a repeated command would look like a new one."""
        gone = await self._gone(reports)
        now = self._clock.now()
        pipe = self._client.pipeline(transaction=True)
        for job_id, _, body in reports:
            pipe.zrem(self._open, job_id)
            pipe.zadd(self._ended, {job_id: now})
            if job_id in gone:
                pipe.hset(self._answers, job_id, body)
        await pipe.execute()

    async def _gone(self, reports: Sequence[tuple[str, Record, bytes]]) -> set[str]:
        pipe = self._client.pipeline(transaction=False)
        for job_id, record, _ in reports:
            pipe.exists(self._layout.job_key(record.queue, job_id))
        exists = await pipe.execute()
        return {job_id for (job_id, _, _), is_there in zip(reports, exists, strict=True) if not is_there}

    async def forget(self, ended_before: float) -> int:
        """Takes jobs that were answered before then out of BullMQ, and out of this memory. Returns how many."""
        job_ids = await self._client.zrangebyscore(self._ended, "-inf", ended_before, start=0, num=PAGE)
        if not job_ids:
            return 0
        for job_id, record in (await self.records(job_ids)).items():
            try:
                await self._layout.remove(record.queue, job_id)
            except ResponseError as error:
                if is_passing(error):
                    raise
                _log.warning("an ended job stays in bullmq", job=job_id, queue=record.queue, reason=str(error))
        pipe = self._client.pipeline(transaction=True)
        pipe.hdel(self._jobs, *job_ids)
        pipe.hdel(self._answers, *job_ids)
        pipe.zrem(self._ended, *job_ids)
        await pipe.execute()
        return len(job_ids)

    async def takes_turn(self, seconds: float) -> bool:
        """Of all bridges that ask within so many seconds, one gets it."""
        return bool(await self._client.set(self._turn, "1", px=max(1, int(seconds * 1000)), nx=True))
