"""One connection that speaks Redis' protocol: commands go out together, replies come back in order.

hiredis packs and parses, and asyncio carries, with no queue, lock or task in between. So a caller that is cancelled
does no harm to others, and a broken connection is noticed at once, even while nobody waits. Redis' own asyncio client
reads replies one by one, which costs ten times as much for each message of a batch.
"""

import asyncio
import os
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import hiredis

from oraculo.clients.address import Address
from oraculo.clients.dialing import dialed
from oraculo.errors import Fault, InvalidSettings, OraculoError

Part = str | bytes | int
Command = tuple[Part, ...]
ReplyError = hiredis.ReplyError
Error = TypeVar("Error", bound=OraculoError)

_CLOSING = 1.0  # seconds for closing a socket, which needs no answer
_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub is incomplete

# Errors of a server that works but cannot do this now. A retry may help.
_PASSING = {
    "BUSY": "is busy with a script",
    "CLUSTERDOWN": "is a cluster that is down",
    "LOADING": "is still loading its data",
    "MASTERDOWN": "is a replica that has lost its master",
    "MAXCLIENTS": "has too many clients",
    "MISCONF": "refuses to write, because it cannot save to its disk",
    "NOAUTH": "wants a password",
    "NOREPLICAS": "refuses to write, because it has too few replicas",
    "OOM": "has reached its maxmemory and takes no more",
    "READONLY": "is a replica, and read-only",
    "TRYAGAIN": "is a cluster that is moving its keys",
    "UNBLOCKED": "ended the wait for messages",
}
# The cause of a failed script on Redis 6.2: `ERR Error running script (…): @user_script:5: NOGROUP No such…`
_IN_SCRIPT = re.compile(r"@user_script: ?[0-9]+: -?([A-Z]{2,}) ")


class Errors(NamedTuple, Generic[Error]):
    """The exceptions that callers get: each adapter has its own."""

    refused: type[Error]
    unavailable: type[Error]  # a retry may help; a subclass of `refused`


class _Call(NamedTuple):
    """Commands that wait for their replies."""

    answer: "asyncio.Future[list[Any] | None]"
    expected: int
    replies: list[Any]


