"""The queue of commits: each job waits until its group is written, in one transaction."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.store import Committed, Created, CreationOutcome


class Written(Protocol):
    """One run's part of a commit, as rows or documents."""

    run_id: str
    size: int  # in rows or bytes, as the store counts

    def note_version(self) -> None:
        """Give the run in memory the version that its rows have now."""
        ...


class NewRun(Written, Protocol):
    """The part of a creation. `key`: its idempotency key."""

    key: str | None
    fingerprint: str


Insert = TypeVar("Insert", bound=Written)
Update = TypeVar("Update", bound=Written)


class Job(Generic[Insert, Update]):
    """One call of `commit`, and the future of its outcome."""

    __slots__ = ("done", "inserts", "size", "updates")

    def __init__(self, inserts: list[Insert], updates: list[Update]) -> None:
        self.inserts = inserts
        self.updates = updates
        self.size = sum(insert.size for insert in inserts) + sum(update.size for update in updates)
        self.done: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()

    def settle(self, outcome: Committed | StoreError) -> None:
        """Set the outcome, in the event loop's thread. The caller may have given up; the commit counts all the same."""
        if isinstance(outcome, Committed):
            self._note_versions(outcome)
            if not self.done.done():
                self.done.set_result(outcome)
        elif not self.done.done():
            self.done.set_exception(outcome)

    def _note_versions(self, outcome: Committed) -> None:
        for insert, created in zip(self.inserts, outcome.created, strict=True):
            if created.outcome is CreationOutcome.CREATED:
                insert.note_version()
        for update in self.updates:
            if update.run_id not in outcome.conflicts:
                update.note_version()


AnyJob = TypeVar("AnyJob", bound=Job[Any, Any])
AnyNewRun = TypeVar("AnyNewRun", bound=NewRun)


class CommitQueue(Generic[AnyJob]):
    """A queue that writes jobs in order, one group at a time.

    `next_group` takes the jobs that go together. `write` writes them and settles each.
    """

    def __init__(
        self,
        next_group: Callable[[deque[AnyJob]], Iterable[AnyJob]],
        write: Callable[[Sequence[AnyJob]], Awaitable[None]],
    ) -> None:
        self._next_group = next_group
        self._write = write
        self._waiting: deque[AnyJob] = deque()
        self._draining: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self._draining is None

    async def commit(self, job: AnyJob) -> Committed:
        """Write a job and return its outcome. It is written even if the caller gives up."""
        self._waiting.append(job)
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await job.done

    async def finish(self) -> None:
        if self._draining is not None:
            await asyncio.wait([self._draining])

    async def _drain(self) -> None:
        group: list[AnyJob] = []
        try:
            while self._waiting:
                group = list(self._next_group(self._waiting))
                await self._write(group)
        except BaseException as error:
            for job in chain(group, self._waiting):
                job.settle(StoreError(f"the commit was given up: {error!r}"))
            self._waiting.clear()
            raise
        finally:
            self._draining = None


# -- groups of a bounded size, for stores on a server ----------------------------------------------------------------


def next_group(most: int, waiting: deque[AnyJob]) -> Iterator[AnyJob]:
    """Yield jobs up to the size `most`.

    A second change of a run waits for the next group, because it builds on the version that the first one writes.
    """
    size = 0
    runs: set[str] = set()
    while waiting and size < most:
        job = waiting[0]
        if any(update.run_id in runs for update in job.updates):
            return
        runs.update(write.run_id for write in chain(job.inserts, job.updates))
        size += job.size
        yield waiting.popleft()


async def write_group(
    write_together: Callable[[Sequence[AnyJob]], Awaitable[Sequence[Committed]]], group: Sequence[AnyJob]
) -> None:
    """Write all jobs together. If that is refused, write each alone, so that a bad one does not stop the others."""
    try:
        outcomes = await write_together(group)
    except StoreError as error:
        if len(group) > 1 and not isinstance(error, StoreUnavailable):
            for job in group:
                await write_group(write_together, [job])
            return
        for job in group:
            job.settle(error)
        return
    for job, outcome in zip(group, outcomes, strict=True):
        job.settle(outcome)


def without_repeats(inserts: Iterable[AnyNewRun]) -> Iterator[AnyNewRun]:
    """Yield the first new run of each id and key: the outcome of the others depends on it."""
    ids: set[str] = set()
    keys: set[str | None] = set()
    for insert in inserts:
        if insert.run_id in ids or (insert.key is not None and insert.key in keys):
            continue
        ids.add(insert.run_id)
        keys.add(insert.key)
        yield insert


def created_before(insert: NewRun, run_id: str, fingerprint: str, otherwise: CreationOutcome) -> Created:
    """Return the outcome of a creation that found its id or its key in use, by this run."""
    return Created(CreationOutcome.SAME if fingerprint == insert.fingerprint else otherwise, run_id)
