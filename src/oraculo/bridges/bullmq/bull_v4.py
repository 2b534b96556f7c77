"""Old Bull (3 and 4), best effort: the same bridge over its layout of keys, which has no stream of events.

It tells what happens by publishing, which nobody hears who does not listen just then; the sweep, made more often here,
finds the rest. A job of which nothing is left when it ends (`removeOnComplete: true`) is known only by what was heard.
"""

import asyncio
import time
from typing import Any

import msgspec

from oraculo.bridges.bullmq.layout import rank_of
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.records import NewJob
from oraculo.bridges.bullmq.reports import Report, Reporter
from oraculo.bridges.bullmq.server import BLOCKING_TIMEOUT, BullmqRedis, close_client
from oraculo.pipeline.bridge_rules import BULL_DEFAULT_JOB
from oraculo.wire.json_guard import UNREADABLE

TOKEN = "oraculo"
LISTEN = 1.0
_CHANNELS = ("completed", "failed", "progress")

_ADD = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('INCR', KEYS[5])
redis.call('HSET', KEYS[1], 'name', ARGV[2], 'data', ARGV[3], 'opts', ARGV[4], 'timestamp', ARGV[5],
  'delay', '0', 'priority', ARGV[7])
local list = redis.call('EXISTS', KEYS[4]) == 1 and KEYS[3] or KEYS[2]
if ARGV[7] == '0' then
  redis.call('LPUSH', list, ARGV[1])
else
  redis.call('ZADD', KEYS[6], ARGV[7], ARGV[1])
  local before = redis.call('ZCOUNT', KEYS[6], 0, ARGV[7])
  local next = redis.call('LINDEX', list, redis.call('LLEN', list) - (before - 1))
  if next then redis.call('LINSERT', list, 'BEFORE', next, ARGV[1]) else redis.call('RPUSH', list, ARGV[1]) end
end
redis.call('PUBLISH', KEYS[2] .. 'ing@' .. ARGV[6], ARGV[1])
return 1
"""
_WITHDRAW = """
local found = redis.call('LREM', KEYS[2], 0, ARGV[1]) + redis.call('LREM', KEYS[3], 0, ARGV[1])
  + redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZREM', KEYS[5], ARGV[1])
if found > 0 then redis.call('DEL', KEYS[1], KEYS[1] .. ':logs') end
return found
"""
_REMOVE = """
local found = redis.call('ZREM', KEYS[2], ARGV[1]) + redis.call('ZREM', KEYS[3], ARGV[1])
if found > 0 then redis.call('DEL', KEYS[1], KEYS[1] .. ':logs') end
return found
"""


class BullLayout:
    keeps_events = False
    sweep_pause = 5.0

    def __init__(self, client: Any, prefix: str, *, priority: bool) -> None:
        self._prefix = prefix
        self._has_priority = priority
        self._add = client.register_script(_ADD)
        self._withdraw = client.register_script(_WITHDRAW)
        self._remove = client.register_script(_REMOVE)

    def job_key(self, queue: str, job_id: str) -> str:
        return f"{self._prefix}:{queue}:{job_id}"

    async def add(self, pipe: Any, job: NewJob) -> None:
        now = int(time.time() * 1000)
        # Old Bull takes jobs without a priority last, unlike BullMQ.
        rank = rank_of(job) if self._has_priority and job.priority else 0
        options = {"attempts": job.attempts, "delay": 0, "priority": rank, "timestamp": now, "jobId": job.id}
        name = BULL_DEFAULT_JOB if job.name == job.record.command.tarefa else job.name
        keys = self._keys(job.record.queue, job.id, "wait", "paused", "meta-paused", "id", "priority")
        arguments = [job.id, name, job.data, msgspec.json.encode(options), now, TOKEN, rank]
        await self._add(keys=keys, args=arguments, client=pipe)

    async def withdraw(self, queue: str, job_id: str) -> bool:
        keys = self._keys(queue, job_id, "wait", "paused", "delayed", "priority")
        return bool(await self._withdraw(keys=keys, args=[job_id]))

    async def remove(self, queue: str, job_id: str) -> None:
        await self._remove(keys=self._keys(queue, job_id, "completed", "failed"), args=[job_id])

    async def close(self) -> None:
        pass

    def _keys(self, queue: str, *names: str) -> list[str]:
        return [self.job_key(queue, name) for name in names]


class BullEvents:
    """Listens while it lives. Each bridge hears everything, so an answer may be given once by each: harmless."""

    def __init__(self, server: BullmqRedis, ledger: Ledger, reporter: Reporter, bull_prefix: str) -> None:
        self._server = server
        self._ledger = ledger
        self._reporter = reporter
        self._bull_prefix = bull_prefix
        self._listener: Any = None
        self._heard: set[str] = set()

    async def run(self) -> None:
        """Until Redis fails."""
        client = self._server.connection(timeout=BLOCKING_TIMEOUT)
        self._listener = client.pubsub(ignore_subscribe_messages=True)
        try:
            while True:
                await self.heed(await self._ledger.queues())
                if self._heard:
                    await self._listen()
                else:
                    await asyncio.sleep(LISTEN)
        finally:
            self._heard.clear()
            self._listener = None
            await close_client(client)

    async def heed(self, queues: set[str]) -> None:
        if self._listener is not None and (new := queues - self._heard):
            channels = [f"{self._bull_prefix}:{queue}:{kind}" for queue in new for kind in _CHANNELS]
            await self._listener.subscribe(*channels)
            self._heard |= new

    async def _listen(self) -> None:
        message = await self._listener.get_message(timeout=LISTEN)
        if message is not None:
            await self._tell(message["channel"], message["data"])

    async def _tell(self, channel: str, text: str) -> None:
        try:
            told = msgspec.json.decode(text, type=dict[str, Any])
        except UNREADABLE:
            return
        queue, _, kind = channel.removeprefix(f"{self._bull_prefix}:").rpartition(":")
        job_id = str(told.get("jobId"))
        record = (await self._ledger.records([job_id])).get(job_id)
        if record is not None and record.queue == queue:
            await self._reporter.send([self._report(kind, job_id, record, told)])

    def _report(self, kind: str, job_id: str, record: Any, told: dict[str, Any]) -> Report:
        if kind == "progress":
            return self._reporter.progressed(job_id, record, told.get("progress"))
        if kind == "completed":
            return self._reporter.completed(job_id, record, told.get("val"))
        return self._reporter.failed(job_id, record, str(told.get("val") or ""))
