"""The queues as RabbitMQ has them: how they are made, and what is in them.

Each is a quorum queue on the default exchange. The server itself moves what was delivered too often, or rejected by a
plain client, to `<queue>.dlq`, and lets go of it only once it is there (`at-least-once`). A queue that somebody made in
another way is used as it is.

Limits are set on every queue for a second reason: with one a message that is given back keeps its place; without, it
goes to the end. RabbitMQ 4 has a limit of 20 where none is set, and drops what passes it.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import structlog

from oraculo.brokers.rabbitmq.connection import ACCESS_REFUSED, LOCKED, NOT_FOUND, Channel, Connection, Refused
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import MAY_LOSE
from oraculo.wire.naming import dlq_of, is_dlq, shown, source_name

LOOKS_TOGETHER = 4  # each on a channel of its own, for the answer to one is awaited before the next is asked
_NO_LIMIT = 1_000_000_000
DECLARED_TOGETHER = 16  # queues: a slow disk has to make them, and those of their dead letters, in the time of a call
_STEPS = (100, 150, 200, 300, 400, 500, 600, 800)  # delays of one decade: each makes a queue, so there are few
_DELAYS: list[int] = [step * 10**decade for decade in range(7) for step in _STEPS]  # in ms, up to a week
# Seconds. RabbitMQ writes down the name of a new quorum queue about half a second after it confirmed what it was sent:
# killed before that, it starts without what is in the queue.
_YOUNG = 1.0
_MOST_NAMES = 10_000  # that are remembered in each table; a queue for each answer would fill the memory
_LONGEST_NAME = 255
_IS_STREAM = "but current is 'stream'"  # what RabbitMQ says when a stream is declared as something else
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
_LONGEST_SUFFIX = len(".retry.") + 10  # what is put behind a name for a queue beside it; the longest delay in ms
_LONGEST_DELAY = 7 * 24 * 3600.0

_log = structlog.get_logger("oraculo.brokers.rabbitmq")

Value = TypeVar("Value")


class NotDelayed(BrokerError):
    """There is no queue in which a message could wait, and RabbitMQ does not let us make it."""


class Depth(NamedTuple):
    messages: int
    consumers: int


class _Delay(NamedTuple):
    source: str  # the queue that the messages come from and go back to
    milliseconds: int
    trusted_at: float = 0.0  # by the loop's time: from then on it keeps what it confirms


class _Desk:
    """A channel on which one at a time is asked, and that is made again when the server closes it: a refusal does, and
    must be told to nobody else."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self.callers = 0  # who are asking, or wait for their turn

    async def call(self, method: str, **arguments: Any) -> Any:
        return await self.in_turn(lambda channel: channel.call(method, **arguments))

    async def in_turn(self, ask: Callable[[Channel], Awaitable[Value]]) -> Value:
        self.callers += 1
        try:
            async with asyncio.timeout(self._timeout), self._turn:
                if self._channel is None or not self._channel.is_open:
                    self._channel = await self._connection.channel()
                return await self._answered(self._channel, ask)
        except TimeoutError:
            raise BrokerUnavailable(f"RabbitMQ did not answer in {self._timeout} s") from None
        finally:
            self.callers -= 1

    async def _answered(self, channel: Channel, ask: Callable[[Channel], Awaitable[Value]]) -> Value:
        """A channel on which an answer is still to come is left to it: pika would let the next call wait behind it,
        for ever if it never comes."""
        try:
            return await ask(channel)
        except BaseException:
            self._channel = None
            channel.abandon()
            raise


