"""Jobs of `orchestrator-queue` start pipelines: each starts a run, follows it, and ends with its aggregate.

The run's id is made of the job. When a bridge dies its job stalls, another bridge takes it over and starts the run
again, which finds the same run. A new attempt of the job, after its run did not succeed, is a new run.
"""

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from bullmq.custom_errors import DelayedError, UnrecoverableError
from redis.exceptions import RedisError

from oraculo.bridges.bullmq.bull_v4_worker import BullWorker
from oraculo.bridges.bullmq.bullmq_worker import BullmqWorker
from oraculo.bridges.bullmq.server import BLOCKING_TIMEOUT, BullmqRedis, Refusals, close_client, within
from oraculo.clients.subscription import Backoff
from oraculo.core.chunks import pages
from oraculo.core.run import RunHead
from oraculo.errors import Conflict, InvalidInput, OraculoError, PayloadTooLarge
from oraculo.ports.bridge import RunStarter
from oraculo.ports.clock import Entropy
from oraculo.ports.readable import readable
from oraculo.ports.store import Store
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.settings import BullmqSettings
from oraculo.wire import naming
from oraculo.wire.json_guard import HALF_A_PAIR

PIPELINE = "pipelineName"
PAYLOAD = "payload"
TRIES = 60  # of a call of the worker, while the connection is lost: the end of a job must come through
STOP_GRACE = 5.0
WAIT = 600.0  # seconds that one call waits for a run's end; then the next one waits on
POLL = 0.3  # seconds between two looks at how far the runs are
PAGE = 500
MOST_FAULTS = 5
SUCCESSES = ("concluida", "parcial")

_UNREADABLE = re.compile(r"[^A-Za-z0-9_.-]+")
_log = structlog.get_logger("oraculo.bullmq")


class NotSucceeded(Exception):
    """The run ended, and its job fails for it."""


