"""What both SQL stores do on the way to a transaction: a call of `commit` that waits for its outcome, and the parts in
which runs are pruned."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Generic, Protocol, TypeVar

from oraculo.errors import StoreError
from oraculo.ports.store import Committed, Outcome


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
        self.size = sum(write.size for write in chain[Written](births, updates))
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
            if created.outcome is Outcome.CREATED:
                birth.note_version()
        for update in self.updates:
            if update.run_id not in outcome.conflicts:
                update.note_version()


def parts_to_prune(found: Iterable[Sequence[int]], most_tasks: int) -> Iterator[list[int]]:
    """Runs, by number and size, in parts of about so many tasks: a transaction each, so that commits go on between."""
    numbers: list[int] = []
    tasks = 0
    for n, total in found:
        numbers.append(n)
        tasks += total
        if tasks >= most_tasks:
            yield numbers
            numbers, tasks = [], 0
    if numbers:
        yield numbers
