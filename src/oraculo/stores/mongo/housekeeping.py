"""What is done after a commit, or now and then: nobody waits for it, and it may be done again.

- History entries move out of a run's document into blocks, once there is a block's worth. A block holds a fixed range
  of entries that were committed: whoever writes it writes the same.
- Blocks that were replaced, and side documents of a commit that lost, are deleted.
- Side documents are *doubtful* while a run is being created or deleted: noted before, and settled after, by looking
  whether the run is there. What a killed process left is settled when it is old enough that nobody is still at it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from bson.objectid import ObjectId
from pymongo import UpdateOne

from oraculo.core.chunks import pages
from oraculo.errors import StoreError
from oraculo.stores.mongo.faults import translated
from oraculo.stores.mongo.history import entries_in_document, full_blocks
from oraculo.stores.mongo.portions import insert_missing, read_all
from oraculo.stores.mongo.server import Document, Server

DOUBTFUL_SECONDS = 3600.0
_TOGETHER = 50


class Housekeeping:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._at_work: set[asyncio.Task[None]] = set()

    def _later(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(self._do(work))
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)

    async def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with suppress(StoreError), translated(self._server.place):  # then it is done another time
            await work()

    async def finish(self) -> None:
        if self._at_work:
            await asyncio.wait(self._at_work)

    # -- blocks and attachments ---------------------------------------------------------------------------------

    def discard(self, blocks: Sequence[ObjectId], attachments: Sequence[ObjectId]) -> None:
        if blocks or attachments:
            self._later(lambda: self._discard(blocks, attachments))

    async def _discard(self, blocks: Sequence[ObjectId], attachments: Sequence[ObjectId]) -> None:
        with self._server.limit():
            if blocks:  # the server deletes them in a while
                await self._server.blocks.update_many({"_id": {"$in": blocks}}, {"$currentDate": {"superado_em": True}})
            if attachments:
                await self._server.attachments.delete_many({"_id": {"$in": attachments}})

    # -- history ------------------------------------------------------------------------------------------------

    def spill_history(self, run_ids: Sequence[str]) -> None:
        self._later(lambda: self._spill_history(run_ids))

    async def _spill_history(self, run_ids: Sequence[str]) -> None:
        for part in pages(run_ids, _TOGETHER):
            wanted = {"historico": 1, "historico_anexos": 1}
            await self._spill(await read_all(self._server, self._server.runs, "correlation_id", part, wanted))

    async def _spill(self, runs: Sequence[Document]) -> None:
        blocks: list[Document] = []
        forget: list[UpdateOne] = []
        for run in runs:
            entries = await entries_in_document(self._server, run)
            if full := full_blocks(run["_id"], entries):
                last = full[-1]["entradas"][-1]["seq"]
                blocks += full
                pulled = {"historico": {"seq": {"$lte": last}}, "historico_anexos": {"ate": {"$lte": last}}}
                forget.append(UpdateOne({"_id": run["_id"]}, {"$pull": pulled}))
                forget += _brought_in(run, entries, last)
        if blocks:
            keys = list({block["run"] for block in blocks})
            with self._server.limit():
                await self._server.runs.update_many({"_id": {"$in": keys}}, {"$set": {"lateral": True}})
            await insert_missing(self._server, self._server.history, blocks)
            with self._server.limit():
                await self._server.runs.bulk_write(forget, ordered=False)

    # -- what may belong to no run ------------------------------------------------------------------------------

    async def doubt(self, run_keys: Iterable[str]) -> None:
        doubtful = [{"_id": key, "desde": time.time()} for key in run_keys]
        await insert_missing(self._server, self._server.doubtful, doubtful)

    def settle(self, run_keys: Iterable[str]) -> None:
        keys = list(run_keys)
        self._later(lambda: self.settle_now(keys))

    async def settle_now(self, run_keys: Sequence[str]) -> None:
        among = {"_id": {"$in": run_keys}}
        with self._server.limit():
            there = {run["_id"] async for run in self._server.runs.find(among, {"_id": 1})}
            gone = [key for key in run_keys if key not in there]
            if gone:
                for side in (self._server.blocks, self._server.history, self._server.attachments):
                    await side.delete_many({"run": {"$in": gone}})
            await self._server.doubtful.delete_many(among)

    async def settle_old(self) -> None:
        old = {"desde": {"$lt": time.time() - DOUBTFUL_SECONDS}}
        keys = [one["_id"] async for one in self._server.doubtful.find(old, limit=_TOGETHER)]
        if keys:
            await self.settle_now(keys)

    # -- retention ----------------------------------------------------------------------------------------------

    async def prune(self, ended_before: float, limit: int) -> int:
        with self._server.limit():
            await self.settle_old()
            runs = await self._found_prunable(ended_before, limit)
            plain = [run["_id"] for run in runs if "lateral" not in run]
            pruned = await self._delete(plain, {**_prunable(ended_before), "lateral": None})
        with_sides = [run["_id"] for run in runs if "lateral" in run]
        for part in pages(with_sides, _TOGETHER):  # each in its own time, so that commits go on in between
            with self._server.limit():
                await self.doubt(part)
                pruned += await self._delete(part, _prunable(ended_before))
                await self.settle_now(part)
        return pruned

    async def _found_prunable(self, ended_before: float, limit: int) -> list[Document]:
        if limit < 1:  # to MongoDB, 0 is no limit
            return []
        found = self._server.runs.find(_prunable(ended_before), {"lateral": 1}).sort("agenda.apagavel").limit(limit)
        return [run async for run in found]

    async def _delete(self, keys: Sequence[str], where: Document) -> int:
        """A run may have been opened again since it was found."""
        if not keys:
            return 0
        return (await self._server.runs.delete_many({"_id": {"$in": keys}, **where})).deleted_count


def _brought_in(run: Document, entries: dict[int, Document], last: int) -> Iterator[UpdateOne]:
    """What an attachment has beyond the last block, less than one, comes into the run's document, or all of it would be
    read for that again and again. Once: who comes later does not find the attachment named."""
    for attached in run.get("historico_anexos", ()):
        seqs = range(max(attached["de"], last + 1), attached["ate"] + 1)
        if seqs and all(seq in entries for seq in seqs):
            where = {"_id": run["_id"], "historico_anexos.ate": attached["ate"]}
            rest = {"historico": {"$each": [entries[seq] for seq in seqs]}}
            yield UpdateOne(where, {"$push": rest, "$pull": {"historico_anexos": {"ate": attached["ate"]}}})


def _prunable(ended_before: float) -> Document:
    return {"agenda.apagavel": {"$lt": ended_before}}