class Connection(asyncio.Protocol):
    """A connection. `trouble` says why it can no longer be used; `gone` is done once its socket is closed."""

    def __init__(self, place: str, errors: Errors[Any]) -> None:
        self.trouble: str | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._place = place
        self._errors = errors
        self._lost: Callable[[str], object] | None = None
        self._reader = hiredis.Reader()
        self._calls: deque[_Call] = deque()
        self._transport: asyncio.Transport | None = None
        self._heard_at = 0.0  # loop time when data last arrived

    @property
    def awaits_answer(self) -> bool:
        return bool(self._calls)

    def on_loss(self, lost: Callable[[str], object]) -> None:
        """Call `lost` with the trouble when the connection breaks, or now if it has."""
        self._lost = lost
        if self.trouble is not None:
            lost(self.trouble)

    def send(self, commands: Sequence[Command]) -> "asyncio.Future[list[Any] | None]":
        """Send commands.

        The future returns their replies in order, ReplyErrors among them, or None for a broken connection.

        It returns None instead of raising, because the caller may not wait any more.
        """
        answer: asyncio.Future[list[Any] | None] = asyncio.get_running_loop().create_future()
        if self.trouble is not None or self._transport is None:
            answer.set_result(None)
            return answer
        if not commands:
            answer.set_result([])
            return answer
        data = b"".join([_pack(command) for command in commands])  # raises before anything waits for replies
        self._calls.append(_Call(answer, len(commands), []))
        self._transport.write(data)
        return answer

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to commands. Raises `errors.unavailable` when the connection breaks first."""
        replies = await self.send(commands)
        if replies is None:
            raise self._errors.unavailable(self.trouble or f"the connection to {self._place} is closed")
        return replies

    async def answered(self, answer: "asyncio.Future[list[Any] | None]", until: float, silence: float) -> bool:
        """Return True when the reply arrives by `until`, in loop time, or later while data keeps coming.

        The server may be silent for at most `silence` seconds. A long reply over a slow line takes its time.
        """
        loop = asyncio.get_running_loop()
        while not answer.done():
            left = max(until, self._heard_at + silence) - loop.time()
            if left <= 0:
                return False
            await asyncio.wait((answer,), timeout=left)
        return True

    def abort(self, trouble: str) -> None:
        """Close the connection at once, without the other side."""
        self._end(trouble)
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        self._lost = None
        self.abort(f"the connection to {self._place} was closed")
        if self._transport is not None:
            await asyncio.wait((self.gone,), timeout=_CLOSING)

    # -- what asyncio calls ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                self._take_in(reply)
        except hiredis.ProtocolError:
            self.abort(f"{self._place} does not speak Redis' protocol")

    def _take_in(self, reply: Any) -> None:
        if not self._calls:
            self.abort(f"{self._place} ended the connection: {reply}")
            return
        call = self._calls[0]
        call.replies.append(reply)
        if len(call.replies) == call.expected:
            self._calls.popleft()
            if not call.answer.done():
                call.answer.set_result(call.replies)

    def connection_lost(self, exc: Exception | None) -> None:
        why = f": {_plain(exc)}" if exc else ""
        self._end(f"the connection to {self._place} was lost{why}")
        if not self.gone.done():
            self.gone.set_result(None)

    def _end(self, trouble: str) -> None:
        if self.trouble is not None:
            return
        self.trouble = trouble
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.answer.done():
                call.answer.set_result(None)
        if self._lost is not None:
            self._lost(trouble)


async def connect(
    address: Address, timeout: float, errors: Errors[Any], lost: Callable[[str], object] | None = None
) -> Connection:
    """Return a connection that is logged in and answers. `lost` is called when it breaks later.

    Raises `errors.unavailable` when the server cannot be reached. Raises `errors.refused` when the server refuses the
    login, or when its certificate is not valid.
    """
    place = address.place
    connection = Connection(place, errors)
    try:
        async with asyncio.timeout(timeout):
            await _open(connection, address)
            await _log_in(connection, address, errors)
    except BaseException as error:
        await connection.close()
        if isinstance(error, TimeoutError):
            raise errors.unavailable(f"no answer from {place} in {timeout:g} s") from None
        if isinstance(error, ssl.SSLCertVerificationError):
            raise errors.refused(f"the certificate of {place} is not trusted: {error.verify_message}") from error
        if isinstance(error, ssl.SSLError):
            raise errors.refused(f"no TLS with {place}: {error.reason or error}") from error
        if isinstance(error, OSError):
            raise errors.unavailable(f"cannot connect to {place}: {_plain(error)}") from error
        raise
    if lost is not None:
        connection.on_loss(lost)
    return connection


async def _open(connection: Connection, address: Address) -> None:
    name = address.host if address.tls is not None else None
    sock = await dialed(address.host, address.port)
    await asyncio.get_running_loop().create_connection(
        lambda: connection, sock=sock, ssl=address.tls, server_hostname=name
    )


async def _log_in(connection: Connection, address: Address, errors: Errors[Any]) -> None:
    who, database = credentials_of(address), database_of(address)
    commands: list[Command] = [("AUTH", *who)] if who else []
    commands += [("SELECT", database)] if database else []
    place = address.place
    for command, reply in zip(commands, await connection.call(commands), strict=True):
        if isinstance(reply, ReplyError) and error_code(reply) != "NOAUTH":
            if error_code(reply) in _PASSING:
                raise translated(reply, place, errors)
            if command[0] == "AUTH":  # only the first word, because the rest may quote the password
                raise errors.refused(_why_no_login(place, reply))
            raise errors.refused(f"{place} refused database {database}: {reply}")
    (pong,) = await connection.call([("PING",)])
    if isinstance(pong, ReplyError):
        if error_code(pong) == "NOAUTH":
            raise errors.refused(f"{place} wants a password, and the URL has none")
        raise translated(pong, place, errors)


def credentials_of(address: Address) -> tuple[str, ...]:
    """Return the arguments of AUTH, or none where user and password are empty, as in `redis://:@host`.

    A user without a password logs in too (`nopass`). Otherwise it would silently be `default`, with other rights.
    """
    if address.user:
        return address.user, address.password or ""
    return (address.password,) if address.password else ()


def database_of(address: Address) -> int:
    """Return the number in the URL's path. Raises InvalidSettings when it is not a number."""
    if not address.path:
        return 0
    if not (address.path.isascii() and address.path.isdecimal() and len(address.path) < 10):
        problem = f"{address} names the database '{address.path}'; it must be a number, as in /0"
        raise InvalidSettings(Fault(address.setting, problem))
    return int(address.path)


def _why_no_login(place: str, reply: ReplyError) -> str:
    if "without any password configured" in str(reply):
        return f"{place} has no password, and the URL has one"
    return f"{place} refused the user or the password: {error_code(reply)}"


def error_code(error: ReplyError) -> str:
    """Return the first word of an error, or of the error within it when a script failed."""
    text = str(error)
    if text.startswith("ERR max number of clients"):
        return "MAXCLIENTS"
    found = _IN_SCRIPT.search(text) if text.startswith("ERR Error") else None
    return found.group(1) if found else text.partition(" ")[0]


def translated(error: ReplyError, place: str, errors: Errors[Error]) -> Error:
    """Return the exception for an error of the server: `errors.unavailable` when a retry may help."""
    code = error_code(error)
    if code in _PASSING:
        return errors.unavailable(f"{place} {_PASSING[code]}: {error}")
    if code == "NOPERM":
        return errors.refused(f"{place} does not permit it to this user: {error}")
    return errors.refused(f"{place} refused: {error}")


def _plain(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
