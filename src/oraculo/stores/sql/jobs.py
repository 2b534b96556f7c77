"""What both SQL stores do on the way to a transaction: calls of `commit`, and the queue in which they wait for their
outcome."""

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
    size: int  # in the store's own measure

    def note_version(self) -> None:
        """The run in memory has the version now that its rows have."""
        ...


Birth = TypeVar("Birth", bound=Written)
Update = TypeVar("Update", bound=Written)


class Job(Generic[Birth, Update]):
    __slots__ = ("births", "done", "size", "updates")

    def __init__(self, births: list[Birth], updates: list[Update]) -> None:
        self.births = births
        self.updates = updates
        self.size = sum(birth.size for birth in births) + sum(update.size for update in updates)
        self.done: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()

    def settle(self, outcome: Committed | StoreError) -> None:
        """In the event loop's thread. The caller may be gone: what was written was written."""
        if isinstance(outcome, Committed):
            self._note_versions(outcome)
            if not self.done.done():
                self.done.set_result(outcome)
        elif not self.done.done():
            self.done.set_exception(outcome)

    def _note_versions(self, outcome: Committed) -> None:
        for birth, created in zip(self.births, outcome.created, strict=True):
            if created.outcome is CreationOutcome.CREATED:
                birth.note_version()
        for update in self.updates:
            if update.run_id not in outcome.conflicts:
                update.note_version()


AnyJob = TypeVar("AnyJob", bound=Job[Any, Any])


class CommitQueue(Generic[AnyJob]):
    """Writes jobs in the order in which they come, a group at a time.

    `next_group` takes from the queue what goes together; `write` writes that and settles every job of it.
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
        """A caller who gives up waiting does not stop it."""
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
