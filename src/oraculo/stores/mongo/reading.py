"""Runs as they were committed.

A wide run's document names the blocks of its tasks. A block that is gone was replaced after the document was read: then
the document is read again. So what is put together is always of one version.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from bson.objectid import ObjectId

from oraculo.core.chunks import pages
from oraculo.core.run import RunHead, RunStatus, Task
from oraculo.errors import StoreUnavailable
from oraculo.ports.store import Due, Snapshot, Unsent
from oraculo.stores.mongo.documents import NOT_OF_HEADS, Parts, content, head_of, names_in, task_of
from oraculo.stores.mongo.portions import read_all
from oraculo.stores.mongo.server import Document, Server
from oraculo.stores.mongo.writes import BLOCK_TASKS

Result = TypeVar("Result")
_ROUNDS = 20
_PAGE = 500


class Replaced(Exception):
    """A block or an attachment is gone: its run has moved on, or is gone too."""


async def steadily(server: Server, ask: Callable[[], Awaitable[Result]]) -> Result:
    """Asks again until nothing was replaced in between."""
    for _ in range(_ROUNDS):
        try:
            return await ask()
        except Replaced:
            continue
    raise StoreUnavailable(f"MongoDB at {server.place}: a run changes faster than it can be read")


# -- whole runs -----------------------------------------------------------------------------------------------------


async def load(server: Server, run_ids: Sequence[str]) -> dict[str, Snapshot]:
    loaded: dict[str, Snapshot] = {}
    for some in pages(run_ids, _PAGE):
        loaded |= await steadily(server, _Loading(server, some).ask)
    return loaded


class _Loading:
    """What was read is not read again when a run moved on meanwhile: a block and an attachment never change. So even
    a run whose blocks are replaced faster than all of them come over the line is read in the end."""

    def __init__(self, server: Server, run_ids: Sequence[str]) -> None:
        self._server = server
        self._run_ids = run_ids
        self._blocks: dict[ObjectId, list[Document]] = {}
        self._parts: dict[ObjectId, bytes] = {}

    async def ask(self) -> dict[str, Snapshot]:
        runs = await self._read_runs()
        await self._read_blocks([entry["bloco"] for run in runs for entry in run.get("blocos", ())])
        tasks = {run["_id"]: _task_documents(run, self._blocks) for run in runs}
        texts = [text for run in runs for text in (run["payload"], run["definicao"])]
        texts += [task["resultado"] for documents in tasks.values() for task in documents if "resultado" in task]
        await self._read_parts([name for text in texts for name in names_in(text)])
        return {run["correlation_id"]: _snapshot(run, tasks[run["_id"]], self._parts) for run in runs}

    async def _read_runs(self) -> list[Document]:
        runs = self._server.runs
        left_out = {"historico": 0, "historico_anexos": 0, "busca": 0, "gravacoes": 0, "agenda": 0}
        if len(self._run_ids) > 1:
            return await read_all(self._server, runs, "correlation_id", self._run_ids, left_out)
        with self._server.limit():  # a single one is no larger than a portion
            return [run async for run in runs.find({"correlation_id": {"$in": self._run_ids}}, left_out)]

    async def _read_blocks(self, names: Sequence[ObjectId]) -> None:
        missing = [name for name in names if name not in self._blocks]
        self._blocks |= await read_blocks(self._server, missing)
        require_all(names, self._blocks)

    async def _read_parts(self, names: Sequence[ObjectId]) -> None:
        missing = [name for name in names if name not in self._parts]
        found = await read_all(self._server, self._server.attachments, "_id", missing, {"dados": 1})
        self._parts |= {part["_id"]: part["dados"] for part in found}
        require_all(names, self._parts)


def _task_documents(run: Document, blocks: dict[ObjectId, list[Document]]) -> list[Document]:
    if "tarefas" in run:
        tasks: list[Document] = run["tarefas"]
        return tasks
    return [task for entry in run["blocos"] for task in blocks[entry["bloco"]]]


def _snapshot(run: Document, tasks: Iterable[Document], parts: Parts) -> Snapshot:
    return Snapshot(
        head=head_of(run),
        definition=content(run["definicao"], parts),
        payload=content(run["payload"], parts),
        tasks=[task_of(number, task, parts) for number, task in enumerate(tasks)],
    )


async def read_blocks(
    server: Server, names: Sequence[ObjectId], wanted: Document | None = None
) -> dict[ObjectId, list[Document]]:
    """The tasks in each block that is there. What is `wanted` of them is little, so that it comes at once."""
    if wanted is None:
        found = await read_all(server, server.blocks, "_id", names, {"tarefas": 1})
    else:
        found = [block async for block in server.blocks.find({"_id": {"$in": names}}, wanted)] if names else []
    return {block["_id"]: block["tarefas"] for block in found}


def require_all(names: Iterable[ObjectId], found: Mapping[ObjectId, object]) -> None:
    """Raises Replaced when one is gone."""
    if not found.keys() >= set(names):
        raise Replaced


async def heads(server: Server, run_ids: Sequence[str]) -> dict[str, RunHead]:
    found = server.runs.find({"correlation_id": {"$in": run_ids}}, NOT_OF_HEADS)
    return {run["correlation_id"]: head_of(run) async for run in found}


async def one_task(server: Server, run_id: str, number: int) -> Task | None:
    place = {"tarefas": {"$slice": [number, 1]}, "blocos": {"$slice": [number // BLOCK_TASKS, 1]}}
    run = await server.runs.find_one({"correlation_id": run_id}, {"correlation_id": 1, **place})
    if run is None:
        return None
    found: list[Document] = run.get("tarefas", [])
    if run.get("blocos"):
        name = run["blocos"][0]["bloco"]
        blocks = await read_blocks(server, [name], {"tarefas": {"$slice": [number % BLOCK_TASKS, 1]}})
        require_all([name], blocks)
        found = blocks[name]
    if not found:
        return None
    names = names_in(found[0]["resultado"]) if "resultado" in found[0] else []
    parts = await read_all(server, server.attachments, "_id", names, {"dados": 1})
    read = {part["_id"]: part["dados"] for part in parts}
    require_all(names, read)
    return task_of(number, found[0], read)


async def created_with(server: Server, key: str, fingerprint: str) -> str | None:
    wanted = {"chave_idempotencia": key, "origem.fingerprint": fingerprint}
    found = await server.runs.find_one(wanted, {"correlation_id": 1})
    return None if found is None else str(found["correlation_id"])


# -- timers ---------------------------------------------------------------------------------------------------------


async def due(server: Server, now: float, limit: int) -> list[Due]:
    """Each run is found by its earliest timer, so the runs with the `limit` earliest have the `limit` earliest."""
    wanted = {"correlation_id": 1, "estado.due_at": 1, "tarefas.interno.due_at": 1, "blocos": 1}
    found = server.runs.find({"agenda.toca_em": {"$lte": now}}, wanted).sort("agenda.toca_em").limit(limit)
    runs = [run async for run in found]
    ringing = [
        (number, entry["bloco"], run)
        for run in runs
        for number, entry in enumerate(run.get("blocos", ()))
        if "toca_em" in entry["agenda"] and entry["agenda"]["toca_em"] <= now
    ]
    ringing.sort(key=lambda one: one[2]["blocos"][one[0]]["agenda"]["toca_em"])
    names = [name for _, name, _ in ringing[:limit]]
    blocks = await read_blocks(server, names, {"tarefas.interno.due_at": 1})
    require_all(names, blocks)
    timers: list[tuple[float, str, int, str]] = []  # the run's own is its task -1
    for run in runs:
        timers += _timers(run, -1, [{"interno": run["estado"]}])
        timers += _timers(run, 0, run.get("tarefas", ()))
    for number, name, run in ringing[:limit]:
        timers += _timers(run, number * BLOCK_TASKS, blocks[name])
    rung = sorted(timer for timer in timers if timer[0] <= now)[:limit]
    return [Due(run_id, None if task < 0 else task) for _, _, task, run_id in rung]


def _timers(run: Document, first: int, documents: Iterable[Document]) -> Iterable[tuple[float, str, int, str]]:
    for number, document in enumerate(documents, first):
        due_at = document.get("interno", {}).get("due_at")
        if due_at is not None:
            yield due_at, run["_id"], number, run["correlation_id"]


async def next_due(server: Server) -> float | None:
    anything = {"agenda.toca_em": {"$exists": True}}
    found = await server.runs.find_one(anything, {"agenda.toca_em": 1}, sort=[("agenda.toca_em", 1)])
    return None if found is None else float(found["agenda"]["toca_em"])


# -- what is to be sent, and what a broker took ---------------------------------------------------------------------


async def key_of(server: Server, run_id: str) -> str:
    """Where the run is in the order of creation. One that was deleted has lost its place: then, the beginning."""
    if not run_id:
        return ""
    found = await server.runs.find_one({"correlation_id": run_id}, {"_id": 1})
    return "" if found is None else str(found["_id"])


async def unsent(server: Server, limit: int, after: tuple[str, int] | None) -> list[Unsent]:
    run_id, task = after or ("", -1)
    key = await key_of(server, run_id)
    commands: list[Unsent] = []
    async for run in _with_unsent(server, key):
        first = task + 1 if run["_id"] == key else 0
        commands += await _unsent_of(server, run, first, limit - len(commands))
        if len(commands) >= limit:
            break
    return commands


async def _with_unsent(server: Server, key: str) -> AsyncIterator[Document]:
    wanted = {"correlation_id": 1, "tarefas.interno.unsent": 1, "tarefas.tentativas": 1, "blocos": 1}
    found = server.runs.find({"agenda.a_enviar": True, "_id": {"$gte": key}}, wanted)
    async for run in found.sort([("agenda.a_enviar", 1), ("_id", 1)]):
        yield run


async def _unsent_of(server: Server, run: Document, first: int, limit: int) -> list[Unsent]:
    if "tarefas" in run:
        return _unsent_in(run, 0, run["tarefas"], first)[:limit]
    flagged = [
        (number, entry["bloco"])
        for number, entry in enumerate(run["blocos"])
        if "a_enviar" in entry["agenda"] and (number + 1) * BLOCK_TASKS > first
    ][: limit + 1]  # each has one at least; of the first, all may be before the place to begin at
    names = [name for _, name in flagged]
    blocks = await read_blocks(server, names, {"tarefas.interno.unsent": 1, "tarefas.tentativas": 1})
    require_all(names, blocks)
    commands: list[Unsent] = []
    for number, name in flagged:
        commands += _unsent_in(run, number * BLOCK_TASKS, blocks[name], first)
    return commands[:limit]


def _unsent_in(run: Document, start: int, tasks: Sequence[Document], first: int) -> list[Unsent]:
    return [
        Unsent(run["correlation_id"], number, task["tentativas"])
        for number, task in enumerate(tasks, start)
        if number >= first and "unsent" in task["interno"]
    ]


async def brokers_in_use(server: Server) -> list[str | None]:
    stages: list[dict[str, Any]] = [
        {"$match": {"status": RunStatus.RUNNING.value, "agenda.com": {"$exists": True}}},
        {"$unwind": "$agenda.com"},
        {"$group": {"_id": "$agenda.com"}},
    ]
    return [one["_id"] async for one in await server.runs.aggregate(stages)]


async def held_by(server: Server, via: str | None, limit: int, after: str, *, dead_letters: bool) -> list[str]:
    took = {"$exists": True, "$elemMatch": {"$eq": via}}
    where: Document = {"_id": {"$gt": await key_of(server, after)}}
    if dead_letters:
        where["agenda.cartas_com"] = took
    else:
        where |= {"status": RunStatus.RUNNING.value, "agenda.com": took}
    found = server.runs.find(where, {"correlation_id": 1}).sort("_id").limit(limit)
    return [run["correlation_id"] async for run in found]


def tasks_of(start: int, documents: Iterable[Document]) -> list[Task]:
    """Without their results."""
    return [task_of(number, {**task, "resultado": None}, {}) for number, task in enumerate(documents, start)]
