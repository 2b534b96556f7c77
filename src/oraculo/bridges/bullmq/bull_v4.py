"""The layout and the events of the npm package `bull` 3 and 4, best effort.

Bull publishes its events to whoever listens just then, and keeps none. The sweep, made more often here, finds the
rest. A job of which nothing is left when it ends (`removeOnComplete: true`) is known only by the event.
"""

import asyncio
import time
from typing import Any

import msgspec

from oraculo.bridges.bullmq.job import NewJob, Record
from oraculo.bridges.bullmq.layout import Layout, rank_of
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.results import JobReport, Results
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
# A job that a worker holds is in the list `active` alone, and stays.
_REMOVE = """
local found = redis.call('LREM', KEYS[2], 0, ARGV[1]) + redis.call('LREM', KEYS[3], 0, ARGV[1])
for place = 4, 6 do found = found + redis.call('ZREM', KEYS[place], ARGV[1]) end
redis.call('ZREM', KEYS[7], ARGV[1])
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
        self._remove = client.register_script(_REMOVE)

    def key(self, queue: str, name: str) -> str:
        return f"{self._prefix}:{queue}:{name}"

    async def add(self, pipe: Any, job: NewJob) -> None:
        now = int(time.time() * 1000)
        # Old Bull takes jobs without a priority last, unlike BullMQ.
        rank = rank_of(job) if self._has_priority and job.priority else 0
        options = {"attempts": job.attempts, "delay": 0, "priority": rank, "timestamp": now, "jobId": job.id}
        name = BULL_DEFAULT_JOB if job.name == job.record.command.tarefa else job.name
        keys = self._keys(job.record.queue, job.id, "wait", "paused", "meta-paused", "id", "priority")
        arguments = [job.id, name, job.data, msgspec.json.encode(options), now, TOKEN, rank]
        await self._add(keys=keys, args=arguments, client=pipe)

    async def remove(self, queue: str, job_id: str) -> bool:
        keys = self._keys(queue, job_id, "wait", "paused", "delayed", "completed", "failed", "priority")
        return bool(await self._remove(keys=keys, args=[job_id]))

    def _keys(self, queue: str, *names: str) -> list[str]:
        return [self.key(queue, name) for name in names]


class BullEvents:
    """Listens to Bull's channels. Each bridge hears everything, so several may give one answer, which does no harm."""

    def __init__(self, server: BullmqRedis, ledger: Ledger, layout: Layout, results: Results) -> None:
        self._server = server
        self._ledger = ledger
        self._layout = layout
        self._results = results
        self._listener: Any = None
        self._places: dict[str, tuple[str, str]] = {}  # the queue and the kind of event, by the channel

    async def run(self) -> None:
        client = self._server.connection(timeout=BLOCKING_TIMEOUT)
        self._listener = client.pubsub(ignore_subscribe_messages=True)
        try:
            while True:
                await self.listen_to(await self._ledger.queues())
                if self._places:
                    await self._listen()
                else:
                    await asyncio.sleep(LISTEN)
        finally:
            self._places.clear()
            self._listener = None
            await close_client(client)

    async def listen_to(self, queues: set[str]) -> None:
        if self._listener is None:
            return
        channels = {self._layout.key(queue, kind): (queue, kind) for queue in queues for kind in _CHANNELS}
        if new := channels.keys() - self._places.keys():
            await self._listener.subscribe(*new)
            self._places |= channels

    async def _listen(self) -> None:
        message = await self._listener.get_message(timeout=LISTEN)
        if message is None:
            return
        try:
            event = msgspec.json.decode(message["data"], type=dict[str, Any])
        except UNREADABLE:
            return
        queue, kind = self._places[message["channel"]]
        job_id = str(event.get("jobId"))
        record = (await self._ledger.records([job_id])).get(job_id)
        if record is not None and record.queue == queue:
            await self._results.send([self._report(kind, job_id, record, event)])

    def _report(self, kind: str, job_id: str, record: Record, event: dict[str, Any]) -> JobReport:
        if kind == "progress":
            return self._results.progressed(job_id, record, event.get("progress"))
        if kind == "completed":
            return self._results.completed(job_id, record, event.get("val"))
        return self._results.failed(job_id, record, str(event.get("val") or ""))
