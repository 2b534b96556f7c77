"""Claims a result store, and deletes large results whose runs are no longer in the store.

The deletion is slow: one of 256 shards at a time, and only by the engine that comes first for that shard. A folder of
the last hour is left alone, because its run may be created again under the same id.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from itertools import cycle, islice

from oraculo.core.chunks import pages
from oraculo.core.result_reference import CLAIM, SHARDS, run_folder
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.cluster.store_clock import surely_past
from oraculo.errors import Fault, InvalidSettings, ObjectLost, ObjectsError, ObjectsUnavailable
from oraculo.ports.clock import Clock
from oraculo.ports.objects import Objects
from oraculo.ports.readable import readable
from oraculo.ports.store import Storage
from oraculo.ports.telemetry import LoopFailed, Telemetry

_MINUTE = 60.0
EVERY = _MINUTE  # seconds between two shards; all of them take a little over four hours
MIN_AGE = 3600.0
_TOGETHER = 50
_CLAIM_PATIENCE = 5.0


async def claim_fault(objects: Objects | None, store: Storage) -> str | None:
    """Claim the object store for this installation. Return why it may not be used, or None.

    Another installation would delete what this one puts there, because its store knows nothing of these runs. The claim
    is remembered. At a later start the folder may not be mounted yet, and results put into the empty place would be
    hidden later.
    """
    if objects is None:
        return None
    installation, claimed = await store.installation(), _claimed(objects)
    was_claimed = claimed is not None and await store.noted(claimed)
    if await objects.claim(installation, was_claimed=was_claimed) == installation:
        if claimed is not None and not was_claimed:
            await store.note(claimed)
        return None
    return (
        "another installation keeps its large results there: give each a place of its own, as one more folder in the "
        f"URL; or delete the file '{CLAIM}' there when the other is gone for good"
    )


async def seen_fault(objects: Objects, store: Storage) -> str | None:
    """Return like `claim_fault`, but claim nothing.

    Raise ObjectsUnavailable for a folder that this installation had and that is not there.
    """
    try:
        is_had = bool(await objects.get(CLAIM))
    except ObjectLost:
        return None
    except ObjectsUnavailable:
        claimed = _claimed(objects)
        if claimed is not None and await store.noted(claimed):
            raise
        return None
    return await claim_fault(objects, store) if is_had else None


def _claimed(objects: Objects) -> str | None:
    """Return the fact to remember, a hash, because a place may have any name."""
    place = objects.shared_place
    return None if place is None else f"claimed: {sha256(place.encode(errors='surrogateescape')).hexdigest()}"


async def claim(objects: Objects, store: Storage, telemetry: Telemetry) -> None:
    """Claim the object store at a start. Raise InvalidSettings when it is another installation's.

    One that is away is claimed before the first write or deletion there.
    """
    try:
        async with asyncio.timeout(_CLAIM_PATIENCE):
            fault = await claim_fault(objects, store)
    except (ObjectsError, TimeoutError) as error:
        telemetry.emit(LoopFailed("objects", str(error) or f"no answer in {_CLAIM_PATIENCE:g} s"))
        return
    if fault:
        raise InvalidSettings(Fault("ORACULO_OBJECTS_URL", fault))


class ResultCleanUp:
    """The loop that deletes folders of large results."""

    def __init__(self, objects: Objects, store: Storage, peers: Peers, clock: Clock) -> None:
        self._objects = objects
        self._store = store
        self._peers = peers
        self._clock = clock
        # The start depends on the time, so that engines that live for an hour come to every shard, too. The iterator is
        # kept here, so that a shard that fails is not tried again before the next.
        self._shards = islice(cycle(SHARDS), int(clock.now() // _MINUTE) % len(SHARDS), None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            shard = next(self._shards)
            if self._peers.rank(shard) == 0:
                await self.tidy(shard)

    async def tidy(self, shard: str) -> int:
        """Delete the old folders of a shard, and return how many.

        Raise ObjectsError when the object store is another installation's.
        """
        if fault := await claim_fault(self._objects, self._store):
            raise ObjectsError(fault)
        before = await surely_past(self._store, self._clock, MIN_AGE)
        old = [folder.name for folder in await self._objects.folders(shard) if folder.written_at < before]
        deleted = 0
        for some in pages(old, _TOGETHER):
            for folder in await self._nobodys(some):
                deleted += await self._objects.delete(folder, before)
        return deleted

    async def _nobodys(self, folders: Sequence[str]) -> list[str]:
        """Return the folders whose runs are gone.

        A folder that does not say whose it is, or contradicts its name, is not ours to delete.
        """
        owners = {folder: owner for folder in folders if (owner := await self._objects.owner(folder)) is not None}
        sound = {folder: owner for folder, owner in owners.items() if run_folder(owner) == folder}
        known, unreadable = await readable(self._store.heads, list(sound.values())) if sound else ({}, {})
        return [folder for folder, owner in sound.items() if owner not in known and owner not in unreadable]
