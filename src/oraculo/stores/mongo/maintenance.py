"""Work on many runs at once: deleting ended ones, and sending again what a broker lost."""

from collections.abc import Sequence
from operator import itemgetter

from oraculo.core.chunks import slices
from oraculo.stores.mongo.queries import IN_WORK, IS_OPEN, RESTING, join_tasks
from oraculo.stores.mongo.server import Collections, Document, Server, Session, find

DELETED_TOGETHER = 10_000  # documents in one transaction, or one run's tasks: commits go on between
_FORGOTTEN_TOGETHER = 500  # runs


class Maintenance:
    _server: Server

    async def prune(self, ended_before: float, limit: int) -> int:
        if limit < 1:  # to MongoDB, 0 is no limit
            return 0
        with self._server.call() as db:
            found = await _prunable(db, None, {}, ended_before, limit)
        pruned = 0
        for part in slices(found, itemgetter("documentos"), DELETED_TOGETHER):
            pruned += await self._delete(part, ended_before)
        return pruned

    async def _delete(self, runs: Sequence[Document], ended_before: float) -> int:
        run_ids = [run["_id"] for run in runs]
        if long := [run["_id"] for run in runs if run["documentos"] > DELETED_TOGETHER]:
            # A long history would not fit a transaction. A run that is opened again at this moment loses it alone.
            with self._server.call() as db:
                await db.history.delete_many({"correlation_id": {"$in": long}})

        async def delete(db: Collections, session: Session) -> int:
            """A run may have been opened again, or have something to deliver again, since it was found."""
            still = await _prunable(db, session, {"_id": {"$in": run_ids}}, ended_before, len(run_ids))
            gone = [run["_id"] for run in still]
            for collection in db.parts_of_runs:
                await collection.delete_many({"correlation_id": {"$in": gone}}, session=session)
            return (await db.runs.delete_many({"_id": {"$in": gone}}, session=session)).deleted_count

        return await self._server.transaction(delete)

    async def forget_sent(self) -> int:
        with self._server.call() as db:
            run_ids = [run["_id"] async for run in find(db.runs, IS_OPEN, {"_id": 1})]
        count = await self._mark_unsent(RESTING)
        for start in range(0, len(run_ids), _FORGOTTEN_TOGETHER):
            some = run_ids[start : start + _FORGOTTEN_TOGETHER]
            count += await self._mark_unsent({"correlation_id": {"$in": some}, **IN_WORK})
        return count

    async def _mark_unsent(self, tasks: Document) -> int:
        async def mark(db: Collections, session: Session) -> int:
            change = {"$set": {"interno.unsent": True}}
            return (await db.tasks.update_many(tasks, change, session=session)).modified_count

        return await self._server.transaction(mark)


async def _prunable(
    db: Collections, session: Session | None, among: Document, ended_before: float, limit: int
) -> list[Document]:
    """Return the ids of runs with nothing left to deliver, and how many documents each has, the oldest first."""
    stages: list[Document] = [
        {"$match": {"interno.ended_at": {"$lt": ended_before}, "interno.due_at": None, **among}},
        {"$sort": {"interno.ended_at": 1}},
        join_tasks("ordem", "ordem", [{"$match": {"interno.unsent": True}}, {"$limit": 1}]),
        {"$match": {"tarefas": []}},
        {"$limit": limit},
        {"$project": {"documentos": {"$add": ["$interno.entries", "$resumo.total"]}}},
    ]
    return await (await db.runs.aggregate(stages, session=session)).to_list()
