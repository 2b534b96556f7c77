"""Definitions that were put by users. A deleted one leaves its name and its count of changes behind, so that the sum of
all counts tells, in one read, whether anything changed."""

from typing import Any

from oraculo.stores.mongo.documents import moment
from oraculo.stores.mongo.server import Server


class Pipelines:
    def __init__(self, server: Server) -> None:
        self._pipelines = server.pipelines

    async def all(self) -> dict[str, bytes]:
        found = self._pipelines.find({"definicao": {"$exists": True}}).sort("_id")
        return {one["_id"]: one["definicao"] async for one in found}

    async def mark(self) -> str:
        count: list[dict[str, Any]] = [{"$group": {"_id": None, "revisao": {"$sum": "$revisao"}}}]
        counted = await (await self._pipelines.aggregate(count)).to_list()
        return str(counted[0]["revisao"] if counted else 0)

    async def put(self, name: str, definition: bytes, now: float) -> None:
        change = {"$set": {"definicao": definition, "alterada_em": moment(now)}, "$inc": {"revisao": 1}}
        await self._pipelines.update_one({"_id": name}, change, upsert=True)

    async def delete(self, name: str) -> bool:
        change = {"$unset": {"definicao": True}, "$inc": {"revisao": 1}}
        done = await self._pipelines.update_one({"_id": name, "definicao": {"$exists": True}}, change)
        return done.matched_count == 1