class Queues:
    """Makes queues, and looks at several at once."""

    def __init__(self, connection: Connection, delivery_limit: int, timeout: float) -> None:
        self._delivery_limit = delivery_limit
        self._desks = [_Desk(connection, timeout) for _ in range(LOOKS_TOGETHER)]
        self._call = self._desks[0].call
        self._made: dict[str, bool] = {}  # whether it is as we would make it; False: somebody else's
        self._declared: dict[str, None] = {}  # those that are to be there, even if somebody deletes one
        self._locked: dict[str, None] = {}  # another's: we can send there, and not look
        self._delays: dict[str, _Delay] = {}  # the queues in which messages wait
        self._begun: dict[str, None] = {}  # those that were asked for, and maybe made: no answer came, or not yet
        self._streams: dict[str, None] = {}  # somebody's own that are no queues
        self._for_replies: dict[str, None] = {}  # those of clients, who read them and nothing else
        self._looked_through: dict[str, None] = {}  # somebody's own: whether it loses messages was told

    @property
    def names(self) -> list[str]:
        """The queues this process has had to do with of late, and can look at: AMQP cannot list those of the server."""
        known = dict.fromkeys([*(name for name in self._made if name not in self._locked), *self._declared])
        return [name for name in known if not is_dlq(name)]

    def is_ours(self, name: str) -> bool:
        """Whether it counts deliveries: a quorum queue that we made, or would have made in the same way."""
        return self._made.get(name, False)

    def unmade(self, names: Iterable[str]) -> list[str]:
        """Those that were not seen yet."""
        return [name for name in names if name not in self._made and name not in self._delays]

    def note_replies(self, names: Iterable[str]) -> None:
        for name in names:
            _remember(self._for_replies, name, None)

    async def ensure(self, name: str) -> None:
        """Makes it so that something can be sent to it. To somebody else's, as a reply queue is that lives as long as
        its client, no dead-letter queue is put beside; nor to one that is made for a reply, which a client may name
        anew for each and leave behind. Should anything be rejected there, RabbitMQ keeps it until it has a place."""
        if _is_reserved(name) and not _is_broken(name):
            await self._find(name)
        elif is_dlq(name) or name_fault(name):
            await self.declare([name])
        else:
            made = await self._declare(name, self._arguments(name))
            if made is not False and name not in self._for_replies:
                await self._make(dlq_of(name), _quorum(_NO_LIMIT))
            _remember(self._made, name, bool(made))

    async def ensure_together(self, names: Sequence[str]) -> bool:
        """As `ensure` does each, in a few round trips for all. False when one of them is not as we would make it: then
        nothing is known of any."""
        if any(_is_reserved(name) or is_dlq(name) or name_fault(name) for name in names):
            return False
        beside = [dlq_of(name) for name in names if name not in self._for_replies]
        for wanted in ({name: self._arguments(name) for name in names}, dict.fromkeys(beside, _quorum(_NO_LIMIT))):
            if wanted and not await self._are_declared(wanted):
                return False
        self._remember_as_ours([*beside, *names])
        return True

    async def declare(self, names: Iterable[str]) -> None:
        """Makes each, and its dead-letter queue before it, so that no dead letter finds it missing."""
        every = list(dict.fromkeys(source_name(name) for name in names))
        sources = [name for name in every if not name_fault(name)]
        for some in pages(sources, DECLARED_TOGETHER):
            if len(some) == 1 or not await self._declare_together(some):
                for name in some:
                    await self._declare_alone(name)
            for name in some:
                _remember(self._declared, name, None)
        for fault in filter(None, map(name_fault, every)):
            raise BrokerError(fault)

    async def _declare_together(self, names: Sequence[str]) -> bool:
        """Whether they are as we would make them."""
        if any(map(_is_reserved, names)):
            return False
        wanted = {
            queue: arguments
            for name in names
            for queue, arguments in ((dlq_of(name), _quorum(_NO_LIMIT)), (name, self._arguments(name)))
        }
        if not await self._are_declared(wanted):
            return False
        self._remember_as_ours(wanted)
        return True

    async def _are_declared(self, wanted: Mapping[str, dict[str, Any]]) -> bool:
        """Without an answer for each, for which RabbitMQ would count what is in the queue. When it refuses one, nothing
        is known of any: the channel is closed."""

        async def declare(channel: Channel) -> None:
            for queue, arguments in wanted.items():
                channel.tell("queue_declare", queue=queue, durable=True, arguments=arguments)
            await channel.call("basic_qos", prefetch_count=0)  # answered when all that was told before is done

        try:
            await self._least_busy_desk().in_turn(declare)
        except Refused:
            return False
        return True

    def _least_busy_desk(self) -> _Desk:
        return min(self._desks, key=lambda desk: desk.callers)

    def _remember_as_ours(self, names: Iterable[str]) -> None:
        for name in names:
            self._streams.pop(name, None)
            self._locked.pop(name, None)
            _remember(self._made, name, True)

    async def _declare_alone(self, name: str) -> None:
        if _is_reserved(name):
            await self._find(name)
        else:
            await self._make(dlq_of(name), _quorum(_NO_LIMIT))
            await self._make(name, self._arguments(name))

    def refuse_stream(self, name: str) -> None:
        """Of one that was just declared. Who reads a stream gets nothing that came before, and settles nothing."""
        if name in self._streams:
            raise BrokerError(
                f"{name} is a stream of RabbitMQ, which cannot be read as a queue: delete it, or rename it"
            )

    async def delay(self, name: str, seconds: float) -> str:
        """The queue in which a message for `name` waits that long, or a little longer. It is made where it is missing.

        These stay: a quorum queue that expires is deleted with what is in it, even if it was declared again meanwhile.
        Raises NotDelayed.
        """
        milliseconds = _rounded_up(seconds)
        waiting = _delay_name(name, milliseconds)
        if waiting in self._delays:
            _remember(self._delays, waiting, self._delays[waiting])
        else:
            try:
                await self._declare_delay(waiting, _Delay(name, milliseconds))
            except Refused as refusal:
                raise NotDelayed(str(refusal)) from refusal
        await self._until_trusted(waiting)
        return waiting

    async def _until_trusted(self, waiting: str) -> None:
        """Returns when messages may leave their own queue for it."""
        if (delay := self._delays.get(waiting)) is not None:
            await asyncio.sleep(delay.trusted_at - asyncio.get_running_loop().time())

    async def remake(self, names: Iterable[str]) -> set[str]:
        """Those that vanished while something was published to them. Returns those that the server let us make."""
        made = set[str]()
        for name in names:
            with suppress(Refused):
                await (self._declare_delay(name, delay) if (delay := self._delays.get(name)) else self.ensure(name))
                await self._until_trusted(name)
                made.add(name)
        return made

    async def remove(self, names: Iterable[str]) -> None:
        """With the queues in which this process let its messages wait: AMQP cannot list those of others, which stay
        behind, and empty themselves."""
        for name in dict.fromkeys(source_name(name) for name in names):
            if name_fault(name):
                continue
            delays = [waiting for waiting, delay in self._delays.items() if delay.source == name]
            for each in (name, dlq_of(name), *delays):
                await self._call("queue_delete", queue=each)
                for table in (self._made, self._declared, self._delays):
                    table.pop(each, None)

    async def remove_unused(self, names: Iterable[str]) -> list[str]:
        """Also tells of those that are not there. One that is not as we would make it is somebody's own, and stays."""
        return [name for name in names if await self._is_removed_unused(source_name(name))]

    async def _is_removed_unused(self, name: str) -> bool:
        if _is_reserved(name) or name_fault(name):
            return False
        delays = [waiting for waiting, delay in self._delays.items() if delay.source == name]
        beside = dlq_of(name), *delays
        # Before the queue and after it: a message that moves between two looks, either way, is seen by one of them.
        found = [(each, await self.depth(each)) for each in (*beside, name, *beside)]
        there = dict.fromkeys(each for each, depth in found if depth is not None)
        if any(depth is not None and (depth.messages or depth.consumers) for _, depth in found):
            return False
        if name in there and await self._declare(name, self._arguments(name)) is not True:
            return False
        for each in there:
            await self._call("queue_delete", queue=each)
        for table in (self._made, self._declared, self._delays):
            for each in (name, *beside):
                table.pop(each, None)
        return True

    async def depth(self, name: str) -> Depth | None:
        """None when there is no such queue."""
        if not 0 < len(name.encode()) <= _LONGEST_NAME or _is_broken(name) or _is_direct_reply(name):
            return None  # AMQP takes no name for the last one declared
        try:
            found = await self._least_busy_desk().call("queue_declare", queue=name, passive=True)
        except Refused as refusal:
            if refusal.code in _UNSEEN:
                _remember(self._locked, name, None)
            if refusal.code == NOT_FOUND:
                return None
            raise
        self._locked.pop(name, None)
        return Depth(int(found.message_count), int(found.consumer_count))

    def forget(self, name: str) -> None:
        """One that was looked for in vain, unless it is to be there: the reply queue of a client that has gone, say.
        Each such look costs a channel, and leaves a line in the server's log."""
        if name not in self._declared:
            self._made.pop(name, None)

    async def delayed(self, name: str) -> int:
        """How many messages of `name` wait for a delay that this process asked for."""
        depths = [await self.depth(waiting) for waiting, delay in list(self._delays.items()) if delay.source == name]
        return sum(depth.messages for depth in depths if depth)

    async def ping(self) -> None:
        """A round trip that changes nothing."""
        await self._call("basic_qos", prefetch_count=0)

    async def _declare_delay(self, waiting: str, delay: _Delay) -> None:
        """Raises Refused also when somebody has a queue of that name: nothing might ever come back from it."""
        is_new = await self.depth(waiting) is None or waiting in self._begun
        _remember(self._begun, waiting, None)
        arguments = _quorum(_NO_LIMIT) | {"x-message-ttl": delay.milliseconds} | _dead_letters_to(delay.source)
        if await self._declare(waiting, arguments) is False:
            await self._declare_plain(waiting, arguments)
        self._begun.pop(waiting, None)
        if is_new:
            _remember(self._delays, waiting, delay._replace(trusted_at=asyncio.get_running_loop().time() + _YOUNG))
        else:  # maybe because another call has made it just now
            _remember(self._delays, waiting, self._delays.get(waiting, delay))

    async def _find(self, name: str) -> None:
        """One of those that only the server can make."""
        try:
            is_there = await self.depth(name) is not None
        except Refused as refusal:
            if refusal.code not in _UNSEEN:
                raise
            is_there = True  # if it is not, what is sent there comes back
        if not is_there:
            self._made.pop(name, None)
            why = "RabbitMQ alone makes those that begin with 'amq.'"
            if _is_direct_reply(name):
                why = "direct reply-to works only within the client's own connection: name a queue of yours"
            raise Refused(NOT_FOUND, f"there is no queue {name}, and {why}")
        _remember(self._made, name, False)

    def _arguments(self, name: str) -> dict[str, Any]:
        return _quorum(self._delivery_limit - 1) | _dead_letters_to(dlq_of(name))

    async def _make(self, name: str, arguments: dict[str, Any]) -> None:
        _remember(self._made, name, bool(await self._declare(name, arguments)))

    async def _declare(self, name: str, arguments: dict[str, Any]) -> bool | None:
        """Whether it is now as these arguments say: False when it is somebody's own, None when it was made as well as
        this server can."""
        self._locked.pop(name, None)
        try:
            await self._call("queue_declare", queue=name, durable=True, arguments=arguments)
        except Refused as refusal:
            self._made.pop(name, None)  # if it is refused for good, it is asked for again before anything is sent
            if _IS_STREAM in str(refusal):
                _remember(self._streams, name, None)
            if refusal.code == LOCKED:
                _remember(self._locked, name, None)
                return False
            if await self.depth(name) is not None:
                await self._warn_of_loss(name, refusal)
                return False
            await self._declare_plain(name, arguments)
            return None
        self._streams.pop(name, None)
        return True

    async def _warn_of_loss(self, name: str, refusal: Refused) -> None:
        """Once for each, but for a client's own: how long its replies are kept is the client's to say. That it has no
        dead letters RabbitMQ says before it speaks of what else it has, which may be worse."""
        if name in self._looked_through or name in self._for_replies:
            return
        _remember(self._looked_through, name, None)
        differing = _differing(refusal)
        if differing == "x-dead-letter-exchange":
            differing = await self._difference_from_plain(name)
        reason = _LOSSES.get(differing)
        if reason is None and _LACKS_DEAD_LETTERS.search(str(refusal)):
            reason = _NO_DEAD_LETTERS
        if reason is not None:
            _log.warning(MAY_LOSE, queue=name, reason=reason)

    async def _difference_from_plain(self, name: str) -> str:
        """Of a queue that is there, from one of its type without any further arguments."""
        for arguments in ({}, {"x-queue-type": "quorum"}):
            try:
                await self._call("queue_declare", queue=name, durable=True, arguments=arguments)
                break
            except Refused as refusal:
                if (differing := _differing(refusal)) != "x-queue-type":
                    return differing
        return ""

    async def _declare_plain(self, name: str, arguments: dict[str, Any]) -> None:
        plain = {key: value for key, value in arguments.items() if key in _CLASSIC_ARGUMENTS}
        await self._call("queue_declare", queue=name, durable=True, arguments=plain)


