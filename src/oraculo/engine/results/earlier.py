"""Large results from before an object store was set: they rest in the folder beside the store's file.

Only the engine reads that folder. Workers follow a reference to the object store, so a result is copied there first.
"""

from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor

from oraculo.core.result_reference import SHARDS, ResultReference, run_folder
from oraculo.errors import ObjectLost, ObjectsError, ObjectsUnavailable
from oraculo.ports.objects import Objects, get_result

_MOST_REMEMBERED = 10_000


class EarlierResults:
    """The results in the folder, and the copies of them in the object store."""

    def __init__(
        self, earlier: Objects, present: Objects, claim_fault: Callable[[], Awaitable[str | None]], threads: Executor
    ) -> None:
        self._earlier = earlier
        self._present = present
        self._claim_fault = claim_fault
        self._threads = threads
        self._folders: frozenset[str] | None = None  # of runs; None: not read yet
        self._shared: set[str] = set()  # keys of copied results, which many commands may hand on
        self.trouble: str | None = None  # why the folder could not be read

    async def look(self) -> None:
        """Read which runs have results in the folder. No other run will get any."""
        try:
            found = [folder.name for shard in SHARDS for folder in await self._earlier.folders(shard)]
        except ObjectsError as error:
            self.trouble = f"what rests there from before cannot be read: {error}"
        else:
            self._folders, self.trouble = frozenset(found), None

    def lacks(self, run_id: str, reference: ResultReference) -> bool:
        """Return whether the folder surely has nothing to give for a reference."""
        is_elsewhere = self._folders is not None and run_folder(run_id) not in self._folders
        return is_elsewhere or reference.key in self._shared

    async def find(self, reference: ResultReference) -> bytes | None:
        """Return a result of the folder, or None."""
        try:
            return await get_result(self._earlier, reference, self._threads)
        except ObjectLost:
            return None

    async def share(self, run_id: str, references: Iterable[ResultReference]) -> None:
        """Copy results to the object store that rest in the folder."""
        if self._folders is None:
            await self.look()
        for reference in references:
            if not self.lacks(run_id, reference):
                await self._share(run_id, reference)

    async def _share(self, run_id: str, reference: ResultReference) -> None:
        try:
            payload = await self.find(reference)
        except ObjectsUnavailable:
            if not await self._is_present(reference):
                raise
            payload = None
        if payload is not None:
            if fault := await self._claim_fault():
                raise ObjectsUnavailable(fault)
            await self._present.put(run_id, reference.key, payload)
        self._note_shared(reference.key)

    async def _is_present(self, reference: ResultReference) -> bool:
        try:
            await self._present.get(reference.key)
        except ObjectLost:
            return False
        return True

    def _note_shared(self, key: str) -> None:
        if len(self._shared) >= _MOST_REMEMBERED:
            self._shared.clear()
        self._shared.add(key)
