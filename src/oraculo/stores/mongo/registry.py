"""Everything that engines share beside runs: pipelines, living engines, facts, and the installation's name."""

import secrets
from collections.abc import Sequence

from oraculo.stores.mongo.documents import moment
from oraculo.stores.mongo.server import Collections, Server, Session

_PIPELINES_MARK = {"_id": "pipelines"}
_INSTALLATION = {"_id": "instalacao"}


class Registry:
    _server: Server

    # -- pipelines ----------------------------------------------------------------------------------------------

    async def pipelines(self) -> dict[str, bytes]:
        with self._server.call() as db:
            return {one["_id"]: one["definicao"] async for one in db.pipelines.find().sort("_id")}

    async def pipelines_mark(self) -> str:
        with self._server.call() as db:
            found = await db.meta.find_one(_PIPELINES_MARK)
        return str(found["alteracoes"] if found else 0)

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        async def put(db: Collections, session: Session) -> None:
            change = {"$set": {"definicao": definition, "alterada_em": moment(now)}}
            await db.pipelines.update_one({"_id": name}, change, upsert=True, session=session)
            await _count_change(db, session)

        await self._server.transaction(put)

    async def delete_pipeline(self, name: str) -> bool:
        async def delete(db: Collections, session: Session) -> bool:
            done = await db.pipelines.delete_one({"_id": name}, session=session)
            if done.deleted_count:
                await _count_change(db, session)
            return bool(done.deleted_count)

        return await self._server.transaction(delete)

    # -- engines ------------------------------------------------------------------------------------------------

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        noted_before_the_clock_was_set_back = {"visto_em": {"$gt": now + ttl}}
        silent = {"$or": [{"visto_em": {"$lt": now - ttl}}, noted_before_the_clock_was_set_back]}
        with self._server.call() as db:
            await db.engines.update_one({"_id": engine}, {"$set": {"visto_em": now}}, upsert=True)
            await db.engines.delete_many(silent)
            return [one["_id"] async for one in db.engines.find().sort("_id")]

    async def depart(self, engine: str) -> None:
        with self._server.call() as db:
            await db.engines.delete_one({"_id": engine})

    async def engines(self, since: float) -> Sequence[str]:
        with self._server.call() as db:
            return [one["_id"] async for one in db.engines.find({"visto_em": {"$gte": since}}).sort("_id")]

    # -- facts --------------------------------------------------------------------------------------------------

    async def clock(self) -> float | None:
        return await self._server.clock()

    async def installation(self) -> str:
        new_name = {"$setOnInsert": {"nome": secrets.token_hex(16)}}
        with self._server.call() as db:
            await db.meta.update_one(_INSTALLATION, new_name, upsert=True)
            found = await db.meta.find_one(_INSTALLATION)
        return str(found and found["nome"])

    async def note(self, fact: str) -> None:
        with self._server.call() as db:
            await db.facts.update_one({"_id": fact}, {"$setOnInsert": {"_id": fact}}, upsert=True)

    async def noted(self, fact: str) -> bool:
        with self._server.call() as db:
            return await db.facts.find_one({"_id": fact}) is not None


async def _count_change(db: Collections, session: Session) -> None:
    await db.meta.update_one(_PIPELINES_MARK, {"$inc": {"alteracoes": 1}}, upsert=True, session=session)
