"""Reading runs: `RunReader` for the engine, `RunBrowser` for people."""

import re
from collections.abc import Sequence

from oraculo.core.history import HistoryEntry
from oraculo.core.run import RunHead, RunStatus, Task, TaskStatus
from oraculo.ports.browse import Page, RunQuery
from oraculo.ports.store import Due, Snapshot, Unsent
from oraculo.stores.cursor import seal, unseal
from oraculo.stores.mongo.documents import BETWEEN, NOT_OF_HEADS, entry_of, head_of, inputs_of, task_of
from oraculo.stores.mongo.server import TASKS, Collection, Collections, Document, Server, find
from oraculo.stores.records import census_of, unchanged_among

IS_OPEN: Document = {"status": RunStatus.RUNNING.value}
IN_WORK: Document = {"status": TaskStatus.RUNNING.value, "interno.unsent": None}  # its command was sent
RESTING: Document = {"na_dlq": True, "interno.unsent": None}  # its dead letter was
_SEARCHED = "ordem_-1_busca_1"  # by its keys: only what is found is opened
_LONGEST_TEXT = 1_000  # longer than any id and name


class RunReader:
    """The reads of the engine."""

    _server: Server

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        wanted = {"chave_idempotencia": idempotency_key, "impressao": fingerprint}
        with self._server.call() as db:
            found = await db.runs.find_one(wanted, {"_id": 1})
        return None if found is None else str(found["_id"])

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        of_runs = {"correlation_id": {"$in": run_ids}}
        heads: list[RunHead] = []
        inputs: dict[str, list[Document]] = {}
        tasks: dict[str, list[Task]] = {}
        each = self._server.each
        async with self._server.snapshot() as (db, session):
            async for run in each(db.runs, {"_id": {"$in": run_ids}}, session):
                heads.append(head_of(run))
                inputs[run["_id"]] = [run] if "definicao" in run else []
            if large := [run_id for run_id, found in inputs.items() if not found]:
                async for one in each(
                    db.inputs, {"correlation_id": {"$in": large}}, session, "correlation_id", "parte"
                ):
                    inputs[one["correlation_id"]].append(one)
            async for task in each(db.tasks, of_runs, session, "correlation_id", "numero"):
                tasks.setdefault(task["correlation_id"], []).append(task_of(task))
        return {head.id: Snapshot(head, *inputs_of(inputs[head.id]), tasks[head.id]) for head in heads}

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        with self._server.call() as db:
            return {run["_id"]: head_of(run) async for run in find(db.runs, {"_id": {"$in": run_ids}}, NOT_OF_HEADS)}

    async def task(self, run_id: str, number: int) -> Task | None:
        with self._server.call() as db:
            found = await db.tasks.find_one({"correlation_id": run_id, "numero": number})
        return None if found is None else task_of(found)

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        return unchanged_among(copies, await self.heads([copy.id for copy in copies]))

    # -- timers -------------------------------------------------------------------------------------------------

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        with self._server.call() as db:
            runs = await _due(db.runs, now, limit)
            tasks = await _due(db.tasks, now, limit)
        timers = [(run["interno"]["due_at"], Due(run["_id"])) for run in runs]
        timers += [(task["interno"]["due_at"], Due(task["correlation_id"], task["numero"])) for task in tasks]
        return [due for _, due in sorted(timers, key=lambda timer: timer[0])][:limit]

    async def next_due(self) -> float | None:
        with self._server.call() as db:
            found = [*await _due(db.runs, float("inf"), 1), *await _due(db.tasks, float("inf"), 1)]
        return min((float(one["interno"]["due_at"]) for one in found), default=None)

    # -- what is to be sent, and what a broker took -------------------------------------------------------------

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        run_id, number = after or ("", -1)
        wanted = {"_id": 0, "correlation_id": 1, "numero": 1, "tentativas": 1}
        with self._server.call() as db:
            where = unsent_behind(await _place_of(db, run_id), number)
            found = find(db.tasks, where, wanted).sort([("ordem", 1), ("numero", 1)]).limit(limit)
            return [Unsent(one["correlation_id"], one["numero"], one["tentativas"]) async for one in found]

    async def brokers_in_use(self) -> Sequence[str | None]:
        in_use = [{"$match": IN_WORK}, {"$group": {"_id": "$interno.via"}}]
        stages = [
            {"$match": IS_OPEN},
            join_tasks("_id", "correlation_id", in_use),
            {"$unwind": "$tarefas"},
            {"$group": {"_id": "$tarefas._id"}},
        ]
        with self._server.call() as db:
            return [one["_id"] async for one in await db.runs.aggregate(stages)]

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        with self._server.call() as db:
            behind: Document = {"ordem": {"$gt": await _place_of(db, after)}}
            if dead_letters:
                found = await db.tasks.aggregate(_holders_of_dead_letters(via, limit, behind))
            else:
                found = await db.runs.aggregate(_holders_of_commands(via, limit, behind))
            return [run["correlation_id"] async for run in found]


