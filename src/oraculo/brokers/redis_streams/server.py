"""The server as one process knows it: the connection for commands, how it is doing, and the groups of its queues."""

from collections.abc import Iterable, Sequence
from typing import Any

from oraculo.brokers.address import Address
from oraculo.brokers.redis_streams.layout import table
from oraculo.clients.redis import (
    Command,
    Connection,
    Errors,
    Link,
    Part,
    ReplyError,
    Script,
    error_code,
    read_info,
    translated,
)
from oraculo.errors import BrokerError, BrokerUnavailable

ERRORS = Errors(BrokerError, BrokerUnavailable)
MOST_KNOWN = 10_000  # queues whose groups are known to be there
_CLOSED = "the Redis broker is closed: call start() first"


class GroupGone(BrokerUnavailable):
    """The consumer group of a queue was deleted, perhaps with everything: whatever was out is not out any more."""


class NoRoom(BrokerUnavailable):
    """The server writes nothing more; it can still be read and emptied."""


class Server:
    """Commands share one link."""

    def __init__(self, address: Address, connect_timeout: float, answer_timeout: float) -> None:
        self.address = address
        self._link = Link(
            address,
            ERRORS,
            self._prepare,
            connect_timeout=connect_timeout,
            answer_timeout=answer_timeout,
            lost=self.unavailable,
        )
        self.place = self._link.place
        self.connect_timeout = connect_timeout
        self.answer_timeout = answer_timeout
        self.trouble: str | None = _CLOSED
        self.losses = 0
        self.keeps = True  # what it confirmed, over a restart
        self.run_id: bytes | None = None
        self.known: set[str] = set()  # streams whose groups were there when last seen
        self._consumed: dict[str, int] = {}  # for each queue that was consumed, the losses when its group was last seen

    # -- the connection -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises BrokerError, and not that it is unavailable, when the server refuses who asks."""
        try:
            await self._link.open()
        except BrokerError as error:
            self.trouble = str(error)
            raise
        self.trouble = None

    async def close(self) -> None:
        self.trouble = _CLOSED
        await self._link.close()

    def require_open(self) -> None:
        if not self._link.is_open:
            raise BrokerUnavailable(_CLOSED)

    async def call(self, commands: Sequence[Command], *, repeatable: bool = True) -> list[Any]:
        """Their replies, ReplyErrors among them. Takes no longer than the answer's timeout, connecting included.

        `repeatable`: doing it twice does no harm, so that a connection which turns out to be lost is no failure yet.
        """
        self.require_open()
        try:
            replies = await self._link.call(commands, repeatable=repeatable)
        except BrokerUnavailable as error:
            raise self.unavailable(str(error)) from error
        self.note_success()
        return replies

    async def ask(self, *command: Part) -> Any:
        (reply,) = await self.call([command])
        return self.checked(reply)

    async def run(self, script: Script, keys: Sequence[str], *arguments: Part, repeatable: bool = True) -> Any:
        rest = (len(keys), *keys, *arguments)
        (reply,) = await self.call([("EVALSHA", script.sha, *rest)], repeatable=repeatable)
        if isinstance(reply, ReplyError) and error_code(reply) == "NOSCRIPT":
            (reply,) = await self.call([("EVAL", script.text, *rest)], repeatable=repeatable)
        return self.checked(reply)

    def checked(self, reply: Any) -> Any:
        if isinstance(reply, ReplyError):
            raise self.error_of(reply)
        return reply

    def error_of(self, reply: ReplyError) -> BrokerError:
        code = error_code(reply)
        if code == "NOGROUP":
            return GroupGone(f"a consumer group on {self.place} is gone: {reply}")
        if code == "WRONGTYPE":
            return BrokerError(f"{self.place} holds something under that name that is not a stream: {reply}")
        error = translated(reply, self.place, ERRORS)
        if code == "OOM":
            error = NoRoom(str(error))
        if isinstance(error, BrokerUnavailable):
            self.trouble = str(error)
        if code in ("READONLY", "MASTERDOWN"):
            self._link.abort(str(error))  # the name may lead to the new master by now
        return error

    def distrusted(self, why: str) -> BrokerUnavailable:
        """What it answers on this connection makes no sense: the next command has a new one."""
        self._link.abort(why)
        return self.unavailable(why)

    def note_success(self) -> None:
        if self._link.is_open:
            self.trouble = None

    def unavailable(self, trouble: str) -> BrokerUnavailable:
        if self._link.is_open:
            self.trouble = trouble
        return BrokerUnavailable(trouble)

    async def _prepare(self, connection: Connection) -> None:
        server, persistence = await connection.call([("INFO", "server"), ("INFO", "persistence")])
        self._compare(read_info(server), read_info(persistence))

    # -- what it may have lost ------------------------------------------------------------------------------------

    def _compare(self, server: dict[bytes, bytes], persistence: dict[bytes, bytes]) -> None:
        """A server that started anew without an append-only file has forgotten what it had confirmed."""
        run_id = server.get(b"run_id")
        self.keeps = persistence.get(b"aof_enabled") != b"0"
        if run_id and self.run_id and run_id != self.run_id:
            self.known.clear()
            if not self.keeps:
                self.losses += 1
        self.run_id = run_id or self.run_id

    def note_group_gone(self, queue: str) -> None:
        """Counts a flush once, however many queues tell of it: only the first was last seen after the last loss."""
        if self._consumed.get(queue) == self.losses:
            self.losses += 1
        self.known.clear()

    def note_group_seen(self, queue: str) -> None:
        """By something that fails without it."""
        self._consumed[queue] = self.losses

    async def make_group(self, queue: str) -> None:
        """For a consumer. A queue that was consumed before and has no group now may have lost messages."""
        groups, reply = await self.call([("XINFO", "GROUPS", queue), group_command(queue)])
        if not group_of(queue, groups):  # asked for, because a server without room refuses to make what is there
            if not is_busy(reply):
                self.checked(reply)
            if queue in self._consumed:
                self.note_group_gone(queue)
        self.note_group_seen(queue)
        self.know([queue])

    async def make_groups(self, names: Sequence[str]) -> None:
        for reply in await self.call([group_command(name) for name in names]):
            if not is_busy(reply):
                self.checked(reply)
        self.know(names)

    def know(self, names: Iterable[str]) -> None:
        if len(self.known) > MOST_KNOWN:
            self.known.clear()
        self.known.update(names)


def group_of(name: str, groups: Any) -> dict[bytes, Any]:
    """The group that has the name of its stream; empty when there is none."""
    tables = map(table, groups) if isinstance(groups, list) else ()
    return next((group for group in tables if group[b"name"] == name.encode()), {})


def group_command(name: str) -> Command:
    return ("XGROUP", "CREATE", name, name, "0", "MKSTREAM")


def is_busy(reply: Any) -> bool:
    """The group was there already."""
    return isinstance(reply, ReplyError) and error_code(reply) == "BUSYGROUP"
