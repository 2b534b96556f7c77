"""The store's face: what each call asks of the server, and how long it may take."""

import asyncio
import secrets
from collections.abc import Sequence

from bson.objectid import ObjectId

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, RunStatus, Task
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.browse import Page, RunQuery
from oraculo.ports.store import Committed, Created, Creation, CreationOutcome, Due, Snapshot, Unsent
from oraculo.stores.copies import unchanged_among
from oraculo.stores.mongo import layout, listing, reading
from oraculo.stores.mongo.changes import ChangeWriter
from oraculo.stores.mongo.creations import Creations
from oraculo.stores.mongo.faults import place_of, translated
from oraculo.stores.mongo.forgetting import forget_sent
from oraculo.stores.mongo.history import read_history
from oraculo.stores.mongo.housekeeping import Housekeeping
from oraculo.stores.mongo.pipelines import Pipelines
from oraculo.stores.mongo.server import Server
from oraculo.stores.mongo.writes import Birth, Update

CALL_SECONDS = 10.0
CONNECT_SECONDS = 5.0


class MongoStore:
    """Keeps the contract of `ports.store.Storage` without transactions, so that a server that stands alone will do."""

    name = "mongodb"

    def __init__(
        self, url: str, *, call_seconds: float = CALL_SECONDS, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        self._url = url
        self._place = place_of(url)
        self._call_seconds = call_seconds
        self._connect_seconds = connect_seconds
        self._server: Server | None = None
        self._keeper: Housekeeping | None = None
        self._writing: set[asyncio.Task[Committed]] = set()

    # -- opening and closing ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._server is not None:
            return
        server = await self._connect()
        try:
            with server.limit():
                has_lost_indexes = await layout.prepare(server)
            if has_lost_indexes:
                with translated(self._place):  # that of a large collection takes its time
                    await layout.migrate(server)
            with server.limit():
                await Housekeeping(server).settle_old()
        except BaseException:
            await server.close()
            raise
        self._open(server)

    async def migrate(self) -> Sequence[str]:
        if self._server is not None:
            with translated(self._place):
                return await layout.migrate(self._server)
        server = await self._connect()
        try:
            with translated(self._place):  # an index of a large collection takes its time
                done = await layout.migrate(server)
        except BaseException:
            await server.close()
            raise
        self._open(server)
        return done

    async def _connect(self) -> Server:
        server = Server(self._url, self._place, self._call_seconds, self._connect_seconds)
        try:
            with server.short_limit():
                await server.version()
        except BaseException:
            await server.close()
            raise
        return server

    def _open(self, server: Server) -> None:
        self._server, self._keeper = server, Housekeeping(server)

    async def close(self) -> None:
        if self._writing:
            await asyncio.wait(self._writing)
        server, keeper = self._server, self._keeper
        self._server = self._keeper = None
        if keeper is not None:
            await keeper.finish()
        if server is not None:
            await server.close()

    async def check(self) -> str:
        try:
            server = self._opened
            with server.short_limit():
                version = await server.version()
                await layout.prove(server)
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error
        return f"MongoDB {version}"

    @property
    def _opened(self) -> Server:
        if self._server is None:
            raise StoreError(
                f"the store MongoDB at {self._place} is not open: call start() first, and nothing after close()"
            )
        return self._server

    @property
    def _housekeeping(self) -> Housekeeping:
        assert self._keeper is not None, "it is there for as long as the server is"
        return self._keeper

    # -- commits ------------------------------------------------------------------------------------------------

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        server, keeper = self._opened, self._housekeeping
        commit = ObjectId()
        with translated(self._place):  # documents are built before the first await: the run may change after it
            births = [Birth(creation, commit) for creation in creations]
            updates = [Update(change, commit) for change in changes]
        writing = asyncio.create_task(_write(server, keeper, births, updates))
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        return await asyncio.shield(writing)  # a caller who gives up does not stop it

    def _written(self, writing: asyncio.Task[Committed]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            writing.exception()  # nobody may be left to hear of it

    # -- what the engine reads ----------------------------------------------------------------------------------

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        server = self._opened
        with server.limit():
            return await reading.created_with(server, idempotency_key, fingerprint)

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        server = self._opened
        with translated(self._place):
            return await reading.load(server, run_ids)

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        server = self._opened
        with server.limit():
            return await reading.heads(server, run_ids)

    async def task(self, run_id: str, number: int) -> Task | None:
        server = self._opened
        with server.limit():
            return await reading.steadily(server, lambda: reading.one_task(server, run_id, number))

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        return unchanged_among(copies, await self.heads([copy.id for copy in copies]))

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        server = self._opened
        with server.limit():
            return await reading.steadily(server, lambda: reading.due(server, now, limit))

    async def next_due(self) -> float | None:
        server = self._opened
        with server.limit():
            return await reading.next_due(server)

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        server = self._opened
        with server.limit():
            return await reading.steadily(server, lambda: reading.unsent(server, limit, after))

    async def brokers_in_use(self) -> Sequence[str | None]:
        server = self._opened
        with server.limit():
            return await reading.brokers_in_use(server)

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        server = self._opened
        with server.limit():
            return await reading.held_by(server, via, limit, after, dead_letters=dead_letters)

    async def forget_sent(self) -> int:
        with translated(self._place):
            return await forget_sent(self._opened, self._housekeeping)

    # -- what people read ---------------------------------------------------------------------------------------

    async def runs(self, query: RunQuery) -> Page:
        server = self._opened
        with server.limit():
            return await listing.runs(server, query)

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        server = self._opened
        with translated(self._place):
            return await read_history(server, run_id, after, limit)

    async def census(self) -> dict[RunStatus, int]:
        server = self._opened
        with server.limit():
            return await listing.census(server)

    # -- retention, pipelines, engines --------------------------------------------------------------------------

    async def prune(self, ended_before: float, limit: int) -> int:
        _ = self._opened
        return await self._housekeeping.prune(ended_before, limit)

    async def pipelines(self) -> dict[str, bytes]:
        server = self._opened
        with server.limit():
            return await Pipelines(server).all()

    async def pipelines_mark(self) -> str:
        server = self._opened
        with server.limit():
            return await Pipelines(server).mark()

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        server = self._opened
        with server.limit():
            await Pipelines(server).put(name, definition, now)

    async def delete_pipeline(self, name: str) -> bool:
        server = self._opened
        with server.limit():
            return await Pipelines(server).delete(name)

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        engines = self._opened.engines
        with self._opened.limit():
            await engines.update_one({"_id": engine}, {"$set": {"visto_em": now}}, upsert=True)
            noted_before_it_was_set_back = {"visto_em": {"$gt": now + ttl}}
            await engines.delete_many({"$or": [{"visto_em": {"$lt": now - ttl}}, noted_before_it_was_set_back]})
            return [one["_id"] async for one in engines.find().sort("_id")]

    async def depart(self, engine: str) -> None:
        with self._opened.limit():
            await self._opened.engines.delete_one({"_id": engine})

    async def engines(self, since: float) -> Sequence[str]:
        with self._opened.limit():
            return [one["_id"] async for one in self._opened.engines.find({"visto_em": {"$gte": since}}).sort("_id")]

    async def clock(self) -> float | None:
        with self._opened.limit():
            return await self._opened.clock()

    async def installation(self) -> str:
        meta, wanted = self._opened.meta, {"_id": "instalacao"}
        with self._opened.limit():
            while (found := await meta.find_one(wanted)) is None:
                await meta.update_one(wanted, {"$setOnInsert": {"nome": secrets.token_hex(16)}}, upsert=True)
        return str(found["nome"])

    async def note(self, fact: str) -> None:
        wanted = {"_id": f"fato:{fact}"}
        with self._opened.limit():
            await self._opened.meta.update_one(wanted, {"$setOnInsert": wanted}, upsert=True)

    async def noted(self, fact: str) -> bool:
        with self._opened.limit():
            return await self._opened.meta.find_one({"_id": f"fato:{fact}"}) is not None


async def _write(server: Server, keeper: Housekeeping, births: Sequence[Birth], updates: Sequence[Update]) -> Committed:
    with translated(server.place):
        created: Sequence[Created] = ()
        conflicts: frozenset[str] = frozenset()
        if births:
            with server.limit():
                await layout.require_lately(server)
            created = await Creations(server, keeper, births).write()
        if updates:
            conflicts = await ChangeWriter(server, keeper).write(updates)
    for birth, outcome in zip(births, created, strict=True):
        if outcome.outcome is CreationOutcome.CREATED:
            birth.changes.run.head.version = 1
    for update in updates:
        if update.run_id not in conflicts:
            update.changes.run.head.version = update.version
    return Committed(created, conflicts)
