"""The queues as RabbitMQ has them: how they are made, what is in them, and how they are removed.

Each is a quorum queue on the default exchange. The server moves what was delivered too often, or rejected by a plain
client, to `<queue>.dlq`, and keeps it until it has arrived there (`at-least-once`). A queue that somebody made in
another way is used as it is.

Every queue has a delivery limit. With one, a message that is given back keeps its place; without, it goes to the end.
Where none is set, RabbitMQ 4 has a limit of 20, and drops what passes it.
"""

import asyncio
import re
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

import structlog
from pika.exceptions import AMQPError

from oraculo.brokers.rabbitmq.connection import (
    ACCESS_REFUSED,
    LOCKED,
    NOT_FOUND,
    Channel,
    Connection,
    Refused,
    SharedAttempts,
    all_of,
)
from oraculo.errors import BrokerError
from oraculo.ports.broker import MAY_LOSE
from oraculo.wire.naming import dlq_of, is_dlq, shown, source_name

ASKED_TOGETHER = 16  # questions at a time, each on a channel of its own; a queue that never answers takes one place
_NO_LIMIT = 1_000_000_000
_STEPS = (100, 150, 200, 300, 400, 500, 600, 800)  # delays of one decade: each makes a queue, so there are few
_DELAYS: list[int] = [step * 10**decade for decade in range(7) for step in _STEPS]  # in ms, up to a week
_LONGEST_DELAY = 7 * 24 * 3600.0
# Seconds. RabbitMQ writes down the name of a new quorum queue about half a second after it confirmed what it was sent:
# killed before that, it starts without what is in the queue.
YOUNG = 1.0
_MAX_NAMES = 10_000  # remembered in each table; a queue for each answer would fill the memory
_LONGEST_NAME = 255
_LONGEST_SUFFIX = len(".retry.") + 10  # of a queue beside it; the longest delay in ms
# Exclusive to another connection, or our user has no right to it: RabbitMQ 4.2.6 and later do not even show it.
_UNSEEN = frozenset({LOCKED, ACCESS_REFUSED})
_IS_STREAM = "but current is 'stream'"  # RabbitMQ's words when a stream is declared as something else
_DIFFERS = re.compile(r"inequivalent arg '([^']+)'")  # the first that does, when a queue is declared in another way
_PUSHES_OUT = "a new message pushes out the oldest, unless its x-overflow is reject-publish"
_LOSSES = {  # by what differs
    "durable": "it is not durable: a restart of RabbitMQ takes it away, with what is in it",
    "auto_delete": "it was made with auto_delete: it is deleted, with what is in it, when its last consumer leaves",
    "x-message-ttl": "it was made with x-message-ttl: what waits longer leaves it",
    "x-expires": "it was made with x-expires: it is deleted, with what is in it, when nobody used it for that long",
    "x-max-length": f"it was made with x-max-length: {_PUSHES_OUT}",
    "x-max-length-bytes": f"it was made with x-max-length-bytes: {_PUSHES_OUT}",
}
_LACKS_DEAD_LETTERS = re.compile(r"inequivalent arg 'x-dead-letter-exchange'.*but current is none")
_NO_DEAD_LETTERS = (
    "it was made without dead letters: what a worker rejects is dropped, and what ends a worker comes again for ever, "
    "or until RabbitMQ 4 drops it; delete it and let ORÁCULO make it, and let workers declare it with `passive`"
)

_log = structlog.get_logger("oraculo.brokers.rabbitmq")

Value = TypeVar("Value")


class Depth(NamedTuple):
    messages: int
    consumers: int


class _Kind(Enum):
    """The kind of a queue that was seen."""

    OURS = auto()  # made as we make them: it counts deliveries
    THEIRS = auto()
    STREAM = auto()
    HIDDEN = auto()  # it takes messages, and we may not look at it


class _Delay(NamedTuple):
    source: str  # the queue that the messages come from and go back to
    milliseconds: int


