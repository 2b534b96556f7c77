"""Commits on their way to the server.

Commits that arrive while one is being written are written together, in one transaction: the server syncs its disk once
for all of them. In it each run's head is written over the version that it was decided on, and over no other; tasks,
history and inputs follow the heads that were written.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

from bson.raw_bson import RawBSONDocument
from pymongo import ReplaceOne, UpdateOne

from oraculo.core.run import Changes
from oraculo.errors import StoreUnavailable
from oraculo.ports.store import Committed, Created, Creation, CreationOutcome
from oraculo.stores.commit_queue import CommitQueue, Job, Taken, Write, next_group, without_repeats, write_group
from oraculo.stores.mongo.documents import (
    encoded,
    entry_documents,
    head_fields,
    input_documents,
    new_run_fields,
    task_documents,
)
from oraculo.stores.mongo.faults import Duplicate
from oraculo.stores.mongo.schema import require_lately
from oraculo.stores.mongo.server import Collection, Collections, Document, Server, Session, find

GROUP_BYTES = 8 * 1024 * 1024
MOST_OFFERS = 5


class MongoWrite(Write):
    """One run's part of a commit, as encoded documents."""

    __slots__ = ("head", "history", "inputs", "tasks")

    def __init__(self, changes: Changes, creation: Creation | None = None) -> None:
        super().__init__(changes, creation)
        run = changes.run
        head, inputs = head_fields(run.head, self.version), list[Document]()
        if creation is not None:
            head |= new_run_fields(run, self.fingerprint, self.key)
            inputs = list(input_documents(run))
        self.head = encoded(head, run.id)
        self.inputs = [encoded(one, run.id) for one in inputs]
        self.tasks = {one["_id"]: encoded(one, run.id) for one in task_documents(run, changes.tasks.values())}
        self.history = [encoded(one, run.id) for one in entry_documents(run, changes.history)]
        documents = chain([self.head], self.inputs, self.tasks.values(), self.history)
        self.size = sum(len(one.raw) for one in documents)


MongoJob = Job[MongoWrite]


def queue_to(server: Server) -> CommitQueue[MongoJob]:
    return CommitQueue(partial(next_group, GROUP_BYTES), partial(write_group, partial(_write_together, server)))


async def _write_together(server: Server, group: Sequence[MongoJob]) -> list[Committed]:
    if any(job.inserts for job in group):  # the indexes give an id and a key once
        await require_lately(server)
    ledger = Ledger(group)
    size = sum(job.size for job in group)
    for _ in range(MOST_OFFERS):
        try:
            await server.transaction(ledger.write, size=size)
        except Duplicate:
            ledger.looks_first = True
        else:
            return [ledger.outcome_of(job) for job in group]
    raise StoreUnavailable("creations with one id or one idempotency key are in each other's way")


class Ledger:
    """The outcome of each write of a group.

    `looks_first`: something is in the way of a creation, so a transaction finds out what before it offers any.
    """

    def __init__(self, group: Sequence[MongoJob]) -> None:
        self._inserts = [insert for job in group for insert in job.inserts]
        self._updates = [update for job in group for update in job.updates]
        self._created: dict[MongoWrite, Created] = {}
        self._conflicts: set[str] = set()
        self.looks_first = False

    def outcome_of(self, job: MongoJob) -> Committed:
        created = [self._created[insert] for insert in job.inserts]
        return Committed(created, frozenset(u.run_id for u in job.updates if u.run_id in self._conflicts))

    async def write(self, db: Collections, session: Session) -> None:
        """Do all of a transaction. It may be called again when nothing of the last call was committed."""
        self._created, self._conflicts = {}, set()
        inserts = await self._insert_heads(db, session)
        updates = await self._update_heads(db, session)
        await _insert(db.inputs, [one for insert in inserts for one in insert.inputs], session)
        await _insert(db.tasks, [task for insert in inserts for task in insert.tasks.values()], session)
        tasks: list[ReplaceOne[Document]]
        tasks = [ReplaceOne({"_id": name}, task) for update in updates for name, task in update.tasks.items()]
        if tasks:
            await db.tasks.bulk_write(tasks, ordered=False, session=session)
        await _insert(db.history, [entry for write in chain(inserts, updates) for entry in write.history], session)

    async def _insert_heads(self, db: Collections, session: Session) -> list[MongoWrite]:
        """Return the creations that were written: of several with one id or key, the first that may be."""
        waiting, written = self._inserts, list[MongoWrite]()
        while waiting:
            if written or self.looks_first:
                await self._find_in_the_way(waiting, db, session)
                waiting = [insert for insert in waiting if insert not in self._created]
            offered = list(without_repeats(waiting))
            await _insert(db.runs, [insert.head for insert in offered], session)
            self._created |= {insert: Created(CreationOutcome.CREATED, insert.run_id) for insert in offered}
            written += offered
            waiting = [insert for insert in waiting if insert not in self._created]
        return written

    async def _find_in_the_way(self, inserts: Sequence[MongoWrite], db: Collections, session: Session) -> None:
        ids = [insert.run_id for insert in inserts]
        keys = [insert.key for insert in inserts if insert.key is not None]
        either = {"$or": [{"_id": {"$in": ids}}, {"chave_idempotencia": {"$in": keys}}]}
        wanted = {"chave_idempotencia": 1, "impressao": 1}
        found = await find(db.runs, either, wanted, session).to_list()
        taken = Taken((run["_id"], run.get("chave_idempotencia"), run["impressao"]) for run in found)
        for insert in inserts:
            if (outcome := taken.outcome_of(insert)) is not None:
                self._created[insert] = outcome

    async def _update_heads(self, db: Collections, session: Session) -> list[MongoWrite]:
        """Return the changes whose run has the version that they were decided on.

        A run that another transaction changes after it was read here makes this one fail and be done again.
        """
        if not self._updates:
            return []
        among = {"_id": {"$in": [update.run_id for update in self._updates]}}
        found = find(db.runs, among, {"revisao": 1}, session)
        versions = {run["_id"]: run["revisao"] async for run in found}
        written = [update for update in self._updates if versions.get(update.run_id) == update.version - 1]
        self._conflicts = {update.run_id for update in self._updates} - {update.run_id for update in written}
        if written:  # by `_id` alone, which MongoDB finds without planning
            heads = [UpdateOne({"_id": update.run_id}, {"$set": update.head}) for update in written]
            await db.runs.bulk_write(heads, ordered=False, session=session)
        return written


async def _insert(collection: Collection, documents: Sequence[RawBSONDocument], session: Session) -> None:
    if documents:
        await collection.insert_many(documents, session=session)
