"""Commits on their way to the server.

Commits that arrive while one is being written are written together, in one transaction and one round trip: the server
syncs its disk once for all of them. A large group goes in slices, in one transaction all the same, so that no
statement is larger than SLICE_BYTES (and a row).
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from oraculo.core.chunks import slices
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.store import Committed, Created, CreationOutcome
from oraculo.stores.postgres.address import Connection
from oraculo.stores.postgres.connections import QUERIES, Lane
from oraculo.stores.postgres.faults import Clash
from oraculo.stores.postgres.rows import ROW_BYTES, Birth, Row, Update, Write
from oraculo.stores.sql.jobs import CommitQueue, Job

GROUP_BYTES = 8 * 1024 * 1024
SLICE_BYTES = 8 * 1024 * 1024
MOST_CLASHES = 5
CLASH_PAUSE = 0.02
MOST_OFFERS = 5

PostgresJob = Job[Birth, Update]


def queue_to(lane: Lane) -> CommitQueue[PostgresJob]:
    return CommitQueue(_next_group, partial(_write_group, lane))


def _next_group(waiting: deque[PostgresJob]) -> Iterator[PostgresJob]:
    """As many as fit. A second change of a run waits for the next group: it builds on the first one's version."""
    size = 0
    runs: set[str] = set()
    while waiting and size < GROUP_BYTES:
        job = waiting[0]
        if any(update.run_id in runs for update in job.updates):
            return
        runs.update(write.run_id for write in chain(job.births, job.updates))
        size += job.size
        yield waiting.popleft()


async def _write_group(lane: Lane, group: Sequence[PostgresJob]) -> None:
    """All together; if that is refused, each by itself, so that a bad one does not sink the others."""
    try:
        outcomes = await _write_together(lane, group)
    except StoreError as error:
        if len(group) > 1 and not isinstance(error, StoreUnavailable):
            for job in group:
                await _write_group(lane, [job])
            return
        for job in group:
            job.settle(error)
        return
    for job, outcome in zip(group, outcomes, strict=True):
        job.settle(outcome)


async def _write_together(lane: Lane, group: Sequence[PostgresJob]) -> list[Committed]:
    ledger = Ledger(group)
    statements = 1 + sum(job.size for job in group) // SLICE_BYTES
    for clashes in range(MOST_CLASHES):
        try:
            await lane.run(ledger.write, statements=statements)
            break
        except Clash:
            if clashes + 1 == MOST_CLASHES:
                raise
            await asyncio.sleep(CLASH_PAUSE * clashes)  # the other one first
    return [ledger.outcome_of(job) for job in group]


class Ledger:
    """What became of each write of a group."""

    def __init__(self, group: Sequence[PostgresJob]) -> None:
        self._births = [birth for job in group for birth in job.births]
        # By id, so that two engines that change the same runs wait for each other in one order.
        self._updates = sorted((update for job in group for update in job.updates), key=lambda update: update.run_id)
        self._created: dict[Birth, Created] = {}
        self._conflicts: set[str] = set()

    def outcome_of(self, job: PostgresJob) -> Committed:
        created = [self._created[birth] for birth in job.births]
        return Committed(created, frozenset(u.run_id for u in job.updates if u.run_id in self._conflicts))

    async def write(self, connection: Connection) -> None:
        """Offers everything; then finds out what was in the way of the creations that were not taken, and offers those
        again that nothing is in the way of any more."""
        for _ in range(MOST_OFFERS):
            await self._offer(connection)
            if not self._births:
                return
            await self._find_in_the_way(connection)
            if not self._births:
                return
        raise StoreUnavailable("creations with one id or one idempotency key are in each other's way")

    async def _offer(self, connection: Connection) -> None:
        births, updates = list(_without_repeats(self._births)), self._updates
        numbers = await _write(connection, births, updates)
        for number, birth in zip(numbers, births, strict=False):
            if number:
                self._created[birth] = Created(CreationOutcome.CREATED, birth.run_id)
        for number, update in zip(numbers[len(births) :], updates, strict=True):
            if not number:
                self._conflicts.add(update.run_id)
        self._updates = []
        self._births = [birth for birth in self._births if birth not in self._created]

    async def _find_in_the_way(self, connection: Connection) -> None:
        ids = [birth.run_id for birth in self._births]
        keys = [birth.key for birth in self._births if birth.key is not None]
        found = await connection.fetch(QUERIES["in_the_way"], ids, keys)
        by_id = {row["id"]: row for row in found}
        by_key = {row["idempotency_key"]: row for row in found}
        for birth in self._births:
            if birth.key is not None and (row := by_key.get(birth.key)):
                self._created[birth] = _again(birth, row, CreationOutcome.KEY_REUSED)
            elif row := by_id.get(birth.run_id):
                self._created[birth] = _again(birth, row, CreationOutcome.ID_IN_USE)
        self._births = [birth for birth in self._births if birth not in self._created]


