"""The server as this process knows it: the command connection, its state, and the groups of its queues."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import structlog

from oraculo.brokers.address import Address
from oraculo.brokers.redis_streams.layout import table
from oraculo.brokers.redis_streams.room import eviction_of, room_of
from oraculo.clients.redis import (
    Command,
    Connection,
    Errors,
    Part,
    RedisLink,
    ReplyError,
    Script,
    error_code,
    read_info,
    translated,
)
from oraculo.errors import BrokerError, BrokerUnavailable

ERRORS = Errors(BrokerError, BrokerUnavailable)
MOST_KNOWN = 10_000  # queues whose groups are known to exist
_REFUSES_WRITES = frozenset({"MISCONF", "NOREPLICAS", "OOM", "READONLY"})  # and may still answer reads
_NOBODY = "oraculo-check"  # a key, a group and a consumer that nobody has
_NOT_THAT_KEY = re.compile(r"NOPERM .*access (a key|one of the keys)")  # the texts since Redis 7 and before
_CLOSED = "the Redis broker is closed: call start() first"

_log = structlog.get_logger("oraculo.brokers.redis")


class GroupGone(BrokerUnavailable):
    """The consumer group of a queue was deleted, perhaps with the queue: nothing is held any more."""


class NoRoom(BrokerUnavailable):
    """The server is full: it can be read and emptied, and takes no message."""


class _Refusal(NamedTuple):
    """A refusal to write."""

    why: str
    size: int = 0  # bytes of the refused command: taking an answer or a smaller command proves no room for it


class Server:
    """The server and its one connection for commands."""

    def __init__(self, address: Address, connect_timeout: float, answer_timeout: float) -> None:
        self.address = address
        self._link = RedisLink(
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
        self._trouble: str | None = _CLOSED
        self._refusal: _Refusal | None = None  # the last refusal of a message
        self.keeps = True  # confirmed messages survive a restart
        self.known: set[str] = set()  # streams whose groups existed when last seen
        self._eviction: str | None = None  # the eviction policy that was logged last

    # -- the connection -------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Return why the server cannot be used. A server that answers reads may still refuse messages."""
        return self._trouble or (self._refusal and self._refusal.why)

    async def start(self) -> None:
        """Connect. Raises BrokerError, and no BrokerUnavailable, when the server refuses this user."""
        try:
            await self._link.open()
        except BrokerError as error:
            self._trouble = str(error)
            raise
        self._trouble = None

    async def close(self) -> None:
        self._trouble, self._refusal = _CLOSED, None
        await self._link.close()

    def require_open(self) -> None:
        if not self._link.is_open:
            raise BrokerUnavailable(_CLOSED)

    async def call(self, commands: Sequence[Command], *, repeatable: bool = True) -> list[Any]:
        """Return the replies to commands, ReplyErrors among them. Connecting counts towards the timeout.

        `repeatable` commands do no harm when done twice, so that they are sent again over a new connection.
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
        if code in _REFUSES_WRITES:
            self._refusal = _Refusal(str(error))
        elif isinstance(error, BrokerUnavailable):
            self._trouble = str(error)
        if code in ("READONLY", "MASTERDOWN"):
            self._link.abort(str(error))  # the host name may point to the new master by now
        return error

    def distrusted(self, why: str) -> BrokerUnavailable:
        """Return the error for answers that make no sense. The next command gets a new connection."""
        self._link.abort(why)
        return self.unavailable(why)

    def note_success(self) -> None:
        if self._link.is_open:
            self._trouble = None

    def unavailable(self, trouble: str) -> BrokerUnavailable:
        if self._link.is_open:
            self._trouble = trouble
        return BrokerUnavailable(trouble)

    def keeps_the_rest(self, size: int) -> NoRoom:
        """Return the error for a command of that size when the remaining room is kept for answers."""
        why = f"{self.place} is close to its maxmemory: what is left is kept for answers"
        self._refusal = _Refusal(why, size)
        return NoRoom(why)

    def note_written(self, size: float = 0) -> None:
        """Record that the server took messages, and has room for a command of that size."""
        if self._refusal is not None and size >= self._refusal.size:
            self._refusal = None

    async def require_writing(self) -> dict[bytes, bytes]:
        """Return what the server says about itself. Raises BrokerUnavailable when it would take no message.

        A server does not report all reasons for a refusal. So this sends a command that writes nothing and is refused
        for the same reasons.
        """
        queue = next(iter(self.known), _NOBODY)  # a key that this user may use, if one is known
        info, reply = await self.call([("INFO",), ("XGROUP", "CREATECONSUMER", queue, _NOBODY, _NOBODY)])
        about = read_info(info)
        is_refused = isinstance(reply, ReplyError)
        if is_refused and isinstance(translated(reply, self.place, ERRORS), BrokerUnavailable):
            raise self.error_of(reply)
        if self._refusal and self._refusal.size and room_of(about)[0] < self._refusal.size:
            raise BrokerUnavailable(self._refusal.why)
        if not (is_refused and error_code(reply) == "NOPERM"):  # which the server checks first
            self._refusal = None
        return about

    async def _prepare(self, connection: Connection) -> None:
        sections = ("server", "persistence", "replication", "memory")
        replies = await connection.call([("INFO", section) for section in sections])
        about: dict[bytes, bytes] = {}
        for reply in replies:
            about |= read_info(reply)
        self._refuse_mode(about)
        self._log_eviction(about)
        self.known.clear()  # it may be another server, or one that restarted
        self.keeps = bool(about) and about.get(b"aof_enabled") != b"0"

    def _log_eviction(self, about: dict[bytes, bytes]) -> None:
        """Log once that the server evicts queues.

        It is used all the same: its memory may be far larger than all queues.
        """
        before, self._eviction = self._eviction, eviction_of(about)
        if self._eviction and self._eviction != before:
            _log.warning("the broker may lose messages", broker=self.place, reason=self._eviction)

    def _refuse_mode(self, about: dict[bytes, bytes]) -> None:
        """Raise BrokerError for a cluster, which spreads the keys of a queue over nodes, and for a Sentinel."""
        modes = (about.get(b"redis_mode"), about.get(b"server_mode"))  # Valkey 9 and later say server_mode
        for mode, what in ((b"sentinel", "a Redis Sentinel"), (b"cluster", "a node of a Redis Cluster")):
            if mode in modes:
                raise BrokerError(f"{self.place} is {what}: use the address of a single server, or of its master")

    # -- groups ---------------------------------------------------------------------------------------------------

    async def make_group(self, queue: str) -> None:
        """Create the group for a consumer."""
        groups, reply = await self.call([("XINFO", "GROUPS", queue), group_command(queue)])
        if not group_of(queue, groups) and not is_busy(reply):  # a full server refuses to create any
            self.checked(reply)
        self.know([queue])

    async def make_groups(self, names: Sequence[str]) -> None:
        for reply in await self.call([group_command(name) for name in names]):
            if not is_busy(reply):
                self.checked(reply)
                self.note_written()
        self.know(names)

    def forget(self, names: Iterable[str]) -> None:
        """Forget queues that were removed."""
        self.known.difference_update(names)

    def know(self, names: Iterable[str]) -> None:
        if len(self.known) > MOST_KNOWN:
            self.known.clear()
        self.known.update(names)


def group_of(name: str, groups: Any) -> dict[bytes, Any]:
    """Return the group that has the name of its stream, or an empty dict."""
    tables = map(table, groups) if isinstance(groups, list) else ()
    return next((group for group in tables if group[b"name"] == name.encode()), {})


def group_command(name: str) -> Command:
    return ("XGROUP", "CREATE", name, name, "0", "MKSTREAM")


def is_busy(reply: Any) -> bool:
    """Return True when the group existed already."""
    return isinstance(reply, ReplyError) and error_code(reply) == "BUSYGROUP"


def is_aborted(reply: Any) -> bool:
    """Return True when a transaction was undone."""
    return isinstance(reply, ReplyError) and str(reply).startswith("EXECABORT")


def is_out_of_memory(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and error_code(reply) == "OOM"


def is_about_key(reply: Any) -> bool:
    """Return True when a key is no stream, or is not this user's. Other keys work, and a retry fails again."""
    if not isinstance(reply, ReplyError):
        return False
    return error_code(reply) == "WRONGTYPE" or _NOT_THAT_KEY.match(str(reply)) is not None
