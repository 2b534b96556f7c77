"""Lists and searches of runs, newest first."""

import base64
import binascii
import re
import zlib

from oraculo.core.run import RunStatus
from oraculo.errors import InvalidInput
from oraculo.ports.browse import Page, RunQuery
from oraculo.stores.mongo.documents import BETWEEN, NOT_OF_HEADS, head_of
from oraculo.stores.mongo.server import Document, Server
from oraculo.stores.stored_words import census_of

_KEY = re.compile(r"[0-9a-f]{28}")
_SEARCHED = "_id_-1_busca_1"  # by its keys: only what is found is opened
_LONGEST_TEXT = 1_000  # longer than any id and name


async def runs(server: Server, query: RunQuery) -> Page:
    before = read_cursor(query.cursor)
    if query.text and (len(query.text) > _LONGEST_TEXT or BETWEEN in query.text):
        return Page([], None)
    found = server.runs.find(_where(query, before), NOT_OF_HEADS).sort("_id", -1).limit(query.limit + 1)
    if query.text:
        found = found.hint(_SEARCHED)
    documents = [run async for run in found]
    page = documents[: query.limit]
    more = len(documents) > query.limit and bool(page)
    return Page([head_of(run) for run in page], make_cursor(page[-1]["_id"]) if more else None)


def _where(query: RunQuery, before: str | None) -> Document:
    where: Document = {} if before is None else {"_id": {"$lt": before}}
    if query.statuses:
        where["status"] = {"$in": sorted(status.value for status in query.statuses)}
    if query.name is not None:
        where["pipeline"] = query.name
    if query.text:
        where["busca"] = {"$regex": _literally(query.text.casefold())}
    created = {"$gte": query.since, "$lt": query.until}
    if bounds := {comparison: moment for comparison, moment in created.items() if moment is not None}:
        where["origem.created_at"] = bounds
    return where


def _literally(text: str) -> str:
    return re.escape(text).replace("\0", "\\x00")


async def census(server: Server) -> dict[RunStatus, int]:
    counted = await server.runs.aggregate([{"$group": {"_id": "$status", "runs": {"$sum": 1}}}], hint="status_1__id_-1")
    return census_of([(one["_id"], one["runs"]) async for one in counted])


# -- cursors: opaque to the client, checked when they come back -----------------------------------------------------


def make_cursor(key: str) -> str:
    place = bytes.fromhex(key)
    return base64.urlsafe_b64encode(place + zlib.crc32(place).to_bytes(4, "big")).decode()


def read_cursor(cursor: str | None) -> str | None:
    if cursor is None:
        return None
    try:
        key = base64.b64decode(cursor, altchars=b"-_", validate=True)[:-4].hex()
    except (binascii.Error, ValueError):
        key = ""
    if not _KEY.fullmatch(key) or make_cursor(key) != cursor:
        raise InvalidInput.at("cursor", "is not one that a page of this list gave; leave it out to begin at the first")
    return key
