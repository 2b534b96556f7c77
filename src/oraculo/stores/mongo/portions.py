"""What may be much is read and written in portions, each with a limit of its own: over a slow line all of it gets
through, and a server that is frozen is still found out in the time that one portion has."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import bson
from bson.raw_bson import RawBSONDocument
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError

from oraculo.core.chunks import slices
from oraculo.stores.mongo.faults import duplicates
from oraculo.stores.mongo.server import PORTION_BYTES, RAW, Collection, Document, Encoded, Server

Thing = TypeVar("Thing")
Found = TypeVar("Found", Document, RawBSONDocument)


def encoded(document: Mapping[str, Any]) -> RawBSONDocument:
    return RawBSONDocument(bson.encode(document), RAW)


def portions(things: Iterable[Thing], size_of: Callable[[Thing], int]) -> Iterator[tuple[list[Thing], int]]:
    """In their order, with the size of each portion."""
    for portion in slices(things, size_of, PORTION_BYTES):
        yield portion, sum(map(size_of, portion))


async def read_all(
    server: Server,
    collection: AsyncCollection[Found],
    field: str,
    values: Sequence[Any],
    wanted: Document | None = None,
) -> list[Found]:
    """The documents whose field has one of the values. How large they are is asked first: that is cheap, and so a
    server that does not answer is not waited for in proportion to them."""
    if not values:
        return []
    stages: list[Document] = [
        {"$match": {field: {"$in": values}}},
        {"$project": {"_id": 0, "valor": f"${field}", "bytes": {"$bsonSize": "$$ROOT"}}},
    ]
    with server.limit():
        sizes = [(one["valor"], one["bytes"]) async for one in await collection.aggregate(stages)]
    found: list[Found] = []
    for portion, size in portions(sizes, lambda one: one[1]):
        among = {field: {"$in": [value for value, _ in portion]}}
        with server.limit(size):  # they come in one answer
            found += [one async for one in collection.find(among, wanted, batch_size=len(portion) + 1)]
    return found


async def insert_missing(server: Server, collection: Collection, documents: Iterable[Encoded]) -> set[int]:
    """Inserts those that are not there. Returns the places of those that were."""
    refused: set[int] = set()
    done = 0
    raw = (one if isinstance(one, RawBSONDocument) else encoded(one) for one in documents)
    for portion, size in portions(raw, lambda one: len(one.raw)):
        with server.limit(size):
            try:
                await collection.insert_many(portion, ordered=False)
            except BulkWriteError as error:
                refused |= {done + place for place in duplicates(error)}
        done += len(portion)
    return refused
