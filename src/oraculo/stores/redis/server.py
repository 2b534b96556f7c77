"""The server as the store knows it: commands and scripts with a time limit, requirements, and the layout's number."""

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from oraculo.clients.address import Address
from oraculo.clients.redis import (
    Command,
    Connection,
    Errors,
    Part,
    RedisLink,
    ReplyError,
    error_code,
    read_info,
    translated,
    version_of,
)
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.stores.migrations import Migration
from oraculo.stores.redis.layout import Layout

ERRORS = Errors(StoreError, StoreUnavailable)
OLDEST = (6, 2)
_VERSION = re.compile(rb"(\d+)\.(\d+)")
# Errors of a missing right: for a command, and for one in a script since Redis 7 and before.
_NOT_PERMITTED = re.compile("NOPERM |ERR ACL failure in script|.*The user executing the script can't")
_FOREIGN = (UnicodeError, OverflowError, msgspec.MsgspecError)


class Server:
    """One connection for all commands, so that they reach the server in their order."""

    def __init__(self, address: Address, layout: Layout, connect_timeout: float, call_timeout: float) -> None:
        self.layout = layout
        self._link = RedisLink(
            address, ERRORS, self._prepare, connect_timeout=connect_timeout, answer_timeout=call_timeout
        )
        self.place = self._link.place
        self.connections = 0  # how many there have been, the present one included

    async def open(self) -> None:
        """Connect. Raises StoreError when this store cannot be kept in the server."""
        await self._link.open()
        await self.about()
        await self._check_kinds()

    async def close(self) -> None:
        await self._link.close()

    async def connected(self) -> int:
        """Return the number of the connection that the next call uses, unless another caller awaits first.

        Raises StoreUnavailable.
        """
        await self._link.connected()
        return self.connections

    async def call(self, commands: Sequence[Command], *, repeatable: bool = True) -> list[Any]:
        """Return the replies to commands, ReplyErrors among them. Raises StoreUnavailable."""
        return await self._link.call(commands, repeatable=repeatable)

    async def ask(self, *command: Part) -> Any:
        (reply,) = await self.call([command])
        return self.checked(reply)

    async def ask_all(self, commands: Sequence[Command]) -> list[Any]:
        return [self.checked(reply) for reply in await self.call(commands)]

    async def run(self, script: str, *arguments: Part, repeatable: bool = True) -> Any:
        command = ("EVALSHA", self.layout.scripts[script].sha, 0, *arguments)
        (reply,) = await self.run_all([command], repeatable=repeatable)
        return self.checked(reply)

    async def run_all(self, scripts: Sequence[Command], *, repeatable: bool = True) -> list[Any]:
        """Return the replies to scripts, ReplyErrors among them.

        Scripts that the server forgot are run again, in order.
        """
        replies = await self.call(scripts, repeatable=repeatable)
        forgotten = [place for place, reply in enumerate(replies) if _is_forgotten(reply)]
        if forgotten:
            await self.ask_all(self._loading())
            again = await self.call([scripts[place] for place in forgotten], repeatable=repeatable)
            for place, reply in zip(forgotten, again, strict=True):
                replies[place] = reply
        return replies

    def checked(self, reply: Any) -> Any:
        if isinstance(reply, ReplyError):
            raise self.error_of(reply)
        return reply

    def error_of(self, reply: ReplyError) -> StoreError:
        error = translated(reply, self.place, ERRORS)
        if error_code(reply) in ("READONLY", "MASTERDOWN"):
            self._link.abort(str(error))  # the host name may point to the new master by now
        if error_code(reply) == "NOSCRIPT":  # lost again right after loading: somebody flushes scripts
            return StoreUnavailable(str(error))
        if isinstance(error, StoreUnavailable) or _NOT_PERMITTED.match(str(reply)):
            return StoreRefuses(str(error))
        return error

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Raise StoreError for values that cannot be encoded."""
        try:
            yield
        except _FOREIGN as error:
            raise StoreError(f"{self.place}: this cannot be stored: {error}") from error

    async def about(self) -> str:
        """Return the server's version and warnings. Raises StoreError when it cannot be used."""
        (reply,) = await self.call([("INFO",)])
        about = read_info(reply)
        if reason := _reason_to_refuse(about):
            raise StoreError(f"{self.place} {reason}")
        return f"{version_of(about)} at {self.place}{_warning(about)}"

    async def _prepare(self, connection: Connection) -> None:
        replies = await connection.call(self._loading())
        if ReplyError in set(map(type, replies)):  # a Sentinel refuses these, and INFO says that it is one
            (reply,) = await connection.call([("INFO",)])
            if reason := _reason_it_keeps_nothing(read_info(reply)):
                raise StoreError(f"{self.place} {reason}")
        for reply in replies:
            self.checked(reply)
        self.connections += 1

    def _loading(self) -> list[Command]:
        return [("SCRIPT", "LOAD", script.text) for script in self.layout.scripts.values()]

    async def _check_kinds(self) -> None:
        """Raise StoreError when a key has another type. A script that finds one would stop half way."""
        kinds = self.layout.kinds()
        found = await self.ask_all([("TYPE", key) for key in kinds])
        for (key, kind), reply in zip(kinds.items(), found, strict=True):
            if _plain(reply) not in (kind, b"none"):
                raise StoreError(
                    f"{self.place} has something that is not ours under the key {key.decode()}: "
                    "name another namespace in ORACULO_STORE_URL, as in ?namespace=runs"
                )

    # -- the layout -----------------------------------------------------------------------------------------------

    @property
    def newest_layout(self) -> int:
        return len(MIGRATIONS)

    async def is_laid_out(self) -> bool:
        return await self._layout_number() is not None

    async def check_layout(self) -> None:
        """Lay out an empty namespace. Raises StoreError when another version laid it out."""
        found = await self._layout_number()
        if found is None:
            await self.migrate()
        elif found < len(MIGRATIONS):
            raise StoreError(
                f"the runs in {self.place}, namespace {self.layout.namespace}, have layout {found} and this program "
                f"uses {len(MIGRATIONS)}: run `oraculo migrate`"
            )
        else:
            self._refuse_newer(found)

    async def migrate(self) -> list[str]:
        done: list[str] = []
        number = await self._layout_number() or 0
        self._refuse_newer(number)
        for migration in MIGRATIONS[number:]:
            await migration.step(self)
            if await self.run("advance_layout", migration.number - 1, migration.number):
                done.append(migration.label)
        return done

    async def _layout_number(self) -> int | None:
        found = await self.ask("GET", self.layout.key("layout"))
        if found is None:
            return None
        if not found.isdigit():
            raise StoreError(f"{self.place} has no number under the key {self.layout.key('layout').decode()}")
        return int(found)

    def _refuse_newer(self, found: int) -> None:
        if found > len(MIGRATIONS):
            raise StoreError(
                f"the runs in {self.place}, namespace {self.layout.namespace}, were written by a newer ORÁCULO (their "
                f"layout is {found}, this program knows {len(MIGRATIONS)}): run that version, or name another namespace"
            )


