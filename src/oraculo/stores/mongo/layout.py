"""The collections' indexes and the layout's number: looked at when the store is opened, brought up to date by
`oraculo migrate`."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pymongo import ASCENDING, DESCENDING, IndexModel

from oraculo.errors import StoreError
from oraculo.stores.mongo.server import Server

# A block that a newer one replaced stays for readers who have just found its name.
SUPERSEDED_SECONDS = 60


class Migration(NamedTuple):
    number: int
    name: str
    apply: Callable[[Server], Awaitable[None]]

    @property
    def label(self) -> str:
        return f"{self.number:04} {self.name}"


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


async def _make_runs(server: Server) -> None:
    await server.runs.create_indexes(list(_RUNS))
    for side in (server.blocks, server.history, server.attachments):
        await side.create_index("run")
    await server.blocks.create_index("superado_em", expireAfterSeconds=SUPERSEDED_SECONDS)
    await server.pipelines.create_index("revisao")


MIGRATIONS = (Migration(1, "runs", _make_runs),)


async def prepare(server: Server) -> None:
    """An empty database gets its indexes; one of another layout is refused, in words that say what to do."""
    number = await _number(server)
    if number is None:
        await migrate(server)
        return
    _refuse_newer(number, server)
    if number < len(MIGRATIONS):
        raise StoreError(
            f"the layout of MongoDB at {server.place} is {number}, and this program needs {len(MIGRATIONS)}: "
            "run `oraculo migrate`"
        )


async def migrate(server: Server) -> list[str]:
    """Every migration may be applied again, so several may do this at once, and one that was cut short is repeated."""
    number = await _number(server) or 0
    _refuse_newer(number, server)
    for migration in MIGRATIONS[number:]:
        await migration.apply(server)
        await server.meta.update_one({"_id": "layout"}, {"$max": {"numero": migration.number}}, upsert=True)
    return [migration.label for migration in MIGRATIONS[number:]]


async def _number(server: Server) -> int | None:
    found = await server.meta.find_one({"_id": "layout"})
    return None if found is None else int(found["numero"])


def _refuse_newer(number: int, server: Server) -> None:
    if number > len(MIGRATIONS):
        raise StoreError(
            f"MongoDB at {server.place} was written by a newer ORÁCULO (its layout is {number}, this program knows "
            f"{len(MIGRATIONS)}): run that version, or give ORACULO_STORE_URL another database"
        )
