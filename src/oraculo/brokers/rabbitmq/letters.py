"""What a message carries beside its body, and the quarantine.

AMQP has no way to look at a queue. So whoever looks at the dead letters takes all of them without settling them, and
gives them back: nothing is lost by it, whatever happens meanwhile, but while one process looks, another sees fewer. It
must be all: a quorum queue puts what is given back behind what was given back before, so that a part would change
places. Pages therefore go by the ids, which begin with the time of death, and not by the order of the queue.
"""

import asyncio
import re
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from pika import BasicProperties
from pika.exceptions import AMQPError

from oraculo.brokers.rabbitmq.connection import NOT_FOUND, Channel, Connection, Refused
from oraculo.brokers.rabbitmq.queues import dlq_name, source_name
from oraculo.brokers.rabbitmq.wire import Deliveries, Parcel
from oraculo.core.naming import shown
from oraculo.errors import BrokerError
from oraculo.ports.broker import DeadLetter

NO_REASON = "published to the dead-letter queue without a reason"
PERSISTENT = 2
CHUNK = 500  # dead letters that are moved at once
_PATIENCE = 1.0  # seconds without a letter that should be there: somebody else has it now
_MOST_PREFETCH = 65_535
_LONGEST_REASON = 4_000  # characters: all headers together must fit one frame
_LARGEST_HEADERS = 100_000

_OURS = "x-oraculo-"
REDELIVERIES = _OURS + "redeliveries"
_LETTER = _OURS + "letter"
_REASON = _OURS + "reason"
_DIED_AT = _OURS + "died-at"
_COUNTERS = ("x-delivery-count", "x-acquired-count")  # failures and, since RabbitMQ 4.3, all; a classic queue has none
# What the server wrote, or would act upon: CC and BCC would send copies of a message that only goes on its way.
_NOT_CARRIED = re.compile(rf"{_OURS}.*|x-delivery-count|x-acquired-count|x-death|x-(first|last)-death-.*|CC|BCC")
_DEATHS = {
    "delivery_limit": "delivered too often and never settled",
    "rejected": "rejected by its consumer",
    "expired": "expired before it was consumed",
    "maxlen": "the queue was full",
}
_ID = re.compile(r"[0-9a-f]{14}-[0-9a-f]{14}(-[0-9]+)?")  # when it died, and what tells it from others
_HAS_HEADERS = BasicProperties.FLAG_HEADERS

_process = uuid4().hex[:8]
_sequence = count()


# -- properties ---------------------------------------------------------------------------------------------------


def encoded(properties: BasicProperties) -> bytes:
    return b"".join(properties.encode())


def redeliveries_of(properties: bytes, is_redelivered: bool) -> int:
    """How often it was delivered before: as it carries with it, and as its queue counted since."""
    if not struct.unpack_from(">H", properties)[0] & _HAS_HEADERS:
        return int(is_redelivered)
    headers = _decoded(properties).headers or {}
    counted = max([_number(headers.get(counter)) for counter in _COUNTERS])
    return _number(headers.get(REDELIVERIES)) + max(counted, int(is_redelivered))


def carried(properties: bytes, **ours: str | int) -> bytes:
    """The properties of a message that goes to another queue: its own, less what belonged to the place it was in."""
    own = _decoded(properties)
    headers = {name: value for name, value in (own.headers or {}).items() if not _NOT_CARRIED.fullmatch(name)}
    own.delivery_mode = PERSISTENT
    own.expiration = own.user_id = None  # it may not vanish, and the server takes no other user's name from us
    own.headers = headers | ours or None
    with suppress(AMQPError, AssertionError, struct.error, TypeError):  # a type that pika reads but does not write
        if len(packed := encoded(own)) <= _LARGEST_HEADERS:
            return packed
    own.headers = dict(ours) or None
    return encoded(own)


def dead(properties: bytes, reason: str, at: float, redeliveries: int) -> bytes:
    """The properties of a dead letter. Its id says when it died, so that a later one is greater."""
    letter = f"{_time_part(at)}-{next(_sequence) % 0x1000000:06x}{_process}"
    told: dict[str, str | int] = {
        _LETTER: letter,
        _REASON: reason[:_LONGEST_REASON],
        _DIED_AT: repr(at),
        REDELIVERIES: redeliveries,
    }
    return carried(properties, **told)


