"""The queue of commits: each job waits until its group is written, in one transaction."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from oraculo.core.run import Changes
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.store import Committed, Created, Creation, CreationOutcome


class Write:
    """One run's part of a commit.

    Each store adds its rows or documents before the commit waits, because the engine goes on changing the run.
    """

    __slots__ = ("changes", "fingerprint", "key", "run_id", "size", "version")

    def __init__(self, changes: Changes, creation: Creation | None = None) -> None:
        self.changes = changes
        self.run_id = changes.run.id
        self.version = 1 if creation else changes.based_on + 1
        self.key = creation.idempotency_key if creation else None
        self.fingerprint = creation.fingerprint if creation else ""
        self.size = 0  # in rows or bytes, as the store counts

    def note_version(self) -> None:
        """Give the run in memory the version that is stored now."""
        self.changes.run.head.version = self.version


AnyWrite = TypeVar("AnyWrite", bound=Write)


class Job(Generic[AnyWrite]):
    """One call of `commit`, and the future of its outcome. `kind`: the store's class of writes."""

    def __init__(self, kind: type[AnyWrite], creations: Sequence[Creation], changes: Sequence[Changes]) -> None:
        self.inserts = [kind(creation.changes, creation) for creation in creations]
        self.updates = [kind(change) for change in changes]
        self.size = sum(write.size for write in chain(self.inserts, self.updates))
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


AnyJob = TypeVar("AnyJob", bound=Job[Any])


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


def without_repeats(inserts: Iterable[AnyWrite]) -> Iterator[AnyWrite]:
    """Yield the first new run of each id and key: the outcome of the others depends on it."""
    ids: set[str] = set()
    keys: set[str | None] = set()
    for insert in inserts:
        if insert.run_id in ids or (insert.key is not None and insert.key in keys):
            continue
        ids.add(insert.run_id)
        keys.add(insert.key)
        yield insert


class Taken:
    """The ids and idempotency keys in use, each with its run and that run's fingerprint."""

    def __init__(self, found: Iterable[tuple[str, str | None, str]]) -> None:
        self._by_id: dict[str, tuple[str, str]] = {}
        self._by_key: dict[str | None, tuple[str, str]] = {}
        for each in found:
            self.add(*each)

    def add(self, run_id: str, key: str | None, fingerprint: str) -> None:
        self._by_id[run_id] = self._by_key[key] = run_id, fingerprint

    def outcome_of(self, insert: Write) -> Created | None:
        """Return the outcome of a creation whose key or id is in use; None when both are free."""
        used, otherwise = None, CreationOutcome.KEY_REUSED
        if insert.key is not None:
            used = self._by_key.get(insert.key)
        if used is None:
            used, otherwise = self._by_id.get(insert.run_id), CreationOutcome.ID_IN_USE
        if used is None:
            return None
        run_id, fingerprint = used
        return Created(CreationOutcome.SAME if fingerprint == insert.fingerprint else otherwise, run_id)
