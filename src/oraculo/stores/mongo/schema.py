"""The indexes and the schema's number: looked at when the store is opened, brought up to date by `oraculo migrate`."""

import time

from pymongo import ASCENDING, DESCENDING, IndexModel

from oraculo.errors import StoreError, StoreUnavailable
from oraculo.stores.migrations import Migration
from oraculo.stores.mongo.server import CHECK_SECONDS, Collections, Server

TRUSTED_SECONDS = 1.0
CONFIRM_SECONDS = 2.5  # so that there is time left to ask why a write is not confirmed
_NUMBER = {"_id": "esquema"}

# `ordem` is in the order of creation. An index with a condition has a document for only as long as the condition holds.
_OF_RUNS = (
    IndexModel("chave_idempotencia", unique=True, sparse=True),
    IndexModel([("ordem", DESCENDING), ("busca", ASCENDING)]),  # searched without opening documents
    IndexModel([("status", ASCENDING), ("ordem", DESCENDING)]),
    IndexModel([("pipeline", ASCENDING), ("ordem", DESCENDING)]),
    IndexModel("interno.due_at", sparse=True),
    IndexModel("interno.ended_at", sparse=True),
)
_OF_TASKS = (
    IndexModel([("correlation_id", ASCENDING), ("numero", ASCENDING)]),
    IndexModel("interno.due_at", sparse=True),
    IndexModel([("ordem", ASCENDING), ("numero", ASCENDING)], partialFilterExpression={"interno.unsent": True}),
    IndexModel([("interno.via", ASCENDING), ("ordem", ASCENDING)], partialFilterExpression={"na_dlq": True}),
)
_OF_HISTORY = (IndexModel([("correlation_id", ASCENDING), ("seq", ASCENDING)], unique=True),)
_OF_INPUTS = (IndexModel([("correlation_id", ASCENDING), ("parte", ASCENDING)], unique=True),)


async def _make_indexes(db: Collections) -> None:
    await db.runs.create_indexes(list(_OF_RUNS))
    await db.tasks.create_indexes(list(_OF_TASKS))
    await db.history.create_indexes(list(_OF_HISTORY))
    await db.inputs.create_indexes(list(_OF_INPUTS))


MIGRATIONS = (Migration(1, "runs", _make_indexes),)


async def prepare(server: Server) -> None:
    """Give an empty database its indexes; raise StoreError, which says what to do, for one of another schema."""
    with server.call() as db:
        number = await _number(db, server.place)
    if number == 0:
        await migrate(server)
    elif number < len(MIGRATIONS):
        raise StoreError(
            f"the schema of MongoDB at {server.place} is {number}, and this program needs {len(MIGRATIONS)}: "
            "run `oraculo migrate`"
        )


async def migrate(server: Server) -> list[str]:
    """Return what was done. Several may do it at once, and one that was cut short is repeated."""
    with server.limited(None) as db:  # an index of a large collection takes its time
        number = await _number(db, server.place)
        for migration in MIGRATIONS[number:]:
            await migration.step(db)
            await db.meta.update_one(_NUMBER, {"$max": {"numero": migration.number}}, upsert=True)
    return [migration.label for migration in MIGRATIONS[number:]]


async def prove(server: Server) -> None:
    """Raise StoreUnavailable unless the schema is there and a majority of the replica set confirms a write."""
    with server.limited(CHECK_SECONDS):
        try:
            with server.limited(CONFIRM_SECONDS) as db:
                done = await db.meta.update_one(_NUMBER, {"$currentDate": {"verificado_em": True}})
        except StoreUnavailable as error:
            if not getattr(error.__cause__, "timeout", False):
                raise
            await server.version()  # the server answers: it waits for the others
            raise StoreUnavailable(
                f"MongoDB at {server.place}: a majority of its replica set does not confirm writes"
            ) from error
    if not done.matched_count:
        raise _gone(server)


async def require_lately(server: Server) -> None:
    """Raise StoreUnavailable when the schema is gone; once it was seen, do not look again for a second."""
    now = time.monotonic()
    if now - server.schema_seen_at >= TRUSTED_SECONDS:
        with server.call() as db:
            if await _number(db, server.place) == 0:
                raise _gone(server)
        server.schema_seen_at = now


def _gone(server: Server) -> StoreUnavailable:
    return StoreUnavailable(
        f"the schema of MongoDB at {server.place} is gone, as after its database was dropped: run `oraculo migrate`"
    )


async def _number(db: Collections, place: str) -> int:
    found = await db.meta.find_one(_NUMBER)
    number = 0 if found is None else int(found["numero"])
    if number > len(MIGRATIONS):
        raise StoreError(
            f"MongoDB at {place} was written by a newer ORÁCULO (its schema is {number}, this program knows "
            f"{len(MIGRATIONS)}): run that version, or give ORACULO_STORE_URL another database"
        )
    return number
