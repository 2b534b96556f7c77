"""Large results that were put aside before a URL was set: they rest in the folder beside the store's file, which the
engine alone reads. Workers look for what a reference names where the URL says, so it is put there first."""

from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor

from oraculo.core.reference import Reference, run_folder
from oraculo.errors import ObjectLost, ObjectsUnavailable
from oraculo.ports.objects import Objects, get_result

_MOST_REMEMBERED = 10_000


class EarlierResults:
    def __init__(
        self, earlier: Objects, present: Objects, claim_fault: Callable[[], Awaitable[str | None]], threads: Executor
    ) -> None:
        self._earlier = earlier
        self._present = present
        self._claim_fault = claim_fault
        self._threads = threads
        self._shared: set[str] = set()  # keys: many commands may hand on the same result

    async def may_have(self, run_id: str) -> bool:
        """Of a folder that cannot be read now nobody knows; whoever then asks for a result is told why."""
        try:
            return await self._earlier.owner(run_folder(run_id)) is not None
        except ObjectsUnavailable:
            return True

    async def find(self, reference: Reference) -> bytes | None:
        try:
            return await get_result(self._earlier, reference, self._threads)
        except ObjectLost:
            return None

    async def share(self, run_id: str, references: Iterable[Reference]) -> None:
        """Those that are not here were put where the URL says."""
        for reference in references:
            if reference.key not in self._shared and (payload := await self.find(reference)) is not None:
                await self._put(run_id, reference.key, payload)

    async def _put(self, run_id: str, key: str, payload: bytes) -> None:
        if fault := await self._claim_fault():
            raise ObjectsUnavailable(fault)
        await self._present.put(run_id, key, payload)
        if len(self._shared) >= _MOST_REMEMBERED:
            self._shared.clear()
        self._shared.add(key)