async def _nothing(server: Server) -> None:
    """Do nothing: the first layout needs no step."""


# Two processes may take a step at once, and one may repeat it: each step must allow that.
MIGRATIONS: list[Migration[Callable[[Server], Awaitable[None]]]] = [Migration(1, "runs", _nothing)]


def _is_forgotten(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and error_code(reply) == "NOSCRIPT"


def _plain(reply: Any) -> bytes:
    return reply.encode() if isinstance(reply, str) else bytes(reply)


def _reason_to_refuse(about: dict[bytes, bytes]) -> str | None:
    """Return why the server cannot be used. None also when the user may not ask."""
    found = _VERSION.match(about.get(b"redis_version", b""))
    if found and (int(found[1]), int(found[2])) < OLDEST:
        return f"is {version_of(about)}, which is too old: {'.'.join(map(str, OLDEST))} or newer is needed"
    if reason := _reason_it_keeps_nothing(about):
        return reason
    policy = about.get(b"maxmemory_policy", b"").decode()
    # The volatile policies evict only keys that expire, which none of ours does.
    if about.get(b"maxmemory", b"0") != b"0" and policy.startswith("allkeys"):
        return f"would evict runs when its memory is full: set its maxmemory-policy to noeviction, it is {policy}"
    return None


def _warning(about: dict[bytes, bytes]) -> str:
    if not about:
        return "; its user may not ask INFO, so that nobody sees whether it evicts or loses runs: grant +info"
    return "; it keeps no append-only file: a crash of it loses runs" if about.get(b"aof_enabled") == b"0" else ""


def _reason_it_keeps_nothing(about: dict[bytes, bytes]) -> str | None:
    if b"sentinel" in (about.get(b"redis_mode"), about.get(b"server_mode")):  # Valkey 9 and later say server_mode
        return "is a Redis Sentinel, which keeps no data: use the address of the master, or one that follows it"
    if about.get(b"cluster_enabled") == b"1":
        return "is a node of a Redis Cluster: a run's keys must be on one server, so use one that is no cluster"
    return None
