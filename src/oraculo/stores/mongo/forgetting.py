"""The broker lost its memory: what it took counts as not sent.

No version moves, so an engine that holds such a run knows nothing of it. The run is marked for good: a change of it is
put together with its stored tasks, instead of with what the engine remembers of them.
"""

from collections.abc import Sequence

from bson.objectid import ObjectId

from oraculo.core.run import RunStatus, Task, TaskStatus
from oraculo.errors import StoreUnavailable
from oraculo.stores.mongo.agenda import Agenda
from oraculo.stores.mongo.housekeeping import Housekeeping
from oraculo.stores.mongo.portions import insert_missing
from oraculo.stores.mongo.reading import Replaced, read_blocks, require_all, tasks_of
from oraculo.stores.mongo.server import Document, Server
from oraculo.stores.mongo.writes import BLOCK_TASKS, agenda_of_blocks, block_document, block_entry

_ROUNDS = 20


async def forget_sent(server: Server, keeper: Housekeeping) -> int:
    concerned = [
        {"status": RunStatus.RUNNING.value, "agenda.com": {"$exists": True}},
        {"agenda.cartas_com": {"$exists": True}},
    ]
    with server.limit():
        keys = [run["_id"] async for run in server.runs.find({"$or": concerned}, {"_id": 1})]
    return sum([await _forget_in(server, keeper, key) for key in keys])


async def _forget_in(server: Server, keeper: Housekeeping, key: str) -> int:
    """Again, when a commit comes in between."""
    for _ in range(_ROUNDS):
        with server.limit():
            run = await server.runs.find_one({"_id": key})
        if run is None:
            return 0
        try:
            forgotten = await (_forget_wide if "blocos" in run else _forget_narrow)(server, keeper, run)
        except Replaced:
            continue
        if forgotten is not None:
            return forgotten
    raise StoreUnavailable(f"MongoDB at {server.place}: a run changes faster than what was sent of it is forgotten")


async def _forget_narrow(server: Server, _keeper: Housekeeping, run: Document) -> int | None:
    tasks = tasks_of(0, run["tarefas"])
    numbers = _forget(tasks, run)
    agenda = Agenda.of_tasks(tasks).document_of_run(run["estado"]["due_at"], run["estado"]["ended_at"])
    fields = {f"tarefas.{number}.interno.unsent": True for number in numbers}
    return len(numbers) if await _write(server, run, {**fields, "agenda": agenda}) else None


async def _forget_wide(server: Server, keeper: Housekeeping, run: Document) -> int | None:
    """Blocks are not changed, but replaced: a reader has all of the old ones, or all of the new."""
    directory: list[Document] = run["blocos"]
    places = [n for n, entry in enumerate(directory) if entry["agenda"].keys() & {"com", "cartas_com"}]
    names = [directory[place]["bloco"] for place in places]
    stored = await read_blocks(server, names)
    require_all(names, stored)
    fields: Document = {}
    blocks: list[Document] = []
    replaced: list[ObjectId] = []
    count = 0
    for place in places:
        name, old = ObjectId(), directory[place]["bloco"]
        start, documents = place * BLOCK_TASKS, stored[old]
        tasks = tasks_of(start, documents)
        numbers = _forget(tasks, run)
        for number in numbers:
            documents[number - start]["interno"]["unsent"] = True
        blocks.append(block_document(name, run["_id"], run["correlation_id"], place, documents))
        replaced.append(old)
        directory[place] = fields[f"blocos.{place}"] = block_entry(name, Agenda.of_tasks(tasks))
        count += len(numbers)
    fields["agenda"] = agenda_of_blocks(directory, run["estado"]["due_at"], run["estado"]["ended_at"])
    await insert_missing(server, server.blocks, blocks)
    written = await _write(server, run, fields)
    keeper.discard(replaced if written else [block["_id"] for block in blocks], [])
    return count if written else None


def _forget(tasks: Sequence[Task], run: Document) -> list[int]:
    """Marks them, and returns their numbers."""
    is_open = run["status"] == RunStatus.RUNNING.value
    sent = [
        task
        for task in tasks
        if not task.unsent and (task.dead_letter or (is_open and task.status is TaskStatus.RUNNING))
    ]
    for task in sent:
        task.unsent = True
    return [task.number for task in sent]


async def _write(server: Server, run: Document, fields: Document) -> bool:
    where = {"_id": run["_id"], "revisao": run["revisao"], "esquecida": run.get("esquecida")}
    with server.limit():
        done = await server.runs.update_one(where, {"$set": {**fields, "esquecida": ObjectId()}})
    return done.matched_count == 1
