"""A worker of old Bull, as far as the entry needs one: it takes jobs, renews their locks, and ends them.

It and its jobs have the few methods of BullMQ's that the entry uses. Best effort: it knows no rate limits and no
priorities, and tries a job again at once, whatever its backoff.
"""

import asyncio
import time
import uuid
from typing import Any

import msgspec
from bullmq.custom_errors import DelayedError, UnrecoverableError
from redis.exceptions import RedisError

from oraculo.bridges.bullmq.bullmq_worker import Process, Report
from oraculo.bridges.bullmq.server import BullmqRedis
from oraculo.settings import BullmqSettings

POLL = 0.2

# Jobs whose delay is over come first to the waiting ones. Taking and locking are one step: a job in `active` without a
# lock is one whose worker was lost, and the next worker gets it. The script leaves the `wait` of a paused queue alone:
# Bull loses what is in it when it puts the list of paused jobs in its place.
_TAKE = """
local base, now = KEYS[1], tonumber(ARGV[1])
if redis.call('EXISTS', base .. 'meta-paused') == 1 then return false end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. 'delayed', 0, (now + 1) * 4096, 'LIMIT', 0, 100)) do
  redis.call('ZREM', base .. 'delayed', id)
  redis.call('LPUSH', base .. 'wait', id)
end
for _, id in ipairs(redis.call('LRANGE', base .. 'active', 0, -1)) do
  if redis.call('EXISTS', base .. id .. ':lock') == 0 then
    redis.call('LREM', base .. 'active', 1, id)
    redis.call('RPUSH', base .. 'wait', id)
  end
end
local id = redis.call('RPOPLPUSH', base .. 'wait', base .. 'active')
if not id then return false end
redis.call('SET', base .. id .. ':lock', ARGV[2], 'PX', ARGV[3])
redis.call('HSET', base .. id, 'processedOn', ARGV[1])
redis.call('PUBLISH', base .. 'active@' .. ARGV[2], id)
return {id, redis.call('HGETALL', base .. id)}
"""
_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""
# ARGV: id, token, target (`completed`, `failed` or `wait`), field, value, now, 1 to remove it, 1 to count the attempt.
_END = """
local base, id, target = KEYS[1], ARGV[1], ARGV[3]
if redis.call('GET', base .. id .. ':lock') ~= ARGV[2] then return -2 end
if redis.call('LREM', base .. 'active', -1, id) < 1 then return -3 end
redis.call('DEL', base .. id .. ':lock')
if ARGV[8] == '1' then redis.call('HINCRBY', base .. id, 'attemptsMade', 1) end
if target == 'wait' then
  local list = redis.call('EXISTS', base .. 'meta-paused') == 1 and 'paused' or 'wait'
  return redis.call('RPUSH', base .. list, id)
end
if ARGV[7] == '1' then
  redis.call('DEL', base .. id, base .. id .. ':logs')
else
  redis.call('HSET', base .. id, ARGV[4], ARGV[5], 'finishedOn', ARGV[6])
  redis.call('ZADD', base .. target, ARGV[6], id)
end
redis.call('PUBLISH', base .. target, cjson.encode({jobId = id, val = ARGV[5]}))
return 0
"""


class BullJob:
    """A job of old Bull, with the methods of BullMQ's that the entry calls."""

    def __init__(self, worker: "BullWorker", job_id: str, fields: dict[str, str]) -> None:
        self._worker = worker
        self.id = job_id
        self.data = _decoded(fields.get("data") or "{}")
        options = _decoded(fields.get("opts") or "{}")
        self.options: dict[str, Any] = options if isinstance(options, dict) else {}
        self.timestamp = _number(fields.get("timestamp"))
        self.attemptsMade = _number(fields.get("attemptsMade"))

    async def log(self, text: str) -> None:
        await self._worker.client.rpush(f"{self._worker.base}{self.id}:logs", text)

    async def updateProgress(self, percent: int) -> None:  # noqa: N802 - as BullMQ's job has it
        await self._worker.client.hset(f"{self._worker.base}{self.id}", "progress", percent)
        event = msgspec.json.encode({"jobId": self.id, "progress": percent})
        await self._worker.client.publish(f"{self._worker.base}progress", event)

    async def moveToDelayed(self, _moment: int, _token: str) -> None:  # noqa: N802 - as above
        await self._worker.end(self, "wait", counts=False)


