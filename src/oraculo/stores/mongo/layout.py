"""The collections' indexes and the layout's number: looked at when the store is opened, brought up to date by
`oraculo migrate`. Also looked at before runs are created, now and then: whoever drops the database under a running
engine drops the indexes by which an id and a key are given once."""

import time

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.errors import DuplicateKeyError

from oraculo.errors import StoreError, StoreUnavailable
from oraculo.stores.migrations import Migration
from oraculo.stores.mongo.server import Document, Server

# A block that a newer one replaced stays for readers who have just found its name.
SUPERSEDED_SECONDS = 60
TRUSTED_SECONDS = 1.0  # that the indexes are taken to be there, once they were seen


def _present(*paths: str) -> dict[str, object]:
    return {path: {"$exists": True} for path in paths}


_RUNS = (
    IndexModel("correlation_id", unique=True),
    IndexModel("chave_idempotencia", unique=True, partialFilterExpression=_present("chave_idempotencia")),
    # `_id` is in the order of creation: these list newest first, and the first searches without opening documents.
    IndexModel([("_id", DESCENDING), ("busca", ASCENDING)]),
    IndexModel([("status", ASCENDING), ("_id", DESCENDING)]),
    IndexModel([("pipeline", ASCENDING), ("_id", DESCENDING)]),
    # A run is in each of these only for as long as it has something to be found by.
    IndexModel("agenda.toca_em", partialFilterExpression=_present("agenda.toca_em")),
    IndexModel([("agenda.a_enviar", 1), ("_id", 1)], partialFilterExpression=_present("agenda.a_enviar")),
    IndexModel([("agenda.cartas_com", 1), ("_id", 1)], partialFilterExpression=_present("agenda.cartas_com")),
    IndexModel("agenda.apagavel", partialFilterExpression=_present("agenda.apagavel")),
)
_UNIQUE = {index.document["name"] for index in _RUNS if index.document.get("unique")}


async def _make_runs(server: Server) -> None:
    try:
        await server.runs.create_indexes(list(_RUNS))
    except DuplicateKeyError:
        await _part_twins(server)
        await server.runs.create_indexes(list(_RUNS))
    for side in (server.blocks, server.history, server.attachments):
        await side.create_index("run")
    await server.blocks.create_index("superado_em", expireAfterSeconds=SUPERSEDED_SECONDS)
    await server.pipelines.create_index("revisao")


async def _part_twins(server: Server) -> None:
    """Engines that did not know yet that the database was dropped may have created runs of the same id or key. The
    first keeps it. The others are kept too, for they were accepted: under an id of their own, or without the key."""
    for run_id, keys in await _twins(server, "correlation_id"):
        for key in keys:
            await server.runs.update_one({"_id": key}, {"$set": {"correlation_id": f"{run_id}-{key}"}})
    for _, keys in await _twins(server, "chave_idempotencia"):
        await server.runs.update_many({"_id": {"$in": keys}}, {"$unset": {"chave_idempotencia": True}})


async def _twins(server: Server, field: str) -> list[tuple[str, list[str]]]:
    """What several runs have in that field, and all of them but the first."""
    stages: list[Document] = [
        {"$match": {field: {"$exists": True}}},
        {"$group": {"_id": f"${field}", "runs": {"$push": "$_id"}}},
        {"$match": {"runs.1": {"$exists": True}}},
    ]
    found = await server.runs.aggregate(stages, allowDiskUse=True)
    return [(one["_id"], sorted(one["runs"])[1:]) async for one in found]


MIGRATIONS = (Migration(1, "runs", _make_runs),)


async def prepare(server: Server) -> bool:
    """An empty database gets its indexes; one of another layout is refused, in words that say what to do. Returns
    whether one that had them has lost some: to make those may take long."""
    number = await _number(server)
    _refuse_newer(number or 0, server)
    if number is None:
        await migrate(server)
    elif number < len(MIGRATIONS):
        raise StoreError(
            f"the layout of MongoDB at {server.place} is {number}, and this program needs {len(MIGRATIONS)}: "
            "run `oraculo migrate`"
        )
    return not await _is_unique(server)


async def migrate(server: Server) -> list[str]:
    """Every migration may be applied again, so several may do this at once, and one that was cut short is repeated."""
    number = await _number(server) or 0
    _refuse_newer(number, server)
    if not await _is_unique(server):
        number = 0
    for migration in MIGRATIONS[number:]:
        await migration.step(server)
        await server.meta.update_one({"_id": "layout"}, {"$max": {"numero": migration.number}}, upsert=True)
    return [migration.label for migration in MIGRATIONS[number:]]


async def require_lately(server: Server) -> None:
    """Raises StoreUnavailable when the indexes are gone. Asks nothing when they were seen a moment ago."""
    now = time.monotonic()
    if now - server.laid_out_at >= TRUSTED_SECONDS:
        if not await _is_unique(server):
            raise _gone(server)
        server.laid_out_at = now


async def prove(server: Server) -> None:
    """That it is there, and can be written to."""
    if not await server.touch("layout") or not await _is_unique(server):
        raise _gone(server)


def _gone(server: Server) -> StoreUnavailable:
    return StoreUnavailable(
        f"the layout of MongoDB at {server.place} is gone, or an index of it, as after its database was dropped: "
        "commits wait until `oraculo migrate` was run or an engine was started"
    )


async def _is_unique(server: Server) -> bool:
    """Whether an id and a key are given once."""
    return (await server.runs.index_information()).keys() >= _UNIQUE


async def _number(server: Server) -> int | None:
    found = await server.meta.find_one({"_id": "layout"})
    return None if found is None else int(found["numero"])


def _refuse_newer(number: int, server: Server) -> None:
    if number > len(MIGRATIONS):
        raise StoreError(
            f"MongoDB at {server.place} was written by a newer ORÁCULO (its layout is {number}, this program knows "
            f"{len(MIGRATIONS)}): run that version, or give ORACULO_STORE_URL another database"
        )
