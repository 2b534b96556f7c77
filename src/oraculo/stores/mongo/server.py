"""The connection to MongoDB: its collections, the time that a call has, and transactions."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar, cast

import bson
import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.cursor import AsyncCursor
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.server_type import SERVER_TYPE
from pymongo.write_concern import WriteConcern

from oraculo.errors import StoreError, StoreUnavailable
from oraculo.stores.mongo.faults import place_of, refuse_unencoded, translated

Document = dict[str, Any]
Collection = AsyncCollection[Document]
Session = AsyncClientSession
Result = TypeVar("Result")

DATABASE = "oraculo"
TASKS = "orquestracoes_tarefas"
OLDEST_MONGODB = (5, 0)
MOST_IN_A_BATCH = 100_000  # documents; the server stops at 16 MB. Without a number its first batch has 101.
CHECK_SECONDS = 3.5  # less than `doctor` and `/health/ready` wait, so that they hear the reason
BYTES_IN_A_CALL = 1024 * 1024  # a larger transaction has the time of one call for each of these
TRANSACTION_SECONDS = 50.0  # the server ends a transaction after 60
# Dates are for other applications and may be out of Python's range, so pymongo leaves them as numbers here.
OPTIONS: CodecOptions[Document] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
ABANDONED_SECONDS = 2.0  # that a transaction which is in another's way does nothing
_APP = "oraculo"
_DURABLE = WriteConcern(w="majority", j=True)
_SNAPSHOT = ReadConcern("snapshot")
_ADVICE = "start it with `mongod --replSet rs0`, then run `rs.initiate()` in `mongosh` once"


class Collections:
    """The collections of one database.

    Whatever the URL says, reads go to the primary and return what a majority holds, and a write is confirmed once a
    majority has it in its journal: nothing that was read or confirmed is rolled back.
    """

    def __init__(self, database: AsyncDatabase[Document]) -> None:
        self.runs = database["orquestracoes"]
        self.inputs = database["orquestracoes_entradas"]
        self.tasks = database[TASKS]
        self.history = database["orquestracoes_historico"]
        self.pipelines = database["oraculo_pipelines"]
        self.engines = database["oraculo_motores"]
        self.facts = database["oraculo_fatos"]
        self.meta = database["oraculo_meta"]

    @property
    def parts_of_runs(self) -> tuple[Collection, ...]:
        """The collections whose documents belong to the run in their `correlation_id`."""
        return self.inputs, self.tasks, self.history


def find(
    collection: Collection, where: Document, fields: Document | None = None, session: Session | None = None
) -> AsyncCursor[Document]:
    """Look for documents, which come in as few answers as the server can make of them."""
    return collection.find(where, fields, session=session, batch_size=MOST_IN_A_BATCH)


class Server:
    """A MongoDB server, open or closed. Every call has its time, and raises our errors alone."""

    def __init__(self, url: str, *, call_seconds: float, connect_seconds: float) -> None:
        self.place = place_of(url)
        self.schema_seen_at = float("-inf")  # on the monotonic clock
        self._url = url
        self._call_seconds = call_seconds
        self._connect_seconds = connect_seconds
        self._client: AsyncMongoClient[Document] | None = None
        self._collections: Collections | None = None

    # -- opening and closing ------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and raise StoreError unless the server can keep runs."""
        with translated(self.place):
            refuse_unencoded(self._url)
            self._client = AsyncMongoClient(
                self._url,
                appname=_APP,
                connectTimeoutMS=int(self._connect_seconds * 1000),
                serverSelectionTimeoutMS=int(self._connect_seconds * 1000),
            )
            self._collections = Collections(self._database)
        try:
            await self._refuse_unfit()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        client = self._client
        self._client = self._collections = None
        if client is not None:
            await client.close()

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def _refuse_unfit(self) -> None:
        try:
            await self.version()
            hello = await self._command("hello")
        except StoreUnavailable as error:
            if not self._awaits_initiation():
                raise
            raise StoreUnavailable(f"MongoDB at {self.place} has no replica set that works: {_ADVICE}") from error
        if "setName" not in hello and hello.get("msg") != "isdbgrid":  # which is what a router of shards says
            raise StoreError(f"MongoDB at {self.place} stands alone, and transactions need a replica set: {_ADVICE}")

    def _awaits_initiation(self) -> bool:
        """Return True when the server runs, and is no member of the set that the URL or its command line names."""
        servers = self._opened.topology_description.server_descriptions().values()
        return not servers or any(server.server_type == SERVER_TYPE.RSGhost for server in servers)

    # -- calls --------------------------------------------------------------------------------------------------

    @property
    def _opened(self) -> AsyncMongoClient[Document]:
        assert self._client is not None, "a call is made on an open server"
        return self._client

    @property
    def _database(self) -> AsyncDatabase[Document]:
        return self._opened.get_default_database(DATABASE).with_options(
            codec_options=OPTIONS,
            read_preference=ReadPreference.PRIMARY,
            read_concern=ReadConcern("majority"),
            write_concern=_DURABLE,
        )

    def call(self) -> AbstractContextManager[Collections]:
        """Give the collections, for what takes no longer than one call may."""
        return self.limited(self._call_seconds)

    @contextmanager
    def limited(self, seconds: float | None) -> Iterator[Collections]:
        """Give the collections, for what takes at most so long. None: there is no limit."""
        if self._collections is None:
            raise StoreError(
                f"the store MongoDB at {self.place} is not open: call start() first, and nothing after close()"
            )
        with translated(self.place), pymongo.timeout(seconds):
            yield self._collections

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[tuple[Collections, Session]]:
        """Give the collections, and a session in which all that `each` finds is of one moment."""
        with self.limited(None) as db:
            async with self._opened.start_session(snapshot=True) as session:
                yield db, session

    async def each(
        self, collection: Collection, where: Document, session: Session, *order: str
    ) -> AsyncIterator[Document]:
        """Yield what is found. Each answer of the server has the time of a call, for a run may be large and its line
        slow; an answer is at most 16 MB."""
        answers = collection.find_raw_batches(where, session=session, batch_size=MOST_IN_A_BATCH)
        answers = answers.sort(list(order)) if order else answers
        while True:
            with self.call():
                answer = await anext(answers, None)
            if answer is None:
                return
            for document in bson.decode_all(cast("bytes", answer), OPTIONS):
                yield document

    async def transaction(self, work: Callable[[Collections, Session], Awaitable[Result]], *, size: int = 0) -> Result:
        """Return what `work` returned, once all that it wrote in the session is committed.

        The driver runs `work` again when another transaction was in its way, and repeats a commit whose outcome it did
        not hear, for as long as there is time. After that the outcome is unknown, which is StoreUnavailable: the caller
        tries again, and the versions of the runs say what was written.
        """
        seconds = min(self._call_seconds * (1 + size / BYTES_IN_A_CALL), max(self._call_seconds, TRANSACTION_SECONDS))
        began = time.monotonic()
        with self.limited(seconds) as db:
            async with self._opened.start_session() as session:

                async def attempt(_: Session) -> Result:
                    if time.monotonic() - began > ABANDONED_SECONDS:
                        await self.end_abandoned()
                    return await work(db, session)

                return await session.with_transaction(
                    attempt,
                    read_concern=_SNAPSHOT,
                    write_concern=_DURABLE,
                    read_preference=ReadPreference.PRIMARY,
                )

    async def end_abandoned(self) -> None:
        """End transactions of processes that were killed, or stand still: the server keeps their runs locked for 60 s.

        A process that is alive after all does its transaction again.
        """
        idle = {
            "type": "idleSession",
            "appName": _APP,
            "transaction.timeInactiveMicros": {"$gt": ABANDONED_SECONDS * 1e6},
        }
        stages: list[Document] = [
            {"$currentOp": {"idleSessions": True}},
            {"$match": idle},
            {"$project": {"lsid.id": 1}},
        ]
        with suppress(OperationFailure):  # a hosted server may not allow to look
            found = await (await self._opened.admin.aggregate(stages)).to_list()
            if found:
                await self._opened.admin.command("killSessions", [one["lsid"] for one in found])

    # -- the server itself --------------------------------------------------------------------------------------

    async def _command(self, name: str) -> Document:
        with self.limited(CHECK_SECONDS):
            return await self._database.command(name, codec_options=OPTIONS)

    async def version(self) -> str:
        """Return the server's version; raise StoreError when it is too old."""
        build = await self._command("buildInfo")
        if tuple(build["versionArray"][:2]) < OLDEST_MONGODB:
            oldest = ".".join(map(str, OLDEST_MONGODB))
            raise StoreError(f"MongoDB at {self.place} is {build['version']}; {oldest} or newer is needed")
        return str(build["version"])

    async def clock(self) -> float | None:
        """Return the server's time in seconds since 1970."""
        now = (await self._command("hello")).get("localTime")
        return None if now is None else int(now) / 1000