def _time_part(at: float) -> str:
    return f"{int(max(at, 0.0) * 1_000_000):014x}"


def _decoded(properties: bytes) -> BasicProperties:
    return BasicProperties().decode(properties)


def _number(value: object) -> int:
    return int(value) if isinstance(value, int) else 0


# -- letters ------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    tag: int
    properties: bytes
    body: bytes


class _Reader:
    """Reads letters in their order. A plain client's has no id: it gets one by its content, and by how many of the
    same stand before it."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._same: Counter[str] = Counter()

    def letter(self, found: _Found) -> DeadLetter:
        properties = _decoded(found.properties)
        headers: dict[str, Any] = properties.headers or {}
        at = _died_at(properties, headers)
        letter = headers.get(_LETTER)
        is_ours = isinstance(letter, str) and _ID.fullmatch(letter) is not None
        return DeadLetter(
            str(letter) if is_ours else self._plain_id(properties, found.body, at),
            self._queue,
            found.body,
            _reason(headers),
            at,
            _number(headers.get(REDELIVERIES)),
        )

    def _plain_id(self, properties: BasicProperties, body: bytes, at: float) -> str:
        named = f"{properties.message_id}\0{properties.correlation_id}\0".encode(errors="replace")
        plain = f"{_time_part(at)}-{blake2b(named + body, digest_size=7).hexdigest()}"
        self._same[plain] += 1
        return plain if self._same[plain] == 1 else f"{plain}-{self._same[plain]}"


def _death(headers: dict[str, Any]) -> dict[str, Any]:
    """What the server wrote when it moved the message itself."""
    deaths = headers.get("x-death")
    return deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}


def _reason(headers: dict[str, Any]) -> str:
    if isinstance(told := headers.get(_REASON), str):
        return told
    if isinstance(death := _death(headers).get("reason"), str):
        return f"moved by RabbitMQ: {_DEATHS.get(death, death)}"
    return NO_REASON


def _died_at(properties: BasicProperties, headers: dict[str, Any]) -> float:
    """0 when nobody told: a plain client's letter has no time unless its client gave it one."""
    with suppress(ValueError, TypeError):
        return float(headers[_DIED_AT]) if _DIED_AT in headers else _told_by_server(properties, headers)
    return 0.0


def _told_by_server(properties: BasicProperties, headers: dict[str, Any]) -> float:
    time = _death(headers).get("time")
    return time.timestamp() if isinstance(time, datetime) else float(properties.timestamp or 0)


# -- the quarantine -----------------------------------------------------------------------------------------------


