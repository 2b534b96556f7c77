"""A connection that many share. It reconnects by itself, and no caller waits forever."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from oraculo.clients.address import Address
from oraculo.clients.redis.connection import Command, Connection, Errors, connect

Prepare = Callable[[Connection], Awaitable[None]]


class RedisLink:
    """A shared connection. When it is lost, the next command makes another, once for all callers.

    `prepare` sets up a new connection before it is used. `lost` is called with the trouble when it breaks.
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
        """Connect. Raises `errors.refused`, and no `errors.unavailable`, when the server refuses this user."""
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
        """Return the replies to commands, ReplyErrors among them. Raises `errors.unavailable`.

        Connecting counts towards the timeout; a server that keeps sending may take longer. `repeatable` commands do no
        harm when done twice, so they are sent again over a new connection.
        """
        until = self._until()
        connection, replies = await self._exchange(commands, until)
        if replies is None and repeatable:
            connection, replies = await self._exchange(commands, until)
        if replies is None:
            raise self._errors.unavailable(connection.trouble or f"the connection to {self.place} was lost")
        return replies

    async def connected(self) -> None:
        """Return once there is a connection. Raises `errors.unavailable`."""
        await self._in_time(self._until())

    def _until(self) -> float:
        return asyncio.get_running_loop().time() + self._answer_timeout

    async def _exchange(self, commands: Sequence[Command], until: float) -> tuple[Connection, list[Any] | None]:
        """Return the connection and the replies, or None in their place when it broke first."""
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
                return await self._connected()
        except TimeoutError:
            raise self._errors.unavailable(self._silence) from None
        except self._errors.unavailable:
            raise
        except self._errors.refused as error:  # it accepted this login before, so it may do so again
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
            attempt.exception()  # mark as retrieved: those who wait raise it

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
