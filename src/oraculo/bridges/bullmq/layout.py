"""BullMQ's keys and scripts: where a job lies in Redis, and how one is added and removed.

`bull_v4` has the same for the npm package `bull`.
"""

from typing import Any, Protocol

from bullmq import Job, Queue
from bullmq.scripts import Scripts

from oraculo.bridges.bullmq.job import NewJob
from oraculo.bridges.bullmq.paused_queues import correct_adding
from oraculo.wire.message import HIGHEST_PRIORITY


class Layout(Protocol):
    """The keys and scripts of one version of Bull or BullMQ."""

    keeps_events: bool  # in a stream, where the bridge finds those that it missed
    sweep_pause: float  # seconds between two sweeps

    def key(self, queue: str, name: str) -> str:
        """Return the key of one of the queue's jobs, lists or sets."""
        ...

    async def add(self, pipe: Any, job: NewJob) -> None:
        """Put the adding of a job into the transaction. An existing job with its id stays as it is."""
        ...

    async def remove(self, queue: str, job_id: str) -> bool:
        """Remove a job unless a worker holds it. Return whether it was removed."""
        ...


def rank_of(job: NewJob) -> int:
    """Return the priority as BullMQ and Bull count it: 1 is the highest."""
    return HIGHEST_PRIORITY + 1 - job.priority


class _VerbatimScripts(Scripts):  # type: ignore[misc]
    """BullMQ's scripts, which store a job's data as it came: Python may be unable to hold it, as 1e999."""

    def addJobArgs(self, job: Any) -> list[Any]:  # noqa: N802 - bullmq's name
        arguments: list[Any] = super().addJobArgs(job)
        arguments[1] = job.verbatim
        return arguments


class BullmqLayout:
    keeps_events = True
    sweep_pause = 15.0

    def __init__(self, client: Any, prefix: str, *, priority: bool) -> None:
        self._prefix = prefix
        self._has_priority = priority
        # A job of bullmq's is made with a queue; which one it goes to is for the scripts to say.
        self._any_queue = Queue("oraculo", {"connection": client, "prefix": prefix})
        self._connection = self._any_queue.backend.connection
        correct_adding(self._connection.commands, client)

    def key(self, queue: str, name: str) -> str:
        return f"{self._prefix}:{queue}:{name}"

    async def add(self, pipe: Any, job: NewJob) -> None:
        options: dict[str, Any] = {"jobId": job.id, "attempts": job.attempts}
        if self._has_priority:  # each job has one: BullMQ takes jobs without a priority before all others
            options["priority"] = rank_of(job)
        made = Job(self._any_queue, job.name, {}, options)
        made.verbatim = job.data
        await self._scripts(job.record.queue).addJob(made, pipe)

    async def remove(self, queue: str, job_id: str) -> bool:
        return bool(await self._scripts(queue).remove(job_id, False))

    def _scripts(self, queue: str) -> Any:
        return _VerbatimScripts(self._prefix, queue, self._connection)
