"""The server as one process knows it: the connection for commands, how it is doing, and the groups of its queues."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import structlog

from oraculo.brokers.address import Address
from oraculo.brokers.redis_streams.layout import order, table
from oraculo.brokers.redis_streams.room import eviction_of
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
MOST_KNOWN = 10_000  # queues whose groups are known to be there
_REFUSES_WRITES = frozenset({"MISCONF", "NOREPLICAS", "OOM", "READONLY"})  # and may answer whoever only reads
_NOBODY = "oraculo-check"  # a key, and a group and a consumer of any key, that nobody has
_NOT_THAT_KEY = re.compile(r"NOPERM .*access (a key|one of the keys)")  # since Redis 7, and before
_CLOSED = "the Redis broker is closed: call start() first"

_log = structlog.get_logger("oraculo.brokers.redis")


class GroupGone(BrokerUnavailable):
    """The consumer group of a queue was deleted, perhaps with everything: whatever was out is not out any more."""


class NoRoom(BrokerUnavailable):
    """The server writes nothing more; it can still be read and emptied."""


class _Refusal(NamedTuple):
    why: str
    size: int = 0  # bytes of a message that it had no room for: a smaller one that it takes proves nothing


class Server:
    """Commands share one link."""

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
        self._refusal: _Refusal | None = None  # of a message, the last time
        self.losses = 0
        self.keeps = True  # what it confirmed, over a restart
        self.run_id: bytes | None = None
        self._master: bytes | None = None  # the run_id of the last that was no replica
        self._last_added: tuple[str, bytes] | None = None  # the queue and the id of what it confirmed last
        self.known: set[str] = set()  # streams whose groups were there when last seen
        self._eviction: str | None = None  # how it was last told to lose queues
        self._consumed: dict[str, int] = {}  # for each queue that was consumed, the losses when its group was last seen

    # -- the connection -------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """That it answers whoever reads is no sign that it would take a message again."""
        return self._trouble or (self._refusal and self._refusal.why)

    async def start(self) -> None:
        """Raises BrokerError, and not that it is unavailable, when the server refuses who asks."""
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
        if code in _REFUSES_WRITES:
            self._note_refusal(str(error))
        elif isinstance(error, BrokerUnavailable):
            self._trouble = str(error)
        if code in ("READONLY", "MASTERDOWN"):
            self._link.abort(str(error))  # the name may lead to the new master by now
        return error

    def distrusted(self, why: str) -> BrokerUnavailable:
        """What it answers on this connection makes no sense: the next command has a new one."""
        self._link.abort(why)
        return self.unavailable(why)

    def note_success(self) -> None:
        if self._link.is_open:
            self._trouble = None

    def unavailable(self, trouble: str) -> BrokerUnavailable:
        if self._link.is_open:
            self._trouble = trouble
        return BrokerUnavailable(trouble)

    def refuses(self, why: str) -> BrokerUnavailable:
        """It takes no message, for all that it answers."""
        self._note_refusal(why)
        return BrokerUnavailable(why)

    def no_room(self, reply: ReplyError, size: int) -> BrokerError:
        """For a message of that size."""
        error = self.error_of(reply)
        self._note_refusal(str(error), size)
        return error

    def keeps_the_rest(self, size: int) -> NoRoom:
        """For answers, and not for a message of that size."""
        why = f"{self.place} is close to its maxmemory: what is left is kept for answers"
        self._note_refusal(why, size)
        return NoRoom(why)

    def _note_refusal(self, why: str, size: int = 0) -> None:
        before = self._refusal.size if self._refusal and size else 0  # else it is of another kind
        self._refusal = _Refusal(why, max(size, before))

    def _note_written(self, size: float = 0) -> None:
        if self._refusal is not None and size >= self._refusal.size:
            self._refusal = None

    async def require_writing(self, room: float) -> None:
        """After it refused to write: by a command that writes nothing and is refused for the same reasons, for it does
        not tell of all of them when asked how it is. Raises BrokerUnavailable when it still refuses, or has not the
        room for what it refused: `room`, which commands may take of its memory."""
        if self._refusal is None:
            return
        why, size = self._refusal
        if size and room < size:
            raise BrokerUnavailable(why)
        queue = next(iter(self.known), _NOBODY)  # one that this user may use, if any is known
        (reply,) = await self.call([("XGROUP", "CREATECONSUMER", queue, _NOBODY, _NOBODY)])
        if isinstance(reply, ReplyError) and error_code(reply) in _REFUSES_WRITES:
            raise self.error_of(reply)
        if not (
            isinstance(reply, ReplyError) and error_code(reply) == "NOPERM"
        ):  # which comes first, and proves nothing
            self._refusal = None

    async def _prepare(self, connection: Connection) -> None:
        sections = ("server", "persistence", "replication", "memory")
        replies = await connection.call([("INFO", section) for section in sections])
        about: dict[bytes, bytes] = {}
        for reply in replies:
            about |= read_info(reply)
        self._refuse_mode(about)
        self._tell_eviction(about)
        if about:
            self._compare(about)
        else:
            await self._compare_last_added(connection)

    def _tell_eviction(self, about: dict[bytes, bytes]) -> None:
        """Once, however often it connects. It is used all the same: its memory may be far larger than all queues."""
        before, self._eviction = self._eviction, eviction_of(about)
        if self._eviction and self._eviction != before:
            _log.warning("the broker may lose messages", broker=self.place, reason=self._eviction)

    def _refuse_mode(self, about: dict[bytes, bytes]) -> None:
        """What is done to a queue in one step needs all its keys on one node, and a cluster spreads them; a Sentinel
        has none at all."""
        modes = (about.get(b"redis_mode"), about.get(b"server_mode"))  # the latter since Valkey 9
        if b"sentinel" in modes:
            raise BrokerError(
                f"{self.place} is a Redis Sentinel, which knows where the master is and keeps no queues: use the "
                "address of the master, or one that follows it"
            )
        if b"cluster" in modes:
            raise BrokerError(
                f"{self.place} is a node of a Redis Cluster, which spreads the keys of a queue over its nodes: use a "
                "single server, or the address at which Sentinel or your provider keeps the master of one"
            )

    # -- what it may have lost ------------------------------------------------------------------------------------

    def _compare(self, about: dict[bytes, bytes]) -> None:
        """A server that started anew without an append-only file has forgotten what it had confirmed, and a replica
        that took a master's place may never have heard of it: a master tells its replicas after it confirms."""
        self.run_id = about.get(b"run_id", self.run_id)
        self.keeps = about.get(b"aof_enabled") != b"0"
        if about.get(b"role") == b"slave":
            return  # it confirms nothing: what counts is who is master next
        if self._master and self.run_id != self._master:
            self.known.clear()
            if not self.keeps or _was_promoted(about):
                self.losses += 1
        self._master = self.run_id

    async def _compare_last_added(self, connection: Connection) -> None:
        """For a user who may not ask INFO. Of what was confirmed a server forgets the last: if that is known to it,
        all is."""
        self.keeps = False  # as far as anybody knows
        if self._last_added is None:
            return
        queue, entry = self._last_added
        (told,) = await connection.call([("XINFO", "STREAM", queue)])
        if isinstance(told, ReplyError) or order(table(told)[b"last-generated-id"]) < order(entry):
            self._last_added = None
            self.known.clear()
            self.losses += 1

    def note_added(self, queue: str, entry: bytes, *, is_reply: bool, size: float) -> None:
        if not is_reply:  # its client may delete the queue, and that would look like a loss
            self._last_added = queue, entry
        self._note_written(size)

    def note_group_gone(self, queue: str) -> None:
        """Counts a flush once, however many queues tell of it: only the first was last seen after the last loss."""
        if self._consumed.get(queue) == self.losses:
            self.losses += 1
        self.known.clear()

    def note_group_seen(self, queue: str) -> None:
        """By something that fails without it. Forgets what was not seen for longest: reply queues come and go."""
        self._consumed.pop(queue, None)
        self._consumed[queue] = self.losses
        if len(self._consumed) > MOST_KNOWN:
            del self._consumed[next(iter(self._consumed))]

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
                self._note_written()
        self.know(names)

    def forget(self, names: Iterable[str]) -> None:
        """They were removed on purpose: that is no loss."""
        for name in names:
            if self._last_added is not None and self._last_added[0] == name:
                self._last_added = None
            self.known.discard(name)
            self._consumed.pop(name, None)

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


def _was_promoted(about: dict[bytes, bytes]) -> bool:
    """It goes on with the history of another, whose replica it was. A restart with an append-only file ends that."""
    return bool(about.get(b"master_replid2", b"").strip(b"0"))


def is_busy(reply: Any) -> bool:
    """The group was there already."""
    return isinstance(reply, ReplyError) and error_code(reply) == "BUSYGROUP"


def is_aborted(reply: Any) -> bool:
    """A transaction was ended, and nothing of it done."""
    return isinstance(reply, ReplyError) and str(reply).startswith("EXECABORT")


def is_out_of_memory(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and error_code(reply) == "OOM"


def is_about_key(reply: Any) -> bool:
    """What is under that name is no stream, or not this user's: no other key is concerned, and no later try helps."""
    if not isinstance(reply, ReplyError):
        return False
    return error_code(reply) == "WRONGTYPE" or _NOT_THAT_KEY.match(str(reply)) is not None
