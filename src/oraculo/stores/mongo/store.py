"""Runs in MongoDB, for any number of engines at once.

A commit is one transaction over the run's documents, so the server has to be a replica set; one member is enough.
"""

from collections.abc import Sequence

from oraculo.core.run import Changes
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.ports.store import Committed, Creation
from oraculo.stores.mongo import schema
from oraculo.stores.mongo.commits import MongoJob, MongoWrite, queue_to
from oraculo.stores.mongo.maintenance import Maintenance
from oraculo.stores.mongo.queries import RunBrowser, RunReader
from oraculo.stores.mongo.registry import Registry
from oraculo.stores.mongo.server import Server


class MongoStore(RunReader, RunBrowser, Registry, Maintenance):
    """Keeps the contract of `ports.store.Store`. `url`: `mongodb://user:password@host:port/database?replicaSet=…`."""

    name = "mongodb"

    def __init__(self, url: str, *, call_seconds: float = 10.0, connect_seconds: float = 5.0) -> None:
        self._server = Server(url, call_seconds=call_seconds, connect_seconds=connect_seconds)
        self._commits = queue_to(self._server)

    # -- opening and closing ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open it. An empty database gets its indexes."""
        if self._server.is_open:
            return
        await self._server.open()
        try:
            await schema.prepare(self._server)
        except BaseException:
            await self._server.close()
            raise

    async def migrate(self) -> Sequence[str]:
        if not self._server.is_open:
            await self._server.open()
        return await schema.migrate(self._server)

    async def close(self) -> None:
        await self._commits.finish()
        await self._server.close()

    async def check(self) -> str:
        try:
            version = await self._server.version()
            await schema.prove(self._server)
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error
        return f"MongoDB {version}"

    # -- commits ------------------------------------------------------------------------------------------------

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        with self._server.call():  # which raises when it is closed
            job = MongoJob(MongoWrite, creations, changes)
        return await self._commits.commit(job)