def _again(birth: Birth, row: Any, otherwise: CreationOutcome) -> Created:
    return Created(CreationOutcome.SAME if row["fingerprint"] == birth.fingerprint else otherwise, row["id"])


def _without_repeats(births: Iterable[Birth]) -> Iterator[Birth]:
    """The first of those with one id or one key: what becomes of the others depends on it."""
    ids: set[str] = set()
    keys: set[str | None] = set()
    for birth in births:
        if birth.run_id in ids or (birth.key is not None and birth.key in keys):
            continue
        ids.add(birth.run_id)
        keys.add(birth.key)
        yield birth


# -- one transaction ------------------------------------------------------------------------------------------------


async def _write(connection: Connection, births: Sequence[Birth], updates: Sequence[Update]) -> list[int]:
    """The number of each run, births first; 0 where nothing was written."""
    if sum(write.size for write in chain(births, updates)) > SLICE_BYTES:
        async with connection.transaction():
            return await _write_in_slices(connection, births, updates)
    numbers: list[int] = await connection.fetchval(
        QUERIES["commit"],
        _placed_heads(births, 1),
        _placed_heads(updates, 1 + len(births)),
        _placed_tasks(births, 1),
        _placed_tasks(updates, 1 + len(births)),
        _placed_history(chain(births, updates)),
    )
    return numbers


async def _write_in_slices(connection: Connection, births: Sequence[Birth], updates: Sequence[Update]) -> list[int]:
    numbers: list[int] = []
    for some in slices(births, lambda birth: _size_of(birth.head), SLICE_BYTES):
        numbers += await connection.fetchval(QUERIES["write_heads"], _placed_heads(some, 1), [])
    for others in slices(updates, lambda update: _size_of(update.head), SLICE_BYTES):
        numbers += await connection.fetchval(QUERIES["write_heads"], [], _placed_heads(others, 1))
    for rows in slices(_placed_tasks(births, 1), _size_of, SLICE_BYTES):
        await connection.fetchval(QUERIES["write_rows"], numbers, rows, [], [])
    for rows in slices(_placed_tasks(updates, 1 + len(births)), _size_of, SLICE_BYTES):
        await connection.fetchval(QUERIES["write_rows"], numbers, [], rows, [])
    for rows in slices(_placed_history(chain(births, updates)), _size_of, SLICE_BYTES):
        await connection.fetchval(QUERIES["write_rows"], numbers, [], [], rows)
    return numbers


def _placed_heads(writes: Iterable[Write], first: int) -> list[Row]:
    return [(place, *write.head) for place, write in enumerate(writes, first)]


def _placed_tasks(writes: Iterable[Write], first: int) -> list[Row]:
    return [(place, *row) for place, write in enumerate(writes, first) for row in write.tasks]


def _placed_history(writes: Iterable[Write]) -> list[Row]:
    return [(place, *row) for place, write in enumerate(writes, 1) for row in write.history]


def _size_of(row: Row) -> int:
    return ROW_BYTES + sum(len(value) for value in row if type(value) is bytes)
