"""What the tests of the Redis store share.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses: `url = stage.url`.
"""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import redis

from oraculo.core.run import RunStatus
from oraculo.errors import StoreUnavailable
from oraculo.ports.browse import RunQuery
from oraculo.stores.redis import RedisStore
from oraculo.testing.store_runs import NOW, ids_of, load, unsent_pages
from tests.servers.fleet import Fleet
from tests.servers.process import Server
from tests.stores.started import started

PROMPTLY = 4.0  # on a busy machine; the time limits of the stores that are tested so are under a second


@pytest.fixture
def plain(fleet: Fleet) -> Iterator[Any]:
    """A client that knows nothing of ORÁCULO."""
    with redis.Redis.from_url(fleet.url("redis")) as client:
        yield client


@pytest.fixture
def namespace(plain: Any) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    if keys := list(plain.scan_iter(f"{name}:*", count=10_000)):
        plain.unlink(*keys)


@pytest.fixture
def url(fleet: Fleet, namespace: str) -> str:
    return f"{fleet.url('redis')}?namespace={namespace}"


@pytest.fixture
def breakable(fleet: Fleet) -> Iterator[Server]:
    """One that may be killed, frozen, filled or flushed. It keeps what it confirmed."""
    found = fleet.breakable("redis")
    with redis.Redis.from_url(found.url) as client:
        client.flushall()
    yield found
    if found.is_running:
        found.thaw()


def opened(url: str, **options: Any) -> AbstractAsyncContextManager[RedisStore]:
    return started(RedisStore(url, **options))


def keys_of(plain: Any, namespace: str) -> set[str]:
    return {key.decode().removeprefix(f"{namespace}:") for key in plain.scan_iter(f"{namespace}:*", count=10_000)}


async def refused_promptly(call: Any) -> StoreUnavailable:
    async with asyncio.timeout(PROMPTLY):
        with pytest.raises(StoreUnavailable) as refusal:
            await call
    return refusal.value


async def assert_indexes_agree(runs: RedisStore) -> None:
    """What is kept beside the runs, to find them by, agrees with the runs."""
    heads = (await runs.runs(RunQuery(limit=100_000))).heads
    tasks = [(head, task) for head in heads for task in (await load(runs, head.id)).tasks]
    unsent = {(head.id, task.number) for head, task in tasks if task.unsent}
    timers = {(head.id, task.number) for head, task in tasks if task.due_at is not None}
    timers |= {(head.id, None) for head in heads if head.due_at is not None}
    assert {(one.run_id, one.task) for page in await unsent_pages(runs, 500) for one in page} == unsent
    assert {(one.run_id, one.task) for one in await runs.due(NOW + 10_000_000, 1_000_000)} == timers
    assert sum((await runs.census()).values()) == len(heads)
    for status in RunStatus:
        of_status = [head.id for head in heads if head.status is status]
        assert await ids_of(runs, RunQuery(statuses=frozenset({status}), limit=100_000)) == of_status
