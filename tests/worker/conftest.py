from collections.abc import AsyncIterator

import pytest

from .stage import Stage, WatchedBroker


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    broker = WatchedBroker()
    await broker.start()
    yield Stage(broker)
    await broker.close()
