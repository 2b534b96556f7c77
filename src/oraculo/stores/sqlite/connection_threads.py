"""Lanes: each is a connection and the thread that uses it."""

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from oraculo.errors import StoreError
from oraculo.ports.store import Committed
from oraculo.stores.commit_queue import CommitQueue
from oraculo.stores.sqlite.connections import Translated, be_patient, open_reader, open_up_to_date
from oraculo.stores.sqlite.open_files import OpenFiles
from oraculo.stores.sqlite.transaction import SqliteJob, is_busy, write_group

Result = TypeVar("Result")
Outcomes = Sequence[Committed | StoreError]

# The limit of one transaction, which bounds memory and the wait of later jobs.
GROUP_ROWS = 20_000
# A small commit takes a fraction of a millisecond, and a change of threads takes as long again, or longer on a busy
# machine. So small commits are written in the event loop's own thread, as long as the disk is quick.
AT_ONCE_ROWS = 40
_SLOW = 0.002  # seconds: a longer commit would block the event loop noticeably
_SPARED = 20  # commits that use the thread after a slow one
_IN_A_ROW = 100  # commits until one uses the thread, where a long WAL is checkpointed


class Lane:
    """A connection that one thread uses."""

    def __init__(self, name: str, path: str, files: OpenFiles, inline: bool) -> None:
        self._path = path
        self._files = files
        self._thread = None if inline else ThreadPoolExecutor(1, thread_name_prefix=name)
        self._connection: sqlite3.Connection | None = None
        self._under_way = 0

    async def open(self) -> None:
        self._connection = await self._call(open_reader, self._path)

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._call(partial(self._on_same_files, work), self._opened)

    def _on_same_files(self, work: Callable[[sqlite3.Connection], Result], connection: sqlite3.Connection) -> Result:
        self._files.expect_same()
        return work(connection)

    @property
    def _opened(self) -> sqlite3.Connection:
        assert self._connection is not None, "a lane is opened before it is used"
        return self._connection

    async def _call(self, work: Callable[[Any], Result], subject: object) -> Result:
        if self._thread is None:
            return self._translated_call(work, subject)
        self._under_way += 1
        done = asyncio.get_running_loop().run_in_executor(self._thread, self._translated_call, work, subject)
        done.add_done_callback(self._ended)  # not `finally`: the thread goes on when the caller gives up
        return await asyncio.shield(done)

    def _ended(self, done: "asyncio.Future[Any]") -> None:
        self._under_way -= 1
        if not done.cancelled():
            done.exception()  # mark as retrieved: those who wait raise it

    def _translated_call(self, work: Callable[[Any], Result], subject: object) -> Result:
        with Translated(self._path):
            return work(subject)

    async def close(self) -> None:
        try:
            if self._connection is not None:
                await self._call(sqlite3.Connection.close, self._connection)
        finally:
            self._connection = None
            if self._thread is not None:
                self._thread.shutdown(wait=False)


class Writer(Lane):
    """The one lane that writes. Two threads use its connection, never at the same time."""

    def __init__(self, name: str, path: str, files: OpenFiles, inline: bool) -> None:
        super().__init__(name, path, files, inline)
        self._is_patient = True
        self._by_thread = 0  # the next so many commits use the thread
        self._in_a_row = 0
        self._queue = CommitQueue(_next_group, self._write_group)
        self.migrated: Sequence[str] = ()  # the steps done by opening it

    async def open(self) -> None:
        self._connection, self.migrated = await self._call(open_up_to_date, self._path)

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._is_patient:
            return await super().run(work)
        self._is_patient = True
        return await self._call(partial(_patiently, partial(self._on_same_files, work)), self._opened)

    async def commit(self, job: SqliteJob) -> Committed:
        """Write a job at once, or in the thread together with others that wait."""
        if self._queue.is_idle and (outcomes := self._write_at_once(job)):
            job.settle(outcomes[0])
            return job.done.result()
        return await self._queue.commit(job)

    async def finish(self) -> None:
        await self._queue.finish()

    def _write_at_once(self, job: SqliteJob) -> Outcomes | None:
        """Write in the caller's thread. Returns None when that is not advisable or another process is writing."""
        if self._thread is None:  # a simulation must not depend on real time
            return self._on_same_files(partial(write_group, [job], self._path), self._opened)
        if self._by_thread or self._under_way or job.size > AT_ONCE_ROWS:
            self._by_thread = max(0, self._by_thread - 1)
            return None
        started = time.perf_counter()
        with Translated(self._path):
            if self._is_patient:
                be_patient(self._opened, patient=False)
                self._is_patient = False
            outcomes = self._on_same_files(partial(write_group, [job], self._path), self._opened)
        self._choose_next(time.perf_counter() - started)
        return None if any(map(is_busy, outcomes)) else outcomes

    def _choose_next(self, took: float) -> None:
        self._in_a_row += 1
        if took > _SLOW:
            self._by_thread = _SPARED
        elif self._in_a_row >= _IN_A_ROW:
            self._in_a_row, self._by_thread = 0, 1

    async def _write_group(self, group: Sequence[SqliteJob]) -> None:
        try:
            outcomes: Outcomes = await self.run(partial(write_group, group, self._path))
        except StoreError as error:  # nothing was written
            outcomes = [error] * len(group)
        for job, outcome in zip(group, outcomes, strict=True):
            job.settle(outcome)


def _next_group(waiting: deque[SqliteJob]) -> Iterator[SqliteJob]:
    rows = 0
    while waiting and rows < GROUP_ROWS:
        job = waiting.popleft()
        rows += job.size
        yield job


def _patiently(work: Callable[[sqlite3.Connection], Result], connection: sqlite3.Connection) -> Result:
    be_patient(connection, patient=True)
    return work(connection)