def unsent_behind(place: str, number: int) -> Document:
    later: list[Document] = [{"ordem": place, "numero": {"$gt": number}}, {"ordem": {"$gt": place}}]
    return {"$or": [{"interno.unsent": True, **each} for each in later]}


def _holders_of_dead_letters(via: str | None, limit: int, behind: Document) -> list[Document]:
    return [
        {"$match": {**RESTING, "interno.via": via, **behind}},
        {"$group": {"_id": "$ordem", "correlation_id": {"$first": "$correlation_id"}}},
        {"$sort": {"_id": 1}},
        {"$limit": limit},
    ]


def _holders_of_commands(via: str | None, limit: int, behind: Document) -> list[Document]:
    return [
        {"$match": {**IS_OPEN, **behind}},
        {"$sort": {"ordem": 1}},
        join_tasks("_id", "correlation_id", [{"$match": {**IN_WORK, "interno.via": via}}, {"$limit": 1}]),
        {"$match": {"tarefas": {"$ne": []}}},
        {"$limit": limit},
        {"$project": {"_id": 0, "correlation_id": "$_id"}},
    ]


def join_tasks(local: str, foreign: str, stages: Sequence[Document]) -> Document:
    """Return the stage of an aggregation that gives each run its tasks, as `stages` leave them, in `tarefas`."""
    joined = {"from": TASKS, "localField": local, "foreignField": foreign}
    return {"$lookup": {**joined, "pipeline": stages, "as": "tarefas"}}


async def _due(collection: Collection, now: float, limit: int) -> list[Document]:
    wanted = {"correlation_id": 1, "numero": 1, "interno.due_at": 1}
    found = find(collection, {"interno.due_at": {"$lte": now}}, wanted).sort("interno.due_at").limit(limit)
    return await found.to_list()


async def _place_of(db: Collections, run_id: str) -> str:
    """Return where the run is in the order of creation; the beginning for one that was pruned meanwhile."""
    found = await db.runs.find_one({"_id": run_id}, {"ordem": 1}) if run_id else None
    return "" if found is None else str(found["ordem"])


class RunBrowser:
    """The reads of people."""

    _server: Server

    async def runs(self, query: RunQuery) -> Page:
        before = None if query.cursor is None else unseal(query.cursor).decode(errors="replace")
        if query.text and (len(query.text) > _LONGEST_TEXT or BETWEEN in query.text):
            return Page([], None)
        with self._server.call() as db:
            found = find(db.runs, _where(query, before), NOT_OF_HEADS).sort("ordem", -1).limit(query.limit + 1)
            runs = await (found.hint(_SEARCHED) if query.text else found).to_list()
        page = runs[: query.limit]
        more = len(runs) > query.limit and bool(page)
        return Page([head_of(run) for run in page], seal(page[-1]["ordem"].encode()) if more else None)

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        wanted = {"correlation_id": run_id, "seq": {"$gt": after}}
        with self._server.call() as db:
            return [entry_of(one) async for one in find(db.history, wanted).sort("seq").limit(limit)]

    async def census(self) -> dict[RunStatus, int]:
        stages = [{"$group": {"_id": "$status", "runs": {"$sum": 1}}}]
        with self._server.call() as db:
            counted = await db.runs.aggregate(stages, hint="status_1_ordem_-1")
            return census_of([(one["_id"], one["runs"]) async for one in counted])


def _where(query: RunQuery, before: str | None) -> Document:
    where: Document = {} if before is None else {"ordem": {"$lt": before}}
    if query.statuses:
        where["status"] = {"$in": sorted(status.value for status in query.statuses)}
    if query.name is not None:
        where["pipeline"] = query.name
    if query.text:
        where["busca"] = {"$regex": re.escape(query.text.casefold()).replace("\0", "\\x00")}
    created = {"$gte": query.since, "$lt": query.until}
    if bounds := {comparison: moment for comparison, moment in created.items() if moment is not None}:
        where["interno.created_at"] = bounds
    return where
