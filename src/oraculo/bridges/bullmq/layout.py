"""Where BullMQ keeps a job, and how one is added, looked at and taken away. `bull_v4` has the same for old Bull."""

from typing import Any, Protocol

import msgspec
from bullmq import Job, Queue
from bullmq.scripts import Scripts
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.pausing import mind_pauses_when_adding
from oraculo.bridges.bullmq.records import NewJob
from oraculo.wire.message import HIGHEST_PRIORITY

WAITING = ("waiting", "delayed", "prioritized", "paused")
MOST_QUEUES = 1000  # of which bullmq's object is kept: whoever asks for a run may name any


def rank_of(job: NewJob) -> int:
    """Return the priority as BullMQ and Bull have it: 1 is the highest."""
    return HIGHEST_PRIORITY + 1 - job.priority


class Look(msgspec.Struct, frozen=True):
    """A job as it is found. `ended`: `completed`, `failed`, or None while it is neither."""

    exists: bool
    ended: str | None = None
    value: str | None = None  # what it returned, as JSON
    reason: str | None = None
    is_hopeless: bool = False  # it said itself that another attempt is of no use
    fault: ResponseError | None = None  # why it cannot be looked at


class Layout(Protocol):
    keeps_events: bool  # in a stream, where what nobody read is found again
    sweep_pause: float  # seconds between two looks at the jobs themselves

    def job_key(self, queue: str, job_id: str) -> str: ...

    async def add(self, pipe: Any, job: NewJob) -> None:
        """Puts the adding into the transaction. A job with the same id that is there already stays as it is."""
        ...

    async def withdraw(self, queue: str, job_id: str) -> bool:
        """Takes away a job that nobody has begun. False: somebody has, or it is not there."""
        ...

    async def remove(self, queue: str, job_id: str) -> None:
        """Takes away an ended job; one that is not ended stays."""
        ...

    async def close(self) -> None: ...


class _VerbatimScripts(Scripts):  # type: ignore[misc]
    """Data is stored as it came: what Python cannot hold, as 1e999, is for the worker to read."""

    def addJobArgs(self, job: Any) -> list[Any]:  # noqa: N802 - bullmq's name
        arguments: list[Any] = super().addJobArgs(job)
        arguments[1] = job.verbatim
        return arguments


class BullmqLayout:
    keeps_events = True
    sweep_pause = 15.0

    def __init__(self, client: Any, prefix: str, *, priority: bool) -> None:
        self._client = client
        self._prefix = prefix
        self._has_priority = priority
        self._queues: dict[str, Any] = {}  # the one used last comes last
        self._commands: dict[str, Any] | None = None  # bullmq's scripts: they are the same for each, and take 300 kB

    def job_key(self, queue: str, job_id: str) -> str:
        return f"{self._prefix}:{queue}:{job_id}"

    def _queue(self, name: str) -> Any:
        queue = self._queues.pop(name, None) or self._new_queue(name)
        self._queues[name] = queue
        if len(self._queues) > MOST_QUEUES:
            del self._queues[next(iter(self._queues))]
        return queue

    def _new_queue(self, name: str) -> Any:
        queue = Queue(name, {"connection": self._client, "prefix": self._prefix})
        connection = queue.backend.connection
        if self._commands is None:
            self._commands = connection.commands
            mind_pauses_when_adding(self._commands, self._client)
        connection.commands = self._commands
        queue.scripts = queue.backend.scripts = _VerbatimScripts(self._prefix, name, connection)
        return queue

    async def add(self, pipe: Any, job: NewJob) -> None:
        queue = self._queue(job.record.queue)
        options: dict[str, Any] = {"jobId": job.id, "attempts": job.attempts}
        if self._has_priority:  # all have one: BullMQ takes jobs without a priority before those with any
            options["priority"] = rank_of(job)
        made = Job(queue, job.name, {}, options)
        made.verbatim = job.data
        await queue.backend.scripts.addJob(made, pipe)

    async def withdraw(self, queue: str, job_id: str) -> bool:
        bull = self._queue(queue)
        if await bull.getJobState(job_id) not in WAITING:
            return False
        return bool(await bull.remove(job_id))

    async def remove(self, queue: str, job_id: str) -> None:
        bull = self._queue(queue)
        if await bull.getJobState(job_id) in ("completed", "failed"):
            await bull.remove(job_id)

    async def close(self) -> None:
        self._queues.clear()  # the client is not theirs


_FIELDS = ("returnvalue", "failedReason", "stacktrace")


def ask_state(pipe: Any, layout: Layout, prefix: str, queue: str, job_id: str) -> None:
    """Three commands whose replies `read_state` understands; the same in BullMQ and old Bull."""
    pipe.hmget(layout.job_key(queue, job_id), "timestamp", *_FIELDS)
    pipe.zscore(f"{prefix}:{queue}:completed", job_id)
    pipe.zscore(f"{prefix}:{queue}:failed", job_id)


def read_state(replies: list[Any]) -> Look:
    fault = next((reply for reply in replies if isinstance(reply, ResponseError)), None)
    if fault is not None:
        return Look(True, fault=fault)
    (timestamp, value, reason, stacktrace), completed, failed = replies
    if timestamp is None:
        return Look(exists=False)
    if completed is not None:
        return Look(True, "completed", value=value)
    if failed is not None:
        return Look(True, "failed", reason=reason, is_hopeless=is_hopeless(stacktrace))
    return Look(True)


def ask_size(pipe: Any, layout: Layout, queue: str, job_id: str) -> None:
    """A command for each field: how much there is to read of a job."""
    for field in _FIELDS:
        pipe.hstrlen(layout.job_key(queue, job_id), field)


def read_sizes(replies: list[Any]) -> list[int]:
    """One for each job that was asked about."""
    sizes = [reply if isinstance(reply, int) else 0 for reply in replies]
    return [sum(sizes[place : place + len(_FIELDS)]) for place in range(0, len(sizes), len(_FIELDS))]


_KINDS = {
    **dict.fromkeys(("wait", "paused", "active"), "list"),
    **dict.fromkeys(("completed", "failed", "delayed", "prioritized", "marker"), "zset"),
    "meta": "hash",
    **dict.fromkeys(("id", "pc"), "string"),
    "events": "stream",
}


async def misfits(client: Any, prefix: str, queue: str) -> str:
    """Names the keys of a queue that hold something else than BullMQ puts there, which Redis does not; empty: none."""
    pipe = client.pipeline(transaction=False)
    for name in _KINDS:
        pipe.type(f"{prefix}:{queue}:{name}")
    found = zip(_KINDS.items(), await pipe.execute(raise_on_error=False), strict=True)
    return "; ".join(
        f"the key {prefix}:{queue}:{name} holds a {kind}, where BullMQ has a {right}"
        for (name, right), kind in found
        if isinstance(kind, str) and kind not in (right, "none")
    )


def is_hopeless(stacktrace: str | None) -> bool:
    """Whether the last attempt ended in BullMQ's UnrecoverableError. Only the stack trace has the error's name."""
    try:
        traces = msgspec.json.decode(stacktrace or "[]", type=list[str])
    except msgspec.DecodeError:
        return False
    return bool(traces) and any("UnrecoverableError" in line for line in traces[-1].splitlines()[:1])
