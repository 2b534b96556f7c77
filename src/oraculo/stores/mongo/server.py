"""The connection to MongoDB: how long a call may take, and when a write is safe."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from oraculo.errors import StoreError
from oraculo.stores.mongo.faults import duplicates, translated

Document = dict[str, Any]
Collection = AsyncCollection[Document]
Encoded = Document | RawBSONDocument

DATABASE = "oraculo"
OLDEST_MONGODB = (5, 0)
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
        self._call_seconds = call_seconds
        with translated(place):
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
    def limit(self) -> Iterator[None]:
        """All that is asked in here takes no longer, together, than one call may; errors become ours."""
        with translated(self.place), pymongo.timeout(self._call_seconds):
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

    async def close(self) -> None:
        await self._client.close()


async def insert_missing(collection: Collection, documents: Sequence[Encoded]) -> set[int]:
    """Inserts those that are not there. Returns the places of those that were."""
    if not documents:
        return set()
    try:
        await collection.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        return duplicates(error)
    return set()
