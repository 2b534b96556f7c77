"""Jobs of `orchestrator-queue` start pipelines: BullMQ's own worker takes them, and each waits for its run.

A job whose bridge dies stalls, and another bridge takes it over: the run's id is made of the job, so that the same run
is found, not a second one started. A new attempt of the job, after its run did not succeed, is a new run.
"""

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Awaitable
from typing import Any

import msgspec
import structlog
from bullmq import Worker
from bullmq.custom_errors import DelayedError, UnrecoverableError
from redis.exceptions import RedisError, ResponseError

from oraculo.bridges.bullmq.bull_v4_worker import BullWorker
from oraculo.bridges.bullmq.pausing import mind_pauses_of
from oraculo.bridges.bullmq.refusals import Refusals
from oraculo.bridges.bullmq.runs import Followed, Lost, Overtaken, RequestRefused, Runs
from oraculo.bridges.bullmq.server import BLOCKING_TIMEOUT, WATCH_PAUSE, BullmqRedis, close_client, within
from oraculo.clients.subscription import Backoff
from oraculo.errors import InvalidInput, OraculoError
from oraculo.ports.clock import Entropy
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.settings import BullmqSettings
from oraculo.wire import naming
from oraculo.wire.json_guard import HALF_A_PAIR, is_too_deep

PIPELINE = "pipelineName"
PAYLOAD = "payload"
RECONNECT = 1.0  # seconds until BullMQ's worker asks again after a loss
TRIES = 60  # of a call of BullMQ's worker, while the connection is lost: the end of a job must come through
STOP_GRACE = 5.0
NEVER = 1_000_000_000  # stalls after which a job is given up: its run goes on, whoever follows it
MOST_FAULTS = 5
MOST_BACKOFF = 1_000_000_000  # milliseconds
SUCCESSES = ("concluida", "parcial")

_UNREADABLE = re.compile(r"[^A-Za-z0-9_.-]+")
_log = structlog.get_logger("oraculo.bullmq")


class NotSucceeded(Exception):
    """The run ended, and not well."""


class _BullmqWorker(Worker):  # type: ignore[misc]
    """BullMQ's own, and what the entry needs besides."""

    def mind_pauses(self) -> None:
        mind_pauses_of(f"{self.qualifiedName}:", self.redisConnection.commands, self.client)

    def mind_refusals_of(self, server: BullmqRedis) -> None:
        self._server = server

    async def getNextJob(self, token: str) -> Any:  # noqa: N802
        """Of a Redis that answers and refuses, as one that is full does, each of the places would ask ten times a
        second."""
        try:
            return await super().getNextJob(token)
        except ResponseError as error:
            if self.isConnectionError(error):
                raise
            if not (self.paused or self.closing):
                self.emit("error", error)
            await self._refusal_passed()
            return None

    async def _refusal_passed(self) -> None:
        await asyncio.sleep(WATCH_PAUSE)
        while self._server.trouble and not (self.paused or self.closing):  # noqa: ASYNC110 - bullmq sets the latter two
            await asyncio.sleep(WATCH_PAUSE)

    async def nextJobFromJobData(self, job_data: dict[str, Any] | None = None, *others: Any, **named: Any) -> Any:  # noqa: N802
        """A job whose data Python cannot read would stall, and be taken again, for ever: its data are handed over as
        they stand, so that it fails of them."""
        if job_data and "rjk" in job_data:
            await self._keep_data_of_repeats(job_data)
        return await super().nextJobFromJobData(job_data and _readable(job_data), *others, **named)

    async def _keep_data_of_repeats(self, fields: dict[str, Any]) -> None:
        """Of jobs that were added with `repeat`, which is older than BullMQ's schedulers, only the first has the data:
        bullmq for Python would make the next ones without, and BullMQ 5 for Node notes them here too."""
        template = f"{self.qualifiedName}:repeat:{fields['rjk']}"
        try:
            if await self.client.exists(template):
                await self.client.hsetnx(template, "data", fields.get("data", "{}"))
        except RedisError as error:
            _log.warning("the next of a repeated job may have no data", job=fields["rjk"], reason=str(error))

    async def give_back_all(self) -> None:
        """Takes no more, and returns when those who had a job have let go of it."""
        await self.pause(do_not_wait_active=True)
        while self.jobs:  # noqa: ASYNC110 - bullmq tells nobody when the last one is gone
            await asyncio.sleep(0.01)
        await self._give_back_unbegun(list(self.processing))
        await self.close(force=True)

    async def _give_back_unbegun(self, fetching: "list[asyncio.Future[Any]]") -> None:
        """What was being fetched when the worker was paused, maybe the very job that was given back just now. It would
        be nobody's until its lock runs out."""
        for ended in (await asyncio.wait(fetching))[0] if fetching else ():
            if ended.cancelled() or ended.exception() or (job := ended.result()) is None:
                continue
            try:
                await job.moveToDelayed(int(time.time() * 1000), job.token)
            except Exception as error:  # noqa: BLE001 - the worker did that by itself, or its lock runs out
                _log.debug("a job that was being fetched could not be given back", job=job.id, reason=str(error))