class _Visit:
    """The letters of one dead-letter queue, handed over in their order and held until the channel closes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._count = 0
        self._arrived: deque[_Found] = deque()
        self._signal = asyncio.Event()
        channel.on_close = lambda _: self._signal.set()
        channel.listen(Deliveries(self._on_message))

    def _on_message(self, tag: int, _: bool, properties: bytes, body: bytes) -> None:
        self._arrived.append(_Found(tag, properties, body))
        self._signal.set()

    async def enter(self, queue: str, window: int) -> None:
        """Asks for the first letter alone: only that answer tells how many there are, when some were just given
        back. A count that is asked for does not wait for them."""
        try:
            first = await self._channel.get(queue)
        except Refused as refusal:
            if refusal.code != NOT_FOUND:
                raise
            first = None
        if first is None:
            return
        method, properties, body = first
        self._arrived.append(_Found(method.delivery_tag, encoded(properties), body))
        self._count = method.message_count + 1
        if self._count > 1:
            prefetch = window or self._count - 1
            await self._channel.call("basic_qos", prefetch_count=prefetch if prefetch <= _MOST_PREFETCH else 0)
            await self._channel.call("basic_consume", queue=queue, on_message_callback=unused)

    async def leave(self) -> None:
        """First no more may come: what is given back while somebody consumes is delivered to him again."""
        if self._channel.fault is None:
            for tag in self._channel.raw.consumer_tags:
                await self._channel.call("basic_cancel", consumer_tag=tag)
            self._channel.raw.basic_nack(0, multiple=True, requeue=True)

    async def __aiter__(self) -> AsyncIterator[_Found]:
        for _ in range(self._count):
            while not self._arrived:
                if self._channel.fault is not None:
                    raise self._channel.fault
                if not await self._has_signal():
                    return
            yield self._arrived.popleft()

    def settle(self, letters: Sequence[_Found]) -> None:
        for found in letters:
            self._channel.raw.basic_ack(found.tag)

    async def _has_signal(self) -> bool:
        self._signal.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._signal.wait()
        return self._signal.is_set()


class Quarantine:
    """The dead letters of every queue. One at a time looks at those of a queue: two would hide them from each other."""

    def __init__(self, connection: Connection, publish: Callable[[Sequence[Parcel]], Awaitable[None]]) -> None:
        self._connection = connection
        self._publish = publish
        self._turns: dict[str, asyncio.Lock] = {}

    async def peek(self, queue: str, limit: int, after: str | None) -> list[DeadLetter]:
        if after is not None and not _ID.fullmatch(after):
            raise BrokerError(f"after: not the id of a dead letter: {shown(after)}")
        reader = _Reader(source_name(queue))
        page: list[DeadLetter] = []
        async with self._visit(queue) as letters:
            async for found in letters:
                letter = reader.letter(found)
                if after is None or letter.id > after:
                    page.append(letter)
                if len(page) > 2 * limit:  # now and then, so that no more are kept than are wanted
                    page = _oldest(page, limit)
        return _oldest(page, limit)

    async def redrive(self, queue: str, ids: Collection[str] | None) -> int:
        target = source_name(queue)

        async def send_back(letters: Sequence[_Found]) -> None:
            await self._publish([Parcel(target, carried(found.properties), found.body) for found in letters])

        if ids is None:
            return await self._take_all(queue, send_back)
        return await self._take_some(queue, set(ids), send_back)

    async def discard(self, queue: str, ids: Collection[str]) -> int:
        return await self._take_some(queue, set(ids), _let_go)

    async def _take_all(self, queue: str, before: "_Before") -> int:
        """What is there now: what comes meanwhile, perhaps for the second time, stays."""
        chunk: list[_Found] = []
        taken = 0
        async with self._visit(queue, window=CHUNK) as letters:
            async for found in letters:
                chunk.append(found)
                if len(chunk) == CHUNK:
                    taken += await _flush(letters, chunk, before)
            return taken + await _flush(letters, chunk, before)

    async def _take_some(self, queue: str, wanted: set[str], before: "_Before") -> int:
        if not wanted:
            return 0
        reader = _Reader(source_name(queue))
        chunk: list[_Found] = []
        taken = 0
        async with self._visit(queue) as letters:
            async for found in letters:
                if reader.letter(found).id in wanted:
                    chunk.append(found)
                if len(chunk) == CHUNK:
                    taken += await _flush(letters, chunk, before)
            return taken + await _flush(letters, chunk, before)

    @asynccontextmanager
    async def _visit(self, queue: str, window: int = 0) -> AsyncIterator[_Visit]:
        """Hands over the letters that are there now; `window`: how many may be held at once, 0 is all. Whatever was not
        settled is in quarantine again at the end."""
        name = dlq_name(queue)
        async with self._turns.setdefault(name, asyncio.Lock()):
            channel = await self._connection.channel()
            try:
                visit = _Visit(channel)
                await visit.enter(name, window)
                yield visit
                await visit.leave()
            finally:
                await channel.close()


_Before = Callable[[Sequence[_Found]], Awaitable[None]]


def _oldest(letters: list[DeadLetter], limit: int) -> list[DeadLetter]:
    return sorted(letters, key=lambda letter: letter.id)[: max(limit, 0)]


async def _flush(letters: _Visit, chunk: list[_Found], before: _Before) -> int:
    """Lets the chunk leave once `before` has returned."""
    await before(chunk)
    letters.settle(chunk)
    count = len(chunk)
    chunk.clear()
    return count


async def _let_go(_: Sequence[_Found]) -> None:
    """A discarded letter just leaves."""


def unused(*_: object) -> None:
    """Messages come by the receiver; pika only wants to have somebody."""
