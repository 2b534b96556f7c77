"""The connection that many share: it comes back by itself, and nobody waits on it for ever."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from oraculo.clients.address import Address
from oraculo.clients.redis.connection import Command, Connection, Errors, connect

Prepare = Callable[[Connection], Awaitable[None]]


class RedisLink:
    """When the connection is lost, the next command makes another; one attempt serves all who ask at the same time.

    `prepare` does what a new connection needs before it is used; `lost` is told the trouble when it breaks.
    """

    def __init__(
        self,
        address: Address,
        errors: Errors[Any],
        prepare: Prepare,
        *,
        connect_timeout: float,
        answer_timeout: float,
        lost: Callable[[str], object] | None = None,
    ) -> None:
        self.place = address.place
        self.is_open = False
        self._address = address
        self._errors = errors
        self._prepare = prepare
        self._connect_timeout = connect_timeout
        self._answer_timeout = answer_timeout
        self._lost = lost
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None

    async def open(self) -> None:
        """Raises that it was refused, and not that it is unavailable, when the server refuses who asks."""
        self.is_open = True
        await self._connected()

    async def close(self) -> None:
        self.is_open = False
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def abort(self, trouble: str) -> None:
        if self._connection is not None:
            self._connection.abort(trouble)

    async def call(self, commands: Sequence[Command], *, repeatable: bool = True) -> list[Any]:
        """Their replies, ReplyErrors among them. Takes no longer than the answer's timeout, connecting included, unless
        the server is sending all the while.

        `repeatable`: doing it twice does no harm, so that a connection which turns out to be lost is no failure yet.
        Raises that it is unavailable.
        """
        until = self._until()
        connection, replies = await self._exchange(commands, until)
        if replies is None and repeatable:
            connection, replies = await self._exchange(commands, until)
        if replies is None:
            raise self._errors.unavailable(connection.trouble or f"the connection to {self.place} was lost")
        return replies

    async def connected(self) -> None:
        """Returns when there is a connection. Raises that it is unavailable."""
        await self._in_time(self._until())

    def _until(self) -> float:
        return asyncio.get_running_loop().time() + self._answer_timeout

    async def _exchange(self, commands: Sequence[Command], until: float) -> tuple[Connection, list[Any] | None]:
        """No replies when the connection broke first."""
        connection = await self._in_time(until)
        answer = connection.send(commands)
        if not await connection.answered(answer, until, self._answer_timeout):
            connection.abort(self._silence)
            raise self._errors.unavailable(self._silence)
        return connection, answer.result()

    @property
    def _silence(self) -> str:
        return f"no answer from {self.place} in {self._answer_timeout:g} s"

    async def _in_time(self, until: float) -> Connection:
        try:
            async with asyncio.timeout_at(until):
                return await self._usable()
        except TimeoutError:
            raise self._errors.unavailable(self._silence) from None

    async def _usable(self) -> Connection:
        try:
            return await self._connected()
        except self._errors.unavailable:
            raise
        except self._errors.refused as error:  # it took us before, so it may take us again: no reason to give up
            raise self._errors.unavailable(str(error)) from error

    async def _connected(self) -> Connection:
        if not self.is_open:
            raise self._errors.unavailable(f"the connection to {self.place} is closed")
        if self._connection is not None and self._connection.trouble is None:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"connect {self.place}")
            self._connecting.add_done_callback(self._end_attempt)
        attempt = self._connecting
        await asyncio.wait((attempt,))
        if attempt.cancelled():
            raise self._errors.unavailable(f"the connection to {self.place} was closed")
        return attempt.result()

    def _end_attempt(self, attempt: "asyncio.Task[Connection]") -> None:
        self._connecting = None
        if not attempt.cancelled():
            attempt.exception()  # whoever still waits raises it; nobody may, and then it is no news

    async def _connect(self) -> Connection:
        connection = await connect(self._address, self._connect_timeout, self._errors, self._lost)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._prepare(connection)
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                trouble = f"no answer from {self.place} in {self._connect_timeout:g} s"
                raise self._errors.unavailable(trouble) from None
            raise
        self._connection = connection
        return connection