def _remember(table: dict[str, Value], name: str, value: Value) -> None:
    """As the last one. The first is forgotten when there are too many: it is declared again when it is next needed."""
    table.pop(name, None)
    if len(table) >= _MOST_NAMES:
        del table[next(iter(table))]
    table[name] = value


def _differing(refusal: Refused) -> str:
    found = _DIFFERS.search(str(refusal))
    return found[1] if found else ""


def _delay_name(name: str, milliseconds: int) -> str:
    return f"{name}.retry.{milliseconds}"


def name_fault(name: str) -> str | None:
    """Why RabbitMQ cannot have a queue of that name, with those beside it."""
    most = _LONGEST_NAME - _LONGEST_SUFFIX
    if _is_broken(name):
        return f"RabbitMQ cannot have the queue {shown(name)}: it leaves line feeds and carriage returns out of a name"
    if 0 < len(name.encode()) <= most:
        return None
    return f"RabbitMQ cannot have the queue {shown(name)}: a name has 1 to {most} bytes; this one {len(name.encode())}"


def _is_broken(name: str) -> bool:
    """Into lines. RabbitMQ makes, and deletes, the queue that is named so without the breaks, and publishes to none.
    Its answer has that other name, and pika waits for one with ours."""
    return "\n" in name or "\r" in name


def _is_reserved(name: str) -> bool:
    return name.startswith("amq.")


def _is_direct_reply(name: str) -> bool:
    """RabbitMQ says that such a queue is there, and sends back, as without any, what is published to it."""
    return name.startswith("amq.rabbitmq.")


# Exclusive to another connection, or one that our user has no right to: RabbitMQ 4.2.6 and later do not even show it.
_UNSEEN = frozenset({LOCKED, ACCESS_REFUSED})
_CLASSIC_ARGUMENTS = frozenset({"x-message-ttl", "x-dead-letter-exchange", "x-dead-letter-routing-key"})


def _quorum(limit: int) -> dict[str, Any]:
    """A limit of n lets a message be delivered n + 1 times."""
    return {"x-queue-type": "quorum", "x-delivery-limit": limit}


def _dead_letters_to(name: str) -> dict[str, Any]:
    return {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": name,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",  # the strategy asks for it; there is no maximum to pass
    }


def _rounded_up(seconds: float) -> int:
    """The next step, in milliseconds."""
    wanted = min(seconds, _LONGEST_DELAY) * 1000
    return next(delay for delay in _DELAYS if delay >= wanted)
