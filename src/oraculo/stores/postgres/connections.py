"""Connections: one for each kind of work, so that none waits for another."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from oraculo.errors import StoreRefuses, StoreUnavailable
from oraculo.stores.postgres.address import Address, Connection
from oraculo.stores.postgres.faults import Clash, Stale, translated
from oraculo.stores.sql import named_queries

CLOSING_SECONDS = 2.0
QUERIES = named_queries("postgres")

Result = TypeVar("Result")


class Lane:
    """One connection, used by one caller at a time. It is made at its first use, and again after a loss."""

    def __init__(self, address: Address, *, engine_reads: bool = False) -> None:
        self._address = address
        sessions = ["session", "reader_session"] if engine_reads else ["session"]
        self._session = "; ".join([*(QUERIES[name] for name in sessions), _limits(address.call_timeout)])
        self._connection: Connection | None = None
        self._host = address.first
        self._turn = asyncio.Lock()
        self._at_work: set[asyncio.Task[Any]] = set()

    @property
    def place(self) -> str:
        return self._address.place

    async def run(self, work: Callable[[Connection], Awaitable[Result]], *, statements: int = 1) -> Result:
        """Run `work` on the connection. Each of its `statements` has its own time limit.

        It goes on when the caller gives up, because its reply is on the way.
        """
        task = asyncio.ensure_future(self._run(work, statements))
        self._at_work.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._at_work.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the caller may be gone

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
            self._host = self._address.first
        try:
            with translated(self.place):
                async with asyncio.timeout(self._address.call_timeout * statements):
                    yield self._connection
        except Clash:
            raise
        except StoreRefuses:
            self._address.pass_by(self._host)
            self._drop()
            raise
        except (StoreUnavailable, asyncio.CancelledError):
            self._drop()  # its next reply could belong to this call
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
    """Return the SQL that sets time limits on the server.

    There they also stop work that nobody waits for, and release the locks of a client that hangs.
    """
    milliseconds = int(seconds * 1000)
    return f"SET statement_timeout = {milliseconds}; SET idle_in_transaction_session_timeout = {milliseconds}"
