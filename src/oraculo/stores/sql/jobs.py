"""The queue of commits in both SQL stores: each job waits until its group is written."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from oraculo.errors import StoreError
from oraculo.ports.store import Committed, CreationOutcome


class Written(Protocol):
    """One run's part of a commit, as rows."""

    run_id: str
    size: int  # in rows or bytes, as the store counts

    def note_version(self) -> None:
        """Give the run in memory the version that its rows have now."""
        ...


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
