"""A store that is open for as long as a test needs it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from oraculo.ports.store import Store

AnyStore = TypeVar("AnyStore", bound=Store)


@asynccontextmanager
async def started(store: AnyStore) -> AsyncIterator[AnyStore]:
    try:
        await store.start()
        yield store
    finally:
        await store.close()