class Entry:
    def __init__(
        self,
        server: BullmqRedis,
        settings: BullmqSettings,
        runs: RunStarter,
        store: Store,
        refusals: Refusals,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._server = server
        self._settings = settings
        self._runs = runs
        self._store = store
        self._refusals = refusals
        self._entropy = entropy
        self._telemetry = telemetry
        self._stopping = asyncio.Event()
        self._percents: dict[str, int] = {}  # how far the runs are that this bridge follows
        self._worker: BullmqWorker | BullWorker | None = None

    async def run(self) -> None:
        """Take jobs, until Redis cannot be reached at the start or the entry is closed."""
        if self._stopping.is_set():
            return  # else a new worker would take what the last one has given back
        client = self._server.connection(timeout=BLOCKING_TIMEOUT, tries=TRIES)
        make = BullWorker if self._settings.legacy else BullmqWorker
        try:
            self._worker = make(self._server, client, self._settings, self._process, self._report_error)
            await self._worker.run()
        finally:
            await close_client(client)

    def _report_error(self, error: Exception, *_: object) -> None:
        queue = self._settings.entry
        self._refusals.note(f"the queue {queue}", error)
        self._telemetry.emit(LoopFailed(f"bridge bullmq entry {queue}", f"{type(error).__name__}: {error}"))

    async def watch_progress(self) -> None:
        """Look at the heads of the followed runs, for ever: a few bytes each, however wide the run is."""
        while True:
            await asyncio.sleep(POLL)
            for run_ids in pages(list(self._percents), PAGE):
                heads, _ = await readable(self._store.heads, run_ids)
                self._percents |= {run_id: _percent(head) for run_id, head in heads.items() if run_id in self._percents}

    async def close(self) -> None:
        """Give back the jobs, for another bridge to follow their runs."""
        self._stopping.set()
        if self._worker is not None:
            await within(STOP_GRACE, self._worker.give_back_all())

    # -- one job ----------------------------------------------------------------------------------------------

    async def _process(self, job: Any, token: str) -> Any:
        """Return the aggregate of the job's run, which the job completes with. Called by the worker."""
        run_id = run_id_of(self._settings.entry, job)
        try:
            request = request_of(run_id, job.data)
        except InvalidInput as error:
            raise UnrecoverableError(str(error)) from None
        following = asyncio.ensure_future(self._follow(job, run_id, request))
        stopping = asyncio.ensure_future(self._stopping.wait())
        self._percents[run_id] = 0
        try:
            await self._show_progress(job, run_id, following, stopping)
            if not following.done():
                await job.moveToDelayed(int(time.time() * 1000), token)
                raise DelayedError
            aggregate = msgspec.json.decode(following.result())
        finally:
            following.cancel()
            stopping.cancel()
            self._percents.pop(run_id, None)
        if aggregate.get("status") not in SUCCESSES:
            raise NotSucceeded(describe(aggregate))
        return aggregate

    async def _follow(self, job: Any, run_id: str, request: bytes) -> bytes:
        """Start the run, unless it was started before, and return its aggregate once it has ended."""
        backoff = Backoff(self._entropy)
        is_logged = False
        while True:
            try:
                with suppress(Conflict):  # the run is there, from what was the job's data then
                    await self._runs.submit(request, idempotency_key=run_id)
                if not is_logged:
                    await self._try_to_show(job, job.log(f"run {run_id}"))
                    is_logged = True
                if (aggregate := await self._runs.wait(run_id, WAIT)) is not None:
                    return aggregate
                backoff.reset()
            except (InvalidInput, PayloadTooLarge) as error:
                raise UnrecoverableError(str(error)) from None
            except OraculoError as error:
                _log.warning("a run cannot be started or followed; trying again", job=job.id, reason=str(error))
            await backoff.pause()

    async def _show_progress(
        self, job: Any, run_id: str, following: "asyncio.Future[bytes]", stopping: "asyncio.Future[Any]"
    ) -> None:
        """Update the job's progress until its run has ended, which is 100 however it did, or the bridge stops."""
        shown = -1
        while True:
            has_ended = following.done()  # it may end while the progress before is being shown
            percent = 100 if has_ended and not following.exception() else self._percents.get(run_id, shown)
            if percent != shown:
                await self._try_to_show(job, job.updateProgress(percent))
                shown = percent
            if has_ended or stopping.done():
                return
            await asyncio.wait((following, stopping), timeout=POLL, return_when=asyncio.FIRST_COMPLETED)

    async def _try_to_show(self, job: Any, showing: Awaitable[object]) -> None:
        """Wait for what only people look at. When it fails the job goes on."""
        try:
            await showing
        except (RedisError, TypeError) as error:  # bullmq raises TypeError for a job that is not there
            _log.debug("a job cannot show how its run goes", job=job.id, reason=str(error))


def request_of(run_id: str, data: object) -> bytes:
    """Return the request for the job's run: the same bytes for the same job. Raises InvalidInput."""
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
    request = {"correlation_id": run_id, "pipeline": name, "payload": payload}
    try:
        return msgspec.json.encode(request, order="deterministic")
    except UnicodeEncodeError:
        raise InvalidInput.at("data", HALF_A_PAIR) from None


def run_id_of(queue: str, job: Any) -> str:
    """Return the id of the run that this attempt of a job starts. BullMQ counts its ids from 1 again after a flush, so
    the job's time is part of it."""
    identity = f"{queue}\0{job.id}\0{job.timestamp}\0{job.attemptsMade}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return f"{_UNREADABLE.sub('_', f'{queue}-{job.id}')[:100]}-{digest}"


def describe(aggregate: dict[str, Any]) -> str:
    """Return why a run did not succeed: `run x ended erro: VOICE_OVER: no answer in 30 s`."""
    faults = aggregate.get("falhas") or {}
    reasons = [f"{step}: {fault.get('motivo') or fault.get('status')}" for step, fault in faults.items()]
    more = f" and {len(reasons) - MOST_FAULTS} more" if len(reasons) > MOST_FAULTS else ""
    listed = f": {'; '.join(reasons[:MOST_FAULTS])}{more}" if reasons else ""
    return f"run {aggregate.get('correlation_id')} ended {aggregate.get('status')}{listed}"


def _percent(head: RunHead) -> int:
    done = head.succeeded + head.failed + head.timed_out + head.skipped + head.task_cancelled
    return 100 * done // head.total if head.total else 0
