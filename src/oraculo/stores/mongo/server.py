"""The connection to MongoDB: how long a call may take, and when a write is safe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import WriteError
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from oraculo.errors import StoreError, StoreUnavailable
from oraculo.stores.mongo.faults import refuse_unencoded, translated

Document = dict[str, Any]
Collection = AsyncCollection[Document]
Encoded = Document | RawBSONDocument

DATABASE = "oraculo"
OLDEST_MONGODB = (5, 0)
PORTION_BYTES = 1024 * 1024  # go over the slowest line that will do in the time that one call has
CHECK_SECONDS = 3.5  # less than `doctor` and `/health/ready` wait, so that they hear the reason
# Dates are for others to read: ours stay numbers, so that none is out of Python's range.
OPTIONS: CodecOptions[Document] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
RAW: CodecOptions[RawBSONDocument] = CodecOptions(
    document_class=RawBSONDocument, datetime_conversion=DatetimeConversion.DATETIME_MS
)


class Server:
    """Every collection is read from the primary, and a write is confirmed when a majority has it in its journal,
    whatever the URL says: what was confirmed is never lost."""

    def __init__(self, url: str, place: str, call_seconds: float, connect_seconds: float) -> None:
        self.place = place
        self.laid_out_at = float("-inf")  # when the indexes were last seen, on the monotonic clock
        self._call_seconds = call_seconds
        with translated(place):
            refuse_unencoded(url)
            self._client: AsyncMongoClient[Document] = AsyncMongoClient(
                url,
                appname="oraculo",
                connectTimeoutMS=int(connect_seconds * 1000),
                serverSelectionTimeoutMS=int(connect_seconds * 1000),
            )
            self._database = self._client.get_default_database(DATABASE).with_options(
                codec_options=OPTIONS,
                read_preference=ReadPreference.PRIMARY,
                write_concern=WriteConcern(w="majority", j=True),
            )
        self.runs = self._database["orquestracoes"]
        self.blocks = self._database["orquestracoes_blocos"]
        self.history = self._database["orquestracoes_historico"]
        self.attachments = self._database["orquestracoes_anexos"]
        self.doubtful = self._database["orquestracoes_duvidosas"]
        self.pipelines = self._database["oraculo_pipelines"]
        self.engines = self._database["oraculo_motores"]
        self.meta = self._database["oraculo_meta"]

    @property
    def raw_blocks(self) -> AsyncCollection[RawBSONDocument]:
        return self.blocks.with_options(codec_options=RAW)

    @contextmanager
    def limit(self, size: int = 0) -> Iterator[None]:
        """All that is asked in here takes no longer, together, than one call may, or in proportion when it is of more
        bytes than a portion; errors become ours. One inside another does not put its end off."""
        with translated(self.place), pymongo.timeout(self._call_seconds * max(1.0, size / PORTION_BYTES)):
            yield

    @contextmanager
    def short_limit(self) -> Iterator[None]:
        """For what somebody asks who wants to know how it is."""
        with self.limit(), pymongo.timeout(CHECK_SECONDS):
            yield

    async def version(self) -> str:
        """Raises StoreError when it is too old."""
        told = await self._database.command("buildInfo")
        if tuple(told["versionArray"][:2]) < OLDEST_MONGODB:
            oldest = ".".join(map(str, OLDEST_MONGODB))
            raise StoreError(
                f"MongoDB at {self.place} is {told['version']}, which is too old: {oldest} or newer is needed"
            )
        return str(told["version"])

    async def clock(self) -> float | None:
        told = (await self._database.command("hello", codec_options=OPTIONS)).get("localTime")
        return None if told is None else int(told) / 1000

    async def touch(self, name: str) -> bool:
        """Notes the time in a document of `meta`. False when it is not there. The server stops waiting for the others
        of its set before we stop waiting for it, and so can say that it is they who are missing."""
        change = {"q": {"_id": name}, "u": {"$currentDate": {"verificado_em": True}}}
        confirmed = {"w": "majority", "j": True, "wtimeout": int(CHECK_SECONDS * 1000 * 2 / 3)}
        told = await self._database.command("update", self.meta.name, updates=[change], writeConcern=confirmed)
        for fault in told.get("writeErrors", ()):
            raise WriteError(fault["errmsg"], fault["code"])
        if fault := told.get("writeConcernError"):
            raise StoreUnavailable(
                f"MongoDB at {self.place}: a majority of its replica set does not confirm writes: {fault.get('errmsg')}"
            )
        return bool(told["n"])

    async def close(self) -> None:
        await self._client.close()
