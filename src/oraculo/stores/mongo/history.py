"""A run's history: the newest entries are in the run's own document, the older ones in blocks of a fixed range.

An entry may be in both for a moment, and is the same in both: it moves only after it was committed."""

from collections.abc import Iterable, Sequence

from oraculo.core.history import HistoryEntry
from oraculo.stores.mongo.documents import decode_entries, entry_of
from oraculo.stores.mongo.portions import read_all
from oraculo.stores.mongo.server import Document, Server
from oraculo.stores.mongo.writes import HISTORY_BLOCK


async def read_history(server: Server, run_id: str, after: int, limit: int) -> Sequence[HistoryEntry]:
    wanted = {"historico": 1, "historico_anexos": 1, "estado.entries": 1}
    with server.limit():
        run = await server.runs.find_one({"correlation_id": run_id}, wanted)
    if run is None:
        return []
    seqs = range(after + 1, min(after + limit, run["estado"]["entries"]) + 1)
    entries = _inline(run)
    entries |= await _moved(server, run["_id"], (seq for seq in seqs if seq not in entries))
    missing = [seq for seq in seqs if seq not in entries]
    if missing:  # last of all: an attachment may be large, and soon most of it is in blocks
        entries |= await _attached(server, _overlapping(run, missing[0], missing[-1]))
    return [entry_of(entries[seq]) for seq in seqs if seq in entries]


async def entries_in_document(server: Server, run: Document) -> dict[int, Document]:
    """Those that are not in blocks yet, by `seq`; also of commits whose entries were too many for the document."""
    return _inline(run) | await _attached(server, run.get("historico_anexos", ()))


def _inline(run: Document) -> dict[int, Document]:
    return {entry["seq"]: entry for entry in run.get("historico", ())}


def _overlapping(run: Document, first: int, last: int) -> list[Document]:
    return [one for one in run.get("historico_anexos", ()) if one["de"] <= last and one["ate"] >= first]


async def _attached(server: Server, attachments: Iterable[Document]) -> dict[int, Document]:
    entries: list[Document] = []
    for attached in attachments:
        parts = await read_all(server, server.attachments, "_id", attached["anexo"])
        found = {part["_id"]: part["dados"] for part in parts}
        if len(found) == len(attached["anexo"]):  # else they have moved since the document was read
            entries += decode_entries(b"".join(found[name] for name in attached["anexo"]))
    return {entry["seq"]: entry for entry in entries}


async def _moved(server: Server, run_key: str, seqs: Iterable[int]) -> dict[int, Document]:
    names = sorted({_block_id(run_key, (seq - 1) // HISTORY_BLOCK) for seq in seqs})
    blocks = await read_all(server, server.history, "_id", names)
    return {entry["seq"]: entry for block in blocks for entry in block["entradas"]}


def full_blocks(run_key: str, entries: dict[int, Document]) -> list[Document]:
    """In order. A range that lacks entries was moved before, or is not full yet."""
    blocks = []
    for number in sorted({(seq - 1) // HISTORY_BLOCK for seq in entries}):
        seqs = range(number * HISTORY_BLOCK + 1, (number + 1) * HISTORY_BLOCK + 1)
        if all(seq in entries for seq in seqs):
            moved = [entries[seq] for seq in seqs]
            blocks.append({"_id": _block_id(run_key, number), "run": run_key, "entradas": moved})
    return blocks


def _block_id(run_key: str, number: int) -> str:
    return f"{run_key}-{number:08}"