class BullWorker:
    def __init__(
        self, _server: BullmqRedis, client: Any, settings: BullmqSettings, process: Process, report: Report
    ) -> None:
        self.client = client
        self.base = f"{settings.prefix}:{settings.entry}:"
        self.jobs: set[asyncio.Task[None]] = set()
        self._process = process
        self._report = report
        self._concurrency = settings.concurrency
        self._lock = max(1000, int(settings.lock * 1000))
        self._token = uuid.uuid4().hex
        self._is_stopping = False
        self._is_taking = False
        self._take_script = client.register_script(_TAKE)
        self._renew_script = client.register_script(_RENEW)
        self._end_script = client.register_script(_END)

    async def run(self) -> None:
        """Take jobs until Redis fails, or every job is given back. What is in work goes on meanwhile."""
        while not self._is_stopping:
            if len(self.jobs) >= self._concurrency or not await self._take():
                await asyncio.sleep(POLL)
        if self.jobs:  # they need the connection, which is closed after this
            await asyncio.wait(self.jobs)

    async def give_back_all(self) -> None:
        """Take no more, and return when those who had a job have let go of it, also one that was being taken."""
        self._is_stopping = True
        while self._is_taking or self.jobs:  # noqa: ASYNC110 - for a moment, once in its life
            await asyncio.sleep(0.01)

    async def _take(self) -> bool:
        arguments = [int(time.time() * 1000), self._token, self._lock]
        self._is_taking = True
        try:
            taken = await self._take_script(keys=[self.base], args=arguments)
        finally:
            self._is_taking = False
        if not taken:
            return False
        job_id, flat = taken
        fields = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        task = asyncio.create_task(self._work(job_id, fields))
        self.jobs.add(task)
        task.add_done_callback(self.jobs.discard)
        return True

    async def _work(self, job_id: str, fields: dict[str, str]) -> None:
        renewal = asyncio.create_task(self._renew(job_id))
        try:
            job = BullJob(self, job_id, fields)
            await self._finish(job)
        except (RedisError, OSError) as error:
            self._report(error)  # its lock runs out, and it is taken again
        finally:
            renewal.cancel()

    async def _finish(self, job: BullJob) -> None:
        try:
            value = await self._process(job, self._token)
        except DelayedError:
            return
        except UnrecoverableError as error:
            await self._fail(job, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the job failed for it
            if job.attemptsMade + 1 < _number(job.options.get("attempts")):
                await self.end(job, "wait")
            else:
                await self._fail(job, str(error))
        else:
            await self.end(job, "completed", "returnvalue", msgspec.json.encode(value).decode())

    async def _fail(self, job: BullJob, reason: str) -> None:
        await self.end(job, "failed", "failedReason", reason)

    async def end(self, job: BullJob, target: str, field: str = "", value: str = "", *, counts: bool = True) -> None:
        option = "removeOnComplete" if target == "completed" else "removeOnFail"
        removes = "1" if job.options.get(option) is True else ""
        now = int(time.time() * 1000)
        arguments = [job.id, self._token, target, field, value, now, removes, "1" if counts else ""]
        await self._end_script(keys=[self.base], args=arguments)

    async def _renew(self, job_id: str) -> None:
        while True:
            await asyncio.sleep(self._lock / 3000)
            try:
                await self._renew_script(keys=[f"{self.base}{job_id}:lock"], args=[self._token, self._lock])
            except (RedisError, OSError) as error:
                self._report(error)


def _decoded(text: str) -> object:
    """Return what a text holds, or the text where it is no JSON: the entry then says what is wrong."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _number(value: object) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        return 0
