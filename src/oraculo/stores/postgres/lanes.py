"""A connection of its own for each kind of work, so that none waits for another's."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import asyncpg

from oraculo.errors import StoreError, StoreUnavailable
from oraculo.stores.postgres.faults import Clash, Stale, place_of, translated
from oraculo.stores.sql import named_queries

OLDEST_SERVER = 13
CLOSING_SECONDS = 2.0
QUERIES = named_queries("postgres")

Result = TypeVar("Result")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"  # generic for the type checker alone


class Address:
    """Where the server is, and how long it may take."""

    def __init__(self, url: str, *, connect_timeout: float, call_timeout: float) -> None:
        self._url = url
        self._connect_timeout = connect_timeout
        self.call_timeout = call_timeout
        self.place = place_of(url)

    async def connect(self, session: str) -> Connection:
        """Raises StoreUnavailable, or StoreError when this server will never do."""
        with translated(self.place):
            async with asyncio.timeout(self._connect_timeout):
                connection = await asyncpg.connect(self._url, server_settings=self._server_settings())
                try:
                    self._refuse_unfit(connection)
                    await connection.execute(session)
                except BaseException:
                    connection.terminate()
                    raise
        return connection

    def _server_settings(self) -> dict[str, str]:
        return {} if "application_name=" in self._url else {"application_name": "oraculo"}

    def _refuse_unfit(self, connection: Connection) -> None:
        version = connection.get_server_version()
        if version.major < OLDEST_SERVER:
            raise StoreError(
                f"PostgreSQL at {self.place} is {version.major}.{version.minor}; {OLDEST_SERVER} or newer is needed"
            )
        encoding = connection.get_settings().server_encoding
        if encoding != "UTF8":
            raise StoreError(
                f"the database at {self.place} is encoded in {encoding}, which cannot hold every text: "
                "make one with ENCODING 'UTF8'"
            )


class Lane:
    """One connection, used by one caller at a time. It is made when it is first needed and after it was lost."""

    def __init__(self, address: Address, *, engine_reads: bool = False) -> None:
        self._address = address
        sessions = ["session", "reader_session"] if engine_reads else ["session"]
        self._session = "; ".join([*(QUERIES[name] for name in sessions), _limits(address.call_timeout)])
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._at_work: set[asyncio.Task[Any]] = set()

    @property
    def place(self) -> str:
        return self._address.place

    async def run(self, work: Callable[[Connection], Awaitable[Result]], *, statements: int = 1) -> Result:
        """`statements`: how many it is made of, each of which has its time. The work goes on when the caller gives up:
        an answer to it is on the way."""
        task = asyncio.ensure_future(self._run(work, statements))
        self._at_work.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._at_work.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _run(self, work: Callable[[Connection], Awaitable[Result]], statements: int) -> Result:
        async with self._own_turn():
            try:
                return await self._run_once(work, statements)
            except Stale:
                return await self._run_once(work, statements)

    async def _run_once(self, work: Callable[[Connection], Awaitable[Result]], statements: int) -> Result:
        async with self._connected(statements) as connection:
            return await work(connection)

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        with translated(self.place):
            async with asyncio.timeout(self._address.call_timeout):
                await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    @asynccontextmanager
    async def _connected(self, statements: int) -> AsyncIterator[Connection]:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._address.connect(self._session)
        try:
            with translated(self.place):
                async with asyncio.timeout(self._address.call_timeout * statements):
                    yield self._connection
        except Clash:
            raise
        except (StoreUnavailable, asyncio.CancelledError):
            self._drop()  # nobody knows what it would answer next
            raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        if self._at_work:
            await asyncio.wait(self._at_work)
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                await connection.close(timeout=CLOSING_SECONDS)


def _limits(seconds: float) -> str:
    """On the server too, so that it neither goes on with what nobody waits for nor keeps the locks of a client that is
    frozen."""
    milliseconds = int(seconds * 1000)
    return f"SET statement_timeout = {milliseconds}; SET idle_in_transaction_session_timeout = {milliseconds}"
