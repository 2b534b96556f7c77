"""Commits on their way to the server.

Commits that arrive during a write are written together next, in one transaction and one round trip, so that the server
syncs its disk once for all. A large group is sent in slices of SLICE_BYTES, still in one transaction.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

from oraculo.core.chunks import slices
from oraculo.errors import StoreUnavailable
from oraculo.ports.store import Committed, Created, CreationOutcome
from oraculo.stores.commit_queue import CommitQueue, Job, Taken, next_group, without_repeats, write_group
from oraculo.stores.postgres.address import Connection
from oraculo.stores.postgres.connections import QUERIES, Lane
from oraculo.stores.postgres.faults import Clash
from oraculo.stores.postgres.rows import ROW_BYTES, PostgresWrite, Row

GROUP_BYTES = 8 * 1024 * 1024
SLICE_BYTES = 8 * 1024 * 1024
MOST_CLASHES = 5
CLASH_PAUSE = 0.02
MOST_OFFERS = 5

PostgresJob = Job[PostgresWrite]


def queue_to(lane: Lane) -> CommitQueue[PostgresJob]:
    return CommitQueue(partial(next_group, GROUP_BYTES), partial(write_group, partial(_write_together, lane)))


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
            await asyncio.sleep(CLASH_PAUSE * clashes)  # the other transaction goes first
    return [ledger.outcome_of(job) for job in group]


class Ledger:
    """The outcome of each write of a group."""

    def __init__(self, group: Sequence[PostgresJob]) -> None:
        self._inserts = [insert for job in group for insert in job.inserts]
        # Sorted by id, so that two engines that change the same runs lock them in one order.
        self._updates = sorted((update for job in group for update in job.updates), key=lambda update: update.run_id)
        self._created: dict[PostgresWrite, Created] = {}
        self._conflicts: set[str] = set()

    def outcome_of(self, job: PostgresJob) -> Committed:
        created = [self._created[insert] for insert in job.inserts]
        return Committed(created, frozenset(u.run_id for u in job.updates if u.run_id in self._conflicts))

    async def write(self, connection: Connection) -> None:
        """Write everything. For new runs that were not taken, find the run in the way, or try again if it is gone."""
        for _ in range(MOST_OFFERS):
            await self._offer(connection)
            if not self._inserts:
                return
            await self._find_in_the_way(connection)
            if not self._inserts:
                return
        raise StoreUnavailable("creations with one id or one idempotency key are in each other's way")

    async def _offer(self, connection: Connection) -> None:
        inserts, updates = list(without_repeats(self._inserts)), self._updates
        numbers = await _write(connection, inserts, updates)
        for number, insert in zip(numbers, inserts, strict=False):
            if number:
                self._created[insert] = Created(CreationOutcome.CREATED, insert.run_id)
        for number, update in zip(numbers[len(inserts) :], updates, strict=True):
            if not number:
                self._conflicts.add(update.run_id)
        self._updates = []
        self._inserts = [insert for insert in self._inserts if insert not in self._created]

    async def _find_in_the_way(self, connection: Connection) -> None:
        ids = [insert.run_id for insert in self._inserts]
        keys = [insert.key for insert in self._inserts if insert.key is not None]
        found = await connection.fetch(QUERIES["in_the_way"], ids, keys)
        taken = Taken((run["id"], run["idempotency_key"], run["fingerprint"]) for run in found)
        for insert in self._inserts:
            if (outcome := taken.outcome_of(insert)) is not None:
                self._created[insert] = outcome
        self._inserts = [insert for insert in self._inserts if insert not in self._created]


# -- one transaction ------------------------------------------------------------------------------------------------


async def _write(
    connection: Connection, inserts: Sequence[PostgresWrite], updates: Sequence[PostgresWrite]
) -> list[int]:
    """Return the number of each run, new ones first, and 0 where nothing was written."""
    if sum(write.size for write in chain(inserts, updates)) > SLICE_BYTES:
        async with connection.transaction():
            return await _write_in_slices(connection, inserts, updates)
    numbers: list[int] = await connection.fetchval(
        QUERIES["commit"],
        _placed_heads(inserts, 1),
        _placed_heads(updates, 1 + len(inserts)),
        _placed_tasks(inserts, 1),
        _placed_tasks(updates, 1 + len(inserts)),
        _placed_history(chain(inserts, updates)),
    )
    return numbers


async def _write_in_slices(
    connection: Connection, inserts: Sequence[PostgresWrite], updates: Sequence[PostgresWrite]
) -> list[int]:
    numbers: list[int] = []
    for some in slices(inserts, lambda insert: _size_of(insert.head), SLICE_BYTES):
        numbers += await connection.fetchval(QUERIES["write_heads"], _placed_heads(some, 1), [])
    for others in slices(updates, lambda update: _size_of(update.head), SLICE_BYTES):
        numbers += await connection.fetchval(QUERIES["write_heads"], [], _placed_heads(others, 1))
    for rows in slices(_placed_tasks(inserts, 1), _size_of, SLICE_BYTES):
        await connection.fetchval(QUERIES["write_rows"], numbers, rows, [], [])
    for rows in slices(_placed_tasks(updates, 1 + len(inserts)), _size_of, SLICE_BYTES):
        await connection.fetchval(QUERIES["write_rows"], numbers, [], rows, [])
    for rows in slices(_placed_history(chain(inserts, updates)), _size_of, SLICE_BYTES):
        await connection.fetchval(QUERIES["write_rows"], numbers, [], [], rows)
    return numbers


def _placed_heads(writes: Iterable[PostgresWrite], first: int) -> list[Row]:
    return [(place, *write.head) for place, write in enumerate(writes, first)]


def _placed_tasks(writes: Iterable[PostgresWrite], first: int) -> list[Row]:
    return [(place, *row) for place, write in enumerate(writes, first) for row in write.tasks]


def _placed_history(writes: Iterable[PostgresWrite]) -> list[Row]:
    return [(place, *row) for place, write in enumerate(writes, 1) for row in write.history]


def _size_of(row: Row) -> int:
    return ROW_BYTES + sum(len(value) for value in row if type(value) is bytes)
