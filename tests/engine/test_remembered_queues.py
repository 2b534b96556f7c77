"""Queues that are learnt from the store, for a broker that cannot list its own. (test_remembered.py of end_to_end has
real brokers.)"""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from oraculo.core.events import Sent
from oraculo.engine.queues import remembered
from oraculo.engine.queues.remembered import RememberedQueues
from oraculo.ports.broker import Capabilities
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.store import Snapshot
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from oraculo.testing.store_runs import changed, create, make_run
from tests.brokers.failover_stage import Named
from tests.waiting import until


class Listless(Named):
    """Lists nothing, and notes how many looks there are at a time."""

    def __init__(self) -> None:
        super().__init__("rabbitmq")
        self.looks = self.most_looks = 0

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, lists_queues=False)

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        if names is None:
            return []
        self.looks += 1
        self.most_looks = max(self.looks, self.most_looks)
        await asyncio.sleep(0)
        self.looks -= 1
        return [QueueState(name, 0, 0, 0) for name in names]


async def names_of(store: SqliteStore) -> frozenset[str]:
    known = RememberedQueues(Listless(), store)
    looking = asyncio.create_task(known.run())
    await until(lambda: known.names or looking.done(), saying="a look")
    looking.cancel()
    return known.names


@pytest.fixture
async def store(tmp_path: Path) -> SqliteStore:
    """Of which three runs have commands at the broker."""
    store = SqliteStore(str(tmp_path / "oraculo.db"))
    await store.start()
    runs = [make_run(name, destinos=[f"executador_{name}"]) for name in "abc"]
    await create(store, *runs)
    await store.commit([], [changed(run, Sent(0, 1, via="rabbitmq")) for run in runs])
    return store


async def test_a_definition_that_cannot_be_read_hides_no_other_run(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = store.load

    async def strange(run_ids: Sequence[str]) -> dict[str, Snapshot]:
        found = dict(await load(run_ids))
        found["a"].definition = b'{"of": "a newer version"}'
        return found

    monkeypatch.setattr(store, "load", strange)
    assert await names_of(store) == {"executador_b", "executador_c"}
    await store.close()


IN_ITS_HEAD = """UPDATE runs SET deliveries = '[{"channel": "novo"}]'"""
IN_A_TASK = "UPDATE tasks SET cause = 'novo'"


@pytest.mark.parametrize("word", [IN_ITS_HEAD, IN_A_TASK])
async def test_a_run_that_a_newer_version_wrote_hides_no_other(store: SqliteStore, tmp_path: Path, word: str) -> None:
    with closing(sqlite3.connect(tmp_path / "oraculo.db")) as connection, connection:
        connection.execute(f"{word} WHERE n = (SELECT n FROM runs WHERE id = 'a')")
    assert await names_of(store) == {"executador_b", "executador_c"}
    await store.close()


async def test_there_are_not_too_many(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST_QUEUES", 2)
    assert len(await names_of(store)) == 2
    await store.close()


async def test_a_few_are_looked_at_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, the last would wait for longer than a call may take, and the broker would seem to be away."""
    broker = Listless()
    async with Harness(broker=broker) as oraculo:
        monkeypatch.setattr(
            oraculo.engine.parts.queues.remembered, "names", frozenset(f"executador_{n}" for n in range(20))
        )
        broker.most_looks = 0
        assert len(await oraculo.operations.queues()) == 20
        assert broker.most_looks == 3
