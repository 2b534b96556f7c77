"""BullMQ's own worker, for the jobs of the entry, and what it lacks for that.

`bull_v4_worker` has the same for the npm package `bull`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from bullmq import Worker
from redis.exceptions import RedisError, ResponseError

from oraculo.bridges.bullmq.paused_queues import correct_worker
from oraculo.bridges.bullmq.server import WATCH_PAUSE, BullmqRedis
from oraculo.settings import BullmqSettings

Process = Callable[[Any, str], Awaitable[Any]]
Report = Callable[..., None]

RECONNECT = 1000  # milliseconds until the worker asks again after a loss
NEVER = 1_000_000_000  # stalls after which a job is given up: its run goes on, whoever follows it
MOST_BACKOFF = 1_000_000_000  # milliseconds

_log = structlog.get_logger("oraculo.bullmq")


class BullmqWorker(Worker):  # type: ignore[misc]
    def __init__(
        self, server: BullmqRedis, client: Any, settings: BullmqSettings, process: Process, report: Report
    ) -> None:
        lock = max(1000, int(settings.lock * 1000))
        options = {
            "connection": client,
            "prefix": settings.prefix,
            "autorun": False,
            "concurrency": settings.concurrency,
            "lockDuration": lock,
            "stalledInterval": max(500, lock // 2),
            "maxStalledCount": NEVER,
            "runRetryDelay": RECONNECT,
            "drainDelay": WATCH_PAUSE,  # BullMQ may miss the marker of a new job, which then waits this long
            "settings": {"backoffStrategy": _pause_of_strange_backoff},
        }
        super().__init__(settings.entry, process, options)
        self._server = server
        correct_worker(f"{self.qualifiedName}:", self.redisConnection.commands, self.client)
        self.on("error", report)

    async def getNextJob(self, token: str) -> Any:  # noqa: N802 - bullmq's name
        """Wait for a Redis that answers and refuses, as a full one does. BullMQ would ask ten times a second, for each
        job that it may take."""
        try:
            return await super().getNextJob(token)
        except ResponseError as error:
            if self.isConnectionError(error):
                raise
            if not self._is_ending:
                self.emit("error", error)
            await asyncio.sleep(WATCH_PAUSE)
            while self._server.trouble and not self._is_ending:  # noqa: ASYNC110 - bullmq sets the latter
                await asyncio.sleep(WATCH_PAUSE)
            return None

    @property
    def _is_ending(self) -> bool:
        return bool(self.paused or self.closing)

    async def nextJobFromJobData(self, job_data: dict[str, Any] | None = None, *others: Any, **named: Any) -> Any:  # noqa: N802 - bullmq's name
        """Take a job. One whose data Python cannot read would stall for ever: it is given none, and fails for that."""
        if job_data and "rjk" in job_data:
            await self._keep_data_of_repeats(job_data)
        try:
            return await super().nextJobFromJobData(job_data, *others, **named)
        except (ValueError, RecursionError):
            return await super().nextJobFromJobData({**(job_data or {}), "data": "null"}, *others, **named)

    async def _keep_data_of_repeats(self, fields: dict[str, Any]) -> None:
        """Note the data of a job that was added with `repeat`. Only the first such job has them, and bullmq for Python
        would make the next ones without."""
        template = f"{self.qualifiedName}:repeat:{fields['rjk']}"
        try:
            if await self.client.exists(template):
                await self.client.hsetnx(template, "data", fields.get("data", "{}"))
        except RedisError as error:
            _log.warning("the next of a repeated job may have no data", job=fields["rjk"], reason=str(error))

    async def give_back_all(self) -> None:
        """Take no more, and return when those who had a job have let go of it."""
        await self.pause(do_not_wait_active=True)
        while self.jobs:  # noqa: ASYNC110 - bullmq does not say when the last one is gone
            await asyncio.sleep(0.01)
        # One that was being fetched meanwhile would be nobody's until its lock runs out.
        for ended in (await asyncio.wait(self.processing))[0] if self.processing else ():
            if not ended.cancelled() and ended.exception() is None and (job := ended.result()) is not None:
                await self._give_back(job)
        await self.close(force=True)

    async def _give_back(self, job: Any) -> None:
        try:
            await job.moveToDelayed(int(time.time() * 1000), job.token)
        except Exception as error:  # noqa: BLE001 - the worker did that by itself, or its lock runs out
            _log.debug("a job that was being fetched could not be given back", job=job.id, reason=str(error))


def _pause_of_strange_backoff(_attempts: int, _type: object, _error: object, job: Any) -> int:
    """Return the pause for a strategy that only the application's own workers know. Without one bullmq could not end
    the job at all."""
    backoff = job.opts.get("backoff")
    delay = backoff.get("delay") if isinstance(backoff, dict) else None
    return int(delay) if isinstance(delay, int | float) and 0 < delay < MOST_BACKOFF else 0
