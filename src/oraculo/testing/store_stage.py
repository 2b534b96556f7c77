"""The base of the store suite: how its tests get their stores."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from oraculo.ports.store import Storage


class StoreStage:
    """Stores for the tests of one adapter, which implements `make_store`."""

    async def make_store(self) -> Storage:
        """Return a started store on an empty place of this test's own. A second one shares its data."""
        raise NotImplementedError

    async def reopen(self, store: Storage) -> Storage:
        """Close the store, and return another, started, on the same data."""
        await store.close()
        return await self.make_store()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Storage]:
        store = await self.make_store()
        try:
            yield store
        finally:
            await store.close()
