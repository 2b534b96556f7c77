"""The queues as RabbitMQ has them: how they are made, and what is in them.

Each is a quorum queue on the default exchange. The server itself moves what was delivered too often, or rejected by a
plain client, to `<queue>.dlq`, and lets go of it only once it is there (`at-least-once`). A queue that somebody made in
another way is used as it is.

Limits are set on every queue for a second reason: with one a message that is given back keeps its place; without, it
goes to the end. RabbitMQ 4 has a limit of 20 where none is set, and drops what passes it.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from oraculo.brokers.rabbitmq.connection import NOT_FOUND, Channel, Connection, Refused
from oraculo.core.naming import DLQ_SUFFIX, dlq_of, shown
from oraculo.errors import BrokerError, BrokerUnavailable

NO_LIMIT = 1_000_000_000
_STEPS = (100, 150, 200, 300, 400, 500, 600, 800)  # delays of one decade: each makes a queue, so there are few
_MOST_NAMES = 10_000  # that are remembered in each table; a queue for each answer would fill the memory
_LIMIT_OF_SERVER = 20  # RabbitMQ 4, where nobody set one
_LIMIT_UNKNOWN = 2  # of a queue whose limit nobody told: as good as the lowest
_LONGEST_NAME = 255
_LONGEST_SUFFIX = len(".retry.") + 10  # what is put behind a name for a queue beside it; the longest delay in ms
_LONGEST_DELAY = 7 * 24 * 3600.0
_LIMIT_TOLD = re.compile(r"'x-delivery-limit' .*current is (?:(none)|(?:the value )?'(\d+)')")

Value = TypeVar("Value")


class Depth(NamedTuple):
    messages: int
    consumers: int


class _Delay(NamedTuple):
    source: str  # the queue that the messages come from and go back to
    milliseconds: int


class Queues:
    """Makes and looks at queues, on one channel that is made again when the server closes it."""

    def __init__(self, connection: Connection, delivery_limit: int, timeout: float) -> None:
        self._connection = connection
        self._delivery_limit = delivery_limit
        self._timeout = timeout
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._made: dict[str, bool] = {}  # whether it is as we would make it; False: somebody else's
        self._limits: dict[str, int] = {}  # how often those of somebody else let a message be given back
        self._delays: dict[str, _Delay] = {}  # the queues in which messages wait

    @property
    def names(self) -> list[str]:
        """The queues this process has had to do with of late: AMQP cannot list those of the server."""
        return list(dict.fromkeys(source_name(name) for name in self._made))

    def is_ours(self, name: str) -> bool:
        """Whether it counts deliveries: a quorum queue that we made, or would have made in the same way."""
        return self._made.get(name, False)

    def unmade(self, names: Iterable[str]) -> list[str]:
        """Those that were not seen yet."""
        return [name for name in names if name not in self._made and name not in self._delays]

    async def ensure(self, names: Iterable[str]) -> None:
        """Makes those that were not seen yet."""
        for name in self.unmade(names):
            await self.declare([name])

    async def declare(self, names: Iterable[str]) -> None:
        """Makes each, and its dead-letter queue before it, so that no dead letter finds it missing."""
        for name in dict.fromkeys(source_name(name) for name in names):
            if fault := name_fault(name):
                raise BrokerError(fault)
            await self._make(dlq_of(name), _quorum(NO_LIMIT))
            await self._make(name, _quorum(self._delivery_limit - 1) | _dead_letters_to(dlq_of(name)))

    async def letter_limit(self, name: str) -> int | None:
        """How often a letter can be given back to this dead-letter queue before the server drops it. None: always, for
        the queue is ours, or is not there."""
        if name not in self._made and await self.depth(name) is not None:
            await self._make(name, _quorum(NO_LIMIT))
        return None if self._made.get(name, True) else self._limits.get(name, _LIMIT_UNKNOWN)

    async def delay(self, name: str, seconds: float) -> str:
        """The queue in which a message for `name` waits that long, or a little longer. It is made where it is missing.

        These stay: a quorum queue that expires is deleted with what is in it, even if it was declared again meanwhile.
        """
        milliseconds = _rounded_up(seconds)
        waiting = f"{name}.retry.{milliseconds}"
        if waiting in self._delays:
            _remember(self._delays, waiting, self._delays[waiting])
        else:
            await self._declare_delay(waiting, _Delay(name, milliseconds))
        return waiting

    async def remake(self, names: Iterable[str]) -> None:
        """Those that vanished while something was published to them."""
        for name in names:
            if name in self._delays:
                await self._declare_delay(name, self._delays[name])
            else:
                await self.declare([name])

    async def depth(self, name: str) -> Depth | None:
        """None when there is no such queue."""
        if not 0 < len(name.encode()) <= _LONGEST_NAME:  # AMQP takes no name for the last one declared
            return None
        try:
            found = await self._call("queue_declare", queue=name, passive=True)
        except Refused as refusal:
            if refusal.code == NOT_FOUND:
                return None
            raise
        return Depth(int(found.message_count), int(found.consumer_count))

    async def delayed(self, name: str) -> int:
        """How many messages of `name` wait for a delay that this process asked for."""
        depths = [await self.depth(waiting) for waiting, delay in list(self._delays.items()) if delay.source == name]
        return sum(depth.messages for depth in depths if depth)

    async def ping(self) -> None:
        """A round trip that changes nothing."""
        await self._call("basic_qos", prefetch_count=0)

    async def _declare_delay(self, waiting: str, delay: _Delay) -> None:
        ttl = {"x-message-ttl": delay.milliseconds}
        await self._declare(waiting, _quorum(NO_LIMIT) | ttl | _dead_letters_to(delay.source))
        _remember(self._delays, waiting, delay)

    async def _make(self, name: str, arguments: dict[str, Any]) -> None:
        _remember(self._made, name, await self._declare(name, arguments))

    async def _declare(self, name: str, arguments: dict[str, Any]) -> bool:
        """Whether it is now as these arguments say; else it is somebody's own, or the best that this server has."""
        try:
            await self._call("queue_declare", queue=name, durable=True, arguments=arguments)
        except Refused as refusal:
            if told := _LIMIT_TOLD.search(str(refusal)):
                _remember(self._limits, name, _LIMIT_OF_SERVER if told[1] else int(told[2]))
            if await self.depth(name) is None:
                plain = {key: value for key, value in arguments.items() if key in _CLASSIC_ARGUMENTS}
                await self._call("queue_declare", queue=name, durable=True, arguments=plain)
            return False
        return True

    async def _call(self, method: str, **arguments: Any) -> Any:
        """One at a time: a refusal closes the channel, and must be told to nobody else."""
        try:
            async with asyncio.timeout(self._timeout), self._turn:
                if self._channel is None or not self._channel.is_open:
                    self._channel = await self._connection.channel()
                return await self._channel.call(method, **arguments)
        except TimeoutError:
            raise BrokerUnavailable(f"RabbitMQ did not answer in {self._timeout} s") from None


def _remember(table: dict[str, Value], name: str, value: Value) -> None:
    """As the last one. The first is forgotten when there are too many: it is declared again when it is next needed."""
    table.pop(name, None)
    if len(table) >= _MOST_NAMES:
        del table[next(iter(table))]
    table[name] = value


def source_name(name: str) -> str:
    return name.removesuffix(DLQ_SUFFIX)


def dlq_name(name: str) -> str:
    """The dead-letter queue of `name`; a dead-letter queue is its own."""
    return name if is_dlq(name) else dlq_of(name)


def name_fault(name: str) -> str | None:
    """Why RabbitMQ cannot have a queue of that name, with those beside it."""
    most = _LONGEST_NAME - _LONGEST_SUFFIX
    if 0 < len(name.encode()) <= most:
        return None
    return f"RabbitMQ cannot have the queue {shown(name)}: a name has 1 to {most} bytes; this one {len(name.encode())}"


def is_dlq(name: str) -> bool:
    return name.endswith(DLQ_SUFFIX)


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
    wanted, scale = min(seconds, _LONGEST_DELAY) * 1000, 1
    while wanted > _STEPS[-1] * scale:
        scale *= 10
    return next(step * scale for step in _STEPS if step * scale >= wanted)