class _Channels:
    """Channels for questions about queues, one question at a time on each. A refusal closes a channel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[Channel] = []
        self._slots = asyncio.Semaphore(ASKED_TOGETHER)

    async def call(self, method: str, **arguments: Any) -> Any:
        async with self._slots:
            channel = await self._open_channel()
            try:
                answer = await channel.call(method, **arguments)
            except BaseException:
                channel.abandon()  # an answer may still come: pika would let the next call wait behind it
                raise
            self._idle.append(channel)
            return answer

    async def _open_channel(self) -> Channel:
        while self._idle:
            if (channel := self._idle.pop()).is_open:
                return channel
        return await self._connection.channel()


class Queues:
    """Makes, inspects and removes queues."""

    def __init__(self, connection: Connection, delivery_limit: int) -> None:
        self.connection = connection
        self._delivery_limit = delivery_limit
        self._call = _Channels(connection).call
        self._making = SharedAttempts[None]()
        self._made: dict[str, _Kind] = {}
        self._declared: dict[str, None] = {}  # those that should be there, even if somebody deletes one
        self._delays: dict[str, _Delay] = {}  # the queues in which messages wait
        self._for_replies: dict[str, None] = {}  # those of clients, who read them and nothing else
        self._inspected: dict[str, None] = {}  # those of others: a warning was logged if they lose messages

    @property
    def names(self) -> list[str]:
        """The queues that this process used lately and may look at: AMQP cannot list those of the server."""
        visible = (name for name, kind in self._made.items() if kind is not _Kind.HIDDEN and name not in self._delays)
        return [name for name in dict.fromkeys([*visible, *self._declared]) if not is_dlq(name)]

    def is_ours(self, name: str) -> bool:
        """Return True for a queue that counts deliveries: we made it, or would have made it in the same way."""
        return self._made.get(name) is _Kind.OURS

    def is_made(self, name: str) -> bool:
        return name in self._made

    def forget_made(self, name: str) -> None:
        self._made.pop(name, None)

    def note_replies(self, names: Iterable[str]) -> None:
        for name in names:
            _remember(self._for_replies, name, None)

    # -- making ---------------------------------------------------------------------------------------------------

    async def declare(self, names: Iterable[str]) -> None:
        """Make each queue that should be there from now on, and its dead-letter queue."""
        await all_of(*map(self._declare_with_dead_letters, dict.fromkeys(map(source_name, names))))

    async def _declare_with_dead_letters(self, name: str) -> None:
        if fault := name_fault(name):
            raise BrokerError(fault)
        if _is_reserved(name):
            await self._find(name)
        else:
            await self._make(dlq_of(name), _quorum(_NO_LIMIT))  # first, so that no dead letter finds it missing
            await self._make(name, self._arguments(name))
        _remember(self._declared, name, None)

    async def ensure(self, name: str) -> None:
        """Make a queue so that something can be sent to it."""
        await self._making.result(name, lambda: self._ensure(name))

    async def _ensure(self, name: str) -> None:
        if is_dlq(name) or (name_fault(name) and name not in self._delays):
            await self._declare_with_dead_letters(source_name(name))
        elif (delay := self._delays.get(name)) is not None:
            await self._make_delay(name, delay)
        elif _is_reserved(name):
            await self._find(name)
        else:
            kind = await self._make(name, self._arguments(name))
            # Others may name a queue for each reply and leave it behind. If a reply is rejected there, RabbitMQ keeps
            # it until it has a place.
            if kind is _Kind.OURS and name not in self._for_replies:
                await self._make(dlq_of(name), _quorum(_NO_LIMIT))

    def delay(self, name: str, seconds: float) -> str:
        """Return the queue in which messages for `name` wait that long, or a little longer. Publishing makes it.

        It stays: a quorum queue that expires is deleted with what is in it, even if it was declared again meanwhile.
        """
        milliseconds = _rounded_up(seconds)
        waiting = f"{name}.retry.{milliseconds}"
        _remember(self._delays, waiting, _Delay(name, milliseconds))
        return waiting

    async def _make_delay(self, waiting: str, delay: _Delay) -> None:
        """Make a queue to wait in, and let it grow old. Raises Refused when somebody has a queue of that name."""
        arguments = _quorum(_NO_LIMIT) | {"x-message-ttl": delay.milliseconds} | _dead_letters_to(delay.source)
        await self._call("queue_declare", queue=waiting, durable=True, arguments=arguments)
        await asyncio.sleep(YOUNG)
        _remember(self._made, waiting, _Kind.OURS)

    async def _find(self, name: str) -> None:
        """Find a queue that only the server can make."""
        kind = _Kind.THEIRS
        try:
            is_there = await self.depth(name) is not None
        except Refused as refusal:
            if refusal.code not in _UNSEEN:
                raise
            is_there, kind = True, _Kind.HIDDEN  # if it is not there, what is sent to it comes back
        if not is_there:
            self.forget_made(name)
            why = "RabbitMQ alone makes those that begin with 'amq.'"
            if _is_direct_reply(name):
                why = "direct reply-to works only within the client's own connection: name a queue of yours"
            raise Refused(NOT_FOUND, f"there is no queue {name}, and {why}")
        _remember(self._made, name, kind)

    async def _make(self, name: str, arguments: dict[str, Any]) -> _Kind:
        kind = await self._declare(name, arguments)
        _remember(self._made, name, kind)
        return kind

    async def _declare(self, name: str, arguments: dict[str, Any]) -> _Kind:
        try:
            await self._call("queue_declare", queue=name, durable=True, arguments=arguments)
        except Refused as refusal:
            self.forget_made(name)  # if it is refused for good, it is asked for again before anything is sent
            if refusal.code == LOCKED:
                return _Kind.HIDDEN
            if await self.depth(name) is None:
                raise
            await self._warn_of_loss(name, refusal)
            return _Kind.STREAM if _IS_STREAM in str(refusal) else _Kind.THEIRS
        return _Kind.OURS

    def refuse_stream(self, name: str) -> None:
        """Raise BrokerError for a stream: its reader gets nothing that came before, and settles nothing."""
        if self._made.get(name) is _Kind.STREAM:
            raise BrokerError(
                f"{name} is a stream of RabbitMQ, which cannot be read as a queue: delete it, or rename it"
            )

    async def _warn_of_loss(self, name: str, refusal: Refused) -> None:
        """Log once why somebody's queue may lose messages. How long a reply is kept is its client's to say."""
        if name in self._inspected or name in self._for_replies:
            return
        _remember(self._inspected, name, None)
        differing = _differing(refusal)
        if differing == "x-dead-letter-exchange":  # the server names it first; what else differs may be worse
            differing = await self._difference_from_plain(name)
        reason = _LOSSES.get(differing)
        if reason is None and _LACKS_DEAD_LETTERS.search(str(refusal)):
            reason = _NO_DEAD_LETTERS
        if reason is not None:
            _log.warning(MAY_LOSE, queue=name, reason=reason)

    async def _difference_from_plain(self, name: str) -> str:
        """Return what tells an existing queue from one of its type without any further arguments."""
        for arguments in ({}, {"x-queue-type": "quorum"}):
            try:
                await self._call("queue_declare", queue=name, durable=True, arguments=arguments)
                break
            except Refused as refusal:
                if (differing := _differing(refusal)) != "x-queue-type":
                    return differing
        return ""

    def _arguments(self, name: str) -> dict[str, Any]:
        return _quorum(self._delivery_limit - 1) | _dead_letters_to(dlq_of(name))

    # -- inspecting -----------------------------------------------------------------------------------------------

    async def depth(self, name: str) -> Depth | None:
        """Return the counts of a queue; None when there is no such queue."""
        if not 0 < len(name.encode()) <= _LONGEST_NAME or _is_broken(name) or _is_direct_reply(name):
            return None  # AMQP takes the empty name for the last one declared
        kind = self._made.get(name)
        try:
            found = await self._call("queue_declare", queue=name, passive=True)
        except Refused as refusal:
            if refusal.code == NOT_FOUND:
                return None
            if refusal.code in _UNSEEN and kind is not None:
                self._made[name] = _Kind.HIDDEN
            raise
        if kind is _Kind.HIDDEN:
            self._made[name] = _Kind.THEIRS
        return Depth(int(found.message_count), int(found.consumer_count))

    async def looks_empty(self, name: str) -> bool:
        """Return True when a queue shows no message; False when nothing is known of it."""
        try:
            depth = await self.depth(name)
        except (BrokerError, AMQPError, OSError):
            return False
        return depth is None or not depth.messages

    async def delayed(self, name: str) -> int:
        """Return how many messages of `name` wait for a delay that this process asked for."""
        depths = [await self.depth(waiting) for waiting in self._delays_of(name)]
        return sum(depth.messages for depth in depths if depth)

    def forget_gone(self, name: str) -> None:
        """Forget a queue that was not found, unless it should be there: the reply queue of a client that left, say.

        Each look at one costs a channel, and a line in the server's log.
        """
        if name not in self._declared:
            self.forget_made(name)

    async def ping(self) -> None:
        """Ask the server something that changes nothing."""
        await self._call("basic_qos", prefetch_count=0)

    def _delays_of(self, name: str) -> list[str]:
        return [waiting for waiting, delay in self._delays.items() if delay.source == name]

    # -- removing -------------------------------------------------------------------------------------------------

    async def remove(self, names: Iterable[str]) -> None:
        """Delete queues and all beside them. Delays of other processes stay behind and empty themselves."""
        for name in dict.fromkeys(source_name(name) for name in names):
            if not name_fault(name):
                await self._delete([name, dlq_of(name), *self._delays_of(name)])

    async def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            await self._call("queue_delete", queue=name)
        self._forget(names)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            for table in (self._made, self._declared, self._delays):
                table.pop(name, None)


def _remember(table: dict[str, Value], name: str, value: Value) -> None:
    """Put an entry last. A full table forgets its first: that queue is declared again when it is next needed."""
    table.pop(name, None)
    if len(table) >= _MAX_NAMES:
        del table[next(iter(table))]
    table[name] = value


def _differing(refusal: Refused) -> str:
    found = _DIFFERS.search(str(refusal))
    return found[1] if found else ""


def name_fault(name: str) -> str | None:
    """Return why RabbitMQ cannot have a queue of that name, with those beside it."""
    most = _LONGEST_NAME - _LONGEST_SUFFIX
    if _is_broken(name):
        return f"RabbitMQ cannot have the queue {shown(name)}: it leaves line feeds and carriage returns out of a name"
    if 0 < len(name.encode()) <= most:
        return None
    return f"RabbitMQ cannot have the queue {shown(name)}: a name has 1 to {most} bytes; this one {len(name.encode())}"


def _is_broken(name: str) -> bool:
    """Return True for a name of several lines.

    RabbitMQ makes, and deletes, the queue that is named so without the breaks, and publishes to none. Its answer has
    that other name, and pika waits for one with ours.
    """
    return "\n" in name or "\r" in name


def _is_reserved(name: str) -> bool:
    return name.startswith("amq.")


def _is_direct_reply(name: str) -> bool:
    """Return True for a queue that RabbitMQ shows as existing, and that takes nothing from other connections."""
    return name.startswith("amq.rabbitmq.")


def _quorum(limit: int) -> dict[str, Any]:
    """Return the arguments of a quorum queue. A limit of n lets a message be delivered n + 1 times."""
    return {"x-queue-type": "quorum", "x-delivery-limit": limit}


def _dead_letters_to(name: str) -> dict[str, Any]:
    return {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": name,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",  # the strategy asks for it; there is no maximum to pass
    }


def _rounded_up(seconds: float) -> int:
    """Return the next step, in milliseconds."""
    wanted = min(seconds, _LONGEST_DELAY) * 1000
    return next(delay for delay in _DELAYS if delay >= wanted)
