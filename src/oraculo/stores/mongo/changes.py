"""Changes of runs, by compare-and-set on each run's own document.

A light change is one write to that document. A heavy one, of a wide run or with something too large for it, writes
side documents first, under names that nobody knows; the write to the run's document then names them, all at once. The
blocks that they replace stay a while for readers who have just found their names. So whoever is killed between any two
writes leaves the run as it was or as it is to be, and perhaps documents that no run names; those go with the run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo import UpdateOne

from oraculo.errors import StoreUnavailable
from oraculo.stores.mongo.agenda import Agenda, agenda_of
from oraculo.stores.mongo.documents import head_of, without_results
from oraculo.stores.mongo.housekeeping import Housekeeping
from oraculo.stores.mongo.portions import encoded, insert_missing, portions, read_all
from oraculo.stores.mongo.server import Document, Server
from oraculo.stores.mongo.writes import BLOCK_TASKS, Update, agenda_of_blocks, block_document, block_entry

_ROUNDS = 10
_STANDING = {"correlation_id": 1, "revisao": 1, "gravacoes": 1, "esquecida": 1}


class _Heavy(NamedTuple):
    update: Update
    operation: UpdateOne
    blocks: list[RawBSONDocument]
    replaced: list[ObjectId]


class ChangeWriter:
    def __init__(self, server: Server, keeper: Housekeeping) -> None:
        self._server = server
        self._keeper = keeper

    async def write(self, updates: Sequence[Update]) -> frozenset[str]:
        """Returns the runs whose version was not the expected one."""
        light = [update for update in updates if update.is_light]
        heavy = [update for update in updates if not update.is_light]
        lost = await self._write_light(light) if light else set()
        lost |= await self._write_heavy(heavy) if heavy else set()
        full = [update.run_id for update in updates if update.fills_history and update.run_id not in lost]
        if full:
            self._keeper.spill_history(full)
        return frozenset(lost)

    async def _write_light(self, updates: list[Update]) -> set[str]:
        losers, forgotten = await self._compare_and_set([(update, update.light_operation()) for update in updates])
        lost = {update.run_id for update in losers}
        return lost | await self._write_heavy(forgotten) if forgotten else lost

    async def _compare_and_set(self, writes: list[tuple[Update, UpdateOne]]) -> tuple[list[Update], list[Update]]:
        """Returns those that another version was found for, and those that `forget_sent` came in between of."""
        matched = 0
        for portion, size in portions(writes, lambda one: one[0].size):
            with self._server.limit(size):
                done = await self._server.runs.bulk_write([operation for _, operation in portion], ordered=False)
            matched += done.matched_count
        if matched == len(writes):
            return [], []
        # The server counts what it found, and does not say which: each run's last commits do.
        ids = [update.run_id for update, _ in writes]
        with self._server.limit():
            found = {one["correlation_id"]: one async for one in self._server.runs.find(_among(ids), _STANDING)}
        verdicts = [update.was_written(found.get(update.run_id)) for update, _ in writes]
        # Of a copy far behind no name tells; but where all that the server counted are known, it was not written.
        if None in verdicts and verdicts.count(True) != matched:
            raise StoreUnavailable(
                f"MongoDB at {self._server.place}: runs changed too often to tell which commits were written"
            )
        losers: list[Update] = []
        forgotten: list[Update] = []
        for (update, _), was_written in zip(writes, verdicts, strict=True):
            if was_written:
                continue
            standing = found.get(update.run_id)
            still = standing is not None and standing["revisao"] == update.based_on and "esquecida" in standing
            (forgotten if still else losers).append(update)
        return losers, forgotten

    # -- heavy ones ---------------------------------------------------------------------------------------------

    async def _write_heavy(self, updates: list[Update]) -> set[str]:
        lost: set[str] = set()
        for _ in range(_ROUNDS):
            if not updates:
                return lost
            prepared = await self._prepare(updates)
            ready = [heavy for heavy in prepared if heavy is not None]
            lost |= {update.run_id for update, heavy in zip(updates, prepared, strict=True) if heavy is None}
            losers, updates = await self._write_ready(ready) if ready else ([], [])
            lost |= {update.run_id for update in losers}
        raise StoreUnavailable(f"MongoDB at {self._server.place}: what was sent is being forgotten; try again")

    async def _write_ready(self, ready: list[_Heavy]) -> tuple[list[Update], list[Update]]:
        blocks = [block for heavy in ready for block in heavy.blocks]
        await insert_missing(self._server, self._server.blocks, blocks)
        parts = [part for heavy in ready for part in heavy.update.attachments]
        await insert_missing(self._server, self._server.attachments, parts)
        losers, again = await self._compare_and_set([(heavy.update, heavy.operation) for heavy in ready])
        missed = {update.run_id for update in (*losers, *again)}
        old: list[ObjectId] = []
        for heavy in ready:
            was_missed = heavy.update.run_id in missed
            old += [block["_id"] for block in heavy.blocks] if was_missed else heavy.replaced
        lost = {update.run_id for update in losers}
        unused = [part["_id"] for heavy in ready if heavy.update.run_id in lost for part in heavy.update.attachments]
        self._keeper.discard(old, unused)
        return losers, again

    async def _prepare(self, updates: list[Update]) -> list[_Heavy | None]:
        """None: the stored version is not the expected one."""
        ids = [update.run_id for update in updates]
        wanted = {"correlation_id": 1, "revisao": 1, "blocos": 1, "esquecida": 1}
        with self._server.limit():
            found = {one["correlation_id"]: one async for one in self._server.runs.find(_among(ids), wanted)}
        current = [_if_current(update, found.get(update.run_id)) for update in updates]
        blocks = await self._blocks_of(updates, current)
        prepared: list[_Heavy | None] = []
        for update, run in zip(updates, current, strict=True):
            if run is None or (update.wide and not _has_all(update, run, blocks)):
                prepared.append(None)
            elif update.wide:
                prepared.append(_wide(update, run, blocks))
            else:
                prepared.append(await self._narrow(update, run))
        return prepared

    async def _blocks_of(
        self, updates: Sequence[Update], runs: Sequence[Document | None]
    ) -> dict[ObjectId, RawBSONDocument]:
        names = [
            run["blocos"][number]["bloco"]
            for update, run in zip(updates, runs, strict=True)
            if run is not None
            for number in update.agendas
        ]
        return {block["_id"]: block for block in await read_all(self._server, self._server.raw_blocks, "_id", names)}

    async def _narrow(self, update: Update, run: Document) -> _Heavy | None:
        _attach(update, run["_id"])
        forgotten, fields = run.get("esquecida"), update.fields
        if forgotten is not None:
            # What is to be sent again is known to the stored tasks alone, not to whoever decided this change.
            with self._server.limit():
                stored = await self._server.runs.find_one({"_id": run["_id"], "revisao": update.based_on})
            if stored is None:
                return None
            forgotten = stored["esquecida"]  # it may be another's by now
            tasks = stored["tarefas"]
            for number, task in update.tasks.items():
                tasks[number] = task
            head = head_of(stored | fields)
            fields = fields | {"agenda": agenda_of(head, (without_results(n, task) for n, task in enumerate(tasks)))}
        where = {"_id": run["_id"], "esquecida": forgotten}
        return _Heavy(update, update.operation(where, fields | update.embedded_tasks() | {"lateral": True}), [], [])


def _among(run_ids: Sequence[str]) -> Document:
    return {"correlation_id": {"$in": run_ids}}


def _if_current(update: Update, run: Document | None) -> Document | None:
    return run if run is not None and run["revisao"] == update.based_on else None


def _has_all(update: Update, run: Document, blocks: dict[ObjectId, RawBSONDocument]) -> bool:
    """A block that is gone was replaced long ago: the run has moved on since it was looked at."""
    return all(run["blocos"][number]["bloco"] in blocks for number in update.agendas)


def _attach(update: Update, run_key: str) -> None:
    for part in update.attachments:
        part["run"] = run_key


def _wide(update: Update, run: Document, stored: dict[ObjectId, RawBSONDocument]) -> _Heavy:
    _attach(update, run["_id"])
    directory, fields = run["blocos"], dict(update.fields)
    blocks, replaced = [], []
    for number, agenda in update.agendas.items():
        name, old = ObjectId(), directory[number]["bloco"]
        tasks = list(stored[old]["tarefas"])
        start = number * BLOCK_TASKS
        for place in range(len(tasks)):
            tasks[place] = update.tasks.get(start + place, tasks[place])
        if "esquecida" in run:
            agenda = Agenda.of_tasks(without_results(start + place, task) for place, task in enumerate(tasks))
        blocks.append(encoded(block_document(name, run["_id"], update.run_id, number, tasks)))
        replaced.append(old)
        directory[number] = fields[f"blocos.{number}"] = block_entry(name, agenda)
    fields["lateral"] = True
    state = fields["estado"]
    fields["agenda"] = agenda_of_blocks(directory, state["due_at"], state["ended_at"])
    where = {"_id": run["_id"], "esquecida": run.get("esquecida")}
    return _Heavy(update, update.operation(where, fields), blocks, replaced)
