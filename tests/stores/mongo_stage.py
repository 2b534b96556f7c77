"""What the tests of the MongoDB store share.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses:
`url, of_module = stage.url, stage.of_module`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from pymongo import AsyncMongoClient, MongoClient

from oraculo.core.run import Run
from oraculo.stores.mongo import MongoStore, server
from oraculo.testing.store_runs import make_run
from tests.servers.fleet import Fleet
from tests.stores.started import started

OF_RUNS = ("orquestracoes", "orquestracoes_entradas", "orquestracoes_tarefas", "orquestracoes_historico")

Database = Any


def with_database(url: str) -> str:
    """Return the URL of an empty database on the server."""
    return urlsplit(url)._replace(path=f"/test_{os.urandom(6).hex()}").geturl()


def directly(url: str) -> str:
    """Return the URL that keeps the driver on the given address: a member of a set names its own, past any proxy."""
    return url.replace("replicaSet=oraculo", "directConnection=true")


@asynccontextmanager
async def database(url: str) -> AsyncIterator[Database]:
    """Open the database as another application does."""
    async with AsyncMongoClient(url) as client:
        yield client.get_default_database()


@pytest.fixture
def new_url(fleet: Fleet) -> Iterator[str]:
    """A database in which nothing was ever made."""
    yield from _kept(with_database(fleet.url("mongodb")))


@pytest.fixture(scope="module")
def of_module(fleet: Fleet) -> Iterator[str]:
    yield from _kept(with_database(fleet.url("mongodb")))


def _kept(address: str) -> Iterator[str]:
    with MongoClient[Any](address) as client:
        yield address
        client.drop_database(client.get_default_database().name)


@pytest.fixture
def url(of_module: str) -> Iterator[str]:
    """The database of a module's tests, without runs. Its indexes stay: under qemu they take a second to make."""
    yield of_module
    with MongoClient[Any](of_module) as client:
        found = client.get_default_database()
        for name in found.list_collection_names():
            found[name].delete_many({"_id": {"$ne": "esquema"}})


def opened(url: str, **options: float) -> AbstractAsyncContextManager[MongoStore]:
    return started(MongoStore(url, **options))


async def counts(url: str) -> dict[str, int]:
    """Return how many documents each collection of runs has."""
    async with database(url) as found:
        return {name: await found[name].count_documents({}) for name in OF_RUNS}


def wide_run(run_id: str, width: int = 200, **fields: Any) -> Run:
    return make_run(run_id, destinos=[{"fila": "q", "id": f"t{n}", **fields} for n in range(width)])


async def end_abandoned(url: str) -> None:
    """End the transactions of clients that were killed or had no time left, which lock their runs for a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "ABANDONED_SECONDS", 0.1)
        async with opened(url) as store:
            await asyncio.sleep(0.1)
            await store._server.end_abandoned()