def _pause_of_strange_backoff(_attempts: int, _type: object, _error: object, job: Any) -> int:
    """For a strategy that only the application's own workers know: without one the job could not be ended at all."""
    backoff = job.opts.get("backoff")
    delay = backoff.get("delay") if isinstance(backoff, dict) else None
    return int(delay) if isinstance(delay, int | float) and 0 < delay < MOST_BACKOFF else 0


def _readable(fields: dict[str, Any]) -> dict[str, Any]:
    """What bullmq, which reads it next, cannot read or only some versions of Python can, as a text."""
    data = fields.get("data", "{}")
    try:
        json.loads(data)
        is_read = not is_too_deep(data.encode(errors="surrogatepass"))
    except (ValueError, RecursionError):
        is_read = False
    return fields if is_read else fields | {"data": json.dumps(data)}


class Entry:
    def __init__(
        self,
        server: BullmqRedis,
        settings: BullmqSettings,
        runs: Runs,
        refusals: Refusals,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._server = server
        self._settings = settings
        self._runs = runs
        self._refusals = refusals
        self._entropy = entropy
        self._telemetry = telemetry
        self._stopping = asyncio.Event()
        self._worker: _BullmqWorker | BullWorker | None = None

    async def run(self) -> None:
        """Until Redis cannot be reached at the start, or it is closed."""
        client = self._server.connection(timeout=BLOCKING_TIMEOUT, tries=TRIES)
        try:
            self._worker = self._make_worker(client)
            await self._worker.run()
        finally:
            await close_client(client)

    def _make_worker(self, client: Any) -> _BullmqWorker | BullWorker:
        settings = self._settings
        if settings.legacy:
            base = f"{settings.prefix}:{settings.entry}:"
            return BullWorker(
                client,
                base,
                self._process,
                concurrency=settings.concurrency,
                lock=settings.lock,
                tell=self._tell,
            )
        lock = max(1000, int(settings.lock * 1000))
        options = {
            "connection": client,
            "prefix": settings.prefix,
            "autorun": False,
            "concurrency": settings.concurrency,
            "lockDuration": lock,
            "stalledInterval": max(500, lock // 2),
            "maxStalledCount": NEVER,
            "runRetryDelay": int(RECONNECT * 1000),
            "settings": {"backoffStrategy": _pause_of_strange_backoff},
        }
        worker = _BullmqWorker(settings.entry, self._process, options)
        worker.mind_pauses()
        worker.mind_refusals_of(self._server)
        worker.on("error", self._tell)
        return worker

    def _tell(self, error: Exception, *_: object) -> None:
        duty = f"bridge bullmq entry {self._settings.entry}"
        self._refusals.note(f"the queue {self._settings.entry}", error)
        self._telemetry.emit(LoopFailed(duty, f"{type(error).__name__}: {error}"))

    async def close(self) -> None:
        """Gives back the jobs that it holds, for another bridge to follow their runs."""
        self._stopping.set()
        if self._worker is not None:
            await within(STOP_GRACE, self._worker.give_back_all())

    # -- one job ----------------------------------------------------------------------------------------------

    async def _process(self, job: Any, token: str) -> Any:
        try:
            request = request_of(job.data)
        except InvalidInput as error:
            raise UnrecoverableError(str(error)) from None
        followed = self._runs.follow(run_id_of(self._settings.entry, job))
        try:
            await self._start(job, followed, request)
            await self._await_end(job, token, followed)
            if isinstance(followed.fault, Overtaken):
                await self._await_successor(followed.fault.successor)
        finally:
            self._runs.leave(followed)
        return self._outcome(followed)

    async def _start(self, job: Any, followed: Followed, request: bytes) -> None:
        """A job that was taken over finds its run, and asks for no other."""
        backoff = Backoff(self._entropy)
        while not self._stopping.is_set():
            try:
                if not await self._runs.is_started(followed.run_id):
                    await self._runs.start(followed.run_id, request)
                    await self._try_to_tell(job, job.log(f"run {followed.run_id}"))
                followed.since = asyncio.get_running_loop().time()
                return
            except OraculoError as error:
                _log.warning("a run could not be asked for; trying again", job=job.id, reason=str(error))
            await backoff.pause()

    async def _await_end(self, job: Any, token: str, followed: Followed) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        told = -1
        try:
            while followed.aggregate is None and followed.fault is None:
                changed = asyncio.ensure_future(followed.changed.wait())
                await asyncio.wait((changed, stopping), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if self._stopping.is_set():
                    await job.moveToDelayed(int(time.time() * 1000), token)
                    raise DelayedError
                followed.changed.clear()
                told = await self._tell_progress(job, followed.percent, told)
            if followed.aggregate is not None:  # it may have come while something else was told
                await self._tell_progress(job, followed.percent, told)
        finally:
            stopping.cancel()

    async def _await_successor(self, successor: Followed) -> None:
        """BullMQ's worker renews the lock of a job until the first call for it returns, whoever has the job by then."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        left = asyncio.ensure_future(successor.left.wait())
        await asyncio.wait((left, stopping), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        stopping.cancel()

    async def _tell_progress(self, job: Any, percent: int, told: int) -> int:
        if percent != told:
            await self._try_to_tell(job, job.updateProgress(percent))
        return percent

    async def _try_to_tell(self, job: Any, telling: Awaitable[object]) -> None:
        """What is only for people to see ends no job: its run goes on."""
        try:
            await telling
        except (RedisError, TypeError) as error:  # bullmq raises TypeError for a job that is not there
            _log.debug("a job could not be told how its run goes", job=job.id, reason=str(error))

    def _outcome(self, followed: Followed) -> Any:
        if isinstance(followed.fault, Overtaken):
            raise DelayedError  # which leaves the job as it is: it is another's by now
        if isinstance(followed.fault, RequestRefused | Lost):
            raise UnrecoverableError(str(followed.fault))
        assert followed.aggregate is not None
        aggregate = msgspec.json.decode(followed.aggregate)
        if aggregate.get("status") in SUCCESSES:
            return aggregate
        raise NotSucceeded(describe(aggregate))


def request_of(data: object) -> bytes:
    """The body of the request for the run: the same bytes for the same job. Raises InvalidInput."""
    if not isinstance(data, dict):
        raise InvalidInput.at("data", f'must be an object, as {{"{PIPELINE}": "…"}}; got {naming.shown(data)}')
    name = data.get(PIPELINE)
    if not isinstance(name, str) or not name:
        got = f"; got {naming.shown(name)}" if PIPELINE in data else ""
        raise InvalidInput.at(f"data.{PIPELINE}", f"must name a pipeline{got}")
    given = data.get(PAYLOAD, {})
    if not isinstance(given, dict):
        raise InvalidInput.at(f"data.{PAYLOAD}", f"must be an object; got {naming.shown(given)}")
    payload = {key: value for key, value in data.items() if key not in (PIPELINE, PAYLOAD)} | given
    try:
        return msgspec.json.encode({"pipeline": name, "payload": payload}, order="deterministic")
    except UnicodeEncodeError:
        raise InvalidInput.at("data", HALF_A_PAIR) from None


def run_id_of(queue: str, job: Any) -> str:
    """BullMQ counts its ids from 1 again after a flush, so the job's time is part of it; and so is the attempt."""
    identity = f"{queue}\0{job.id}\0{job.timestamp}\0{job.attemptsMade}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return f"{_UNREADABLE.sub('_', f'{queue}-{job.id}')[:100]}-{digest}"


def describe(aggregate: dict[str, Any]) -> str:
    """`run x ended erro: VOICE_OVER: no answer in 30 s`."""
    faults = aggregate.get("falhas") or {}
    told = [f"{step}: {fault.get('motivo') or fault.get('status')}" for step, fault in faults.items()]
    more = f" and {len(told) - MOST_FAULTS} more" if len(told) > MOST_FAULTS else ""
    reasons = f": {'; '.join(told[:MOST_FAULTS])}{more}" if told else ""
    return f"run {aggregate.get('correlation_id')} ended {aggregate.get('status')}{reasons}"
