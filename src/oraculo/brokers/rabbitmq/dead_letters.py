"""What a message carries beside its body, and the quarantine.

AMQP has no way to look at a queue. So whoever looks at the dead letters takes all of them without settling them, and
gives them back: nothing is lost by it, whatever happens meanwhile, but who looks while another does sees fewer, so they
take turns, as far as they may. It must be all: a quorum queue puts what is given back behind what was given back
before, so that a part would change places. Pages therefore go by the ids, which begin with the time of death, and not
by the order of the queue.
"""

import asyncio
import re
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from itertools import count
from math import isfinite
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

from pika import BasicProperties

from oraculo.brokers.dead_letter_page import DeadLetterPage, cut
from oraculo.brokers.rabbitmq.connection import LOCKED, NOT_FOUND, Channel, Connection, Refused, unused
from oraculo.brokers.rabbitmq.frames import Deliveries, Parcel
from oraculo.brokers.rabbitmq.publisher import NotConfirmed
from oraculo.errors import BrokerError
from oraculo.ports.broker import NO_REASON
from oraculo.ports.broker_admin import DEAD_LETTER_PAGE_BYTES, DeadLetter, NotAnId
from oraculo.wire.naming import AMQP_REASON_HEADER, LONGEST_REASON, dlq_name, source_name

Item = TypeVar("Item")
T = TypeVar("T")

PERSISTENT = 2
CHUNK = 500  # dead letters that are moved at once
CHUNK_BYTES = 1024 * 1024  # and how large they may be, but for a single one: a link may be slow
RENEWED_BYTES = 16 * 1024 * 1024  # of letters at one look: more arrive meanwhile, and wait in memory
ASKED_BYTES = 16 * 1024 * 1024  # of letters that are asked for at once, as far as those before tell
_ASKED = 100  # letters that are asked for at first; then, at most, twice as many as came
_PATIENCE = 1.0  # seconds without a letter that should be there: somebody else has it now
_FIRST_PATIENCE = 5.0  # for the first of those asked for: a quorum queue reads all from disk before it hands over any
_SLOWEST = 128 * 1024  # bytes a second: for a large letter that long, too
_MOST_PREFETCH = 65_535
_GOT = 1  # the tag of the letter that is asked for alone, before any is consumed
_SIGN = "oraculo.olhada."  # begins the name of a queue that one connection alone may have: whose turn it is to look
_TURN_WITHIN = 15.0  # seconds; then it looks all the same, and both may see fewer
_GLANCE = 0.1
_TURN = 50  # letters that are read before the rest of the loop gets a turn

_OURS = "x-oraculo-"
REDELIVERIES = _OURS + "redeliveries"
_LETTER = _OURS + "letter"
_DIED_AT = _OURS + "died-at"
OUR_HEADERS = (REDELIVERIES, _LETTER, AMQP_REASON_HEADER, _DIED_AT)
_COUNTERS = ("x-delivery-count", "x-acquired-count")  # failures and, since RabbitMQ 4.3, all; a classic queue has none
# What the server wrote, or would act upon: CC and BCC would send copies of a message that only goes on its way.
_NOT_CARRIED = re.compile(rf"{_OURS}.*|x-delivery-count|x-acquired-count|x-death|x-(first|last)-death-.*|CC|BCC")
_LIMIT_REACHED = "delivery_limit"
_DEATHS = {
    _LIMIT_REACHED: "delivered too often and never settled",
    "rejected": "rejected by its consumer",
    "expired": "expired before it was consumed",
    "maxlen": "the queue was full",
}
_ID = re.compile(r"[0-9a-f]{14}-[0-9a-f]{14}(-[0-9]+)?")  # when it died, and what tells it from others
_LATEST = 0xFFFFFFFFFFFFFF  # microseconds: what an id has room for
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


def carried(properties: bytes, kept: Collection[str] = (), /, **ours: str | int) -> bytes:
    """The properties of a message that goes to another queue: its own, less what belonged to the place it was in, but
    for what is to be kept."""
    own = _decoded(properties)
    headers = {name: value for name, value in (own.headers or {}).items() if name in kept or not _stays(name)}
    own.delivery_mode = PERSISTENT
    own.expiration = own.user_id = None  # it may not vanish, and the server takes no other user's name from us
    own.headers = headers | ours or None
    with suppress(Exception):  # a type that pika reads but does not write
        return encoded(own)
    own.headers = dict(ours) or None
    return encoded(own)


def fitted(properties: bytes, room: int) -> bytes:
    """All headers stand in one frame, whose size the server chooses: only ours are left, and of the reason as much as
    there is room for."""
    own = _decoded(properties)
    own.headers = {name: value for name, value in (own.headers or {}).items() if name in OUR_HEADERS}
    excess = len(encoded(own)) - room
    if excess > 0 and isinstance(reason := own.headers.get(AMQP_REASON_HEADER), str):
        own.headers[AMQP_REASON_HEADER] = reason.encode()[:-excess].decode(errors="ignore")
    return encoded(own)


def dead(properties: bytes, reason: str, at: float, redeliveries: int) -> bytes:
    """The properties of a dead letter. Its id says when it died, so that a later one is greater."""
    letter = f"{_time_part(at)}-{next(_sequence) % 0x1000000:06x}{_process}"
    return carried(properties, **{_LETTER: letter}, **_told(reason, at, redeliveries))


def _told(reason: str, at: float, redeliveries: int) -> dict[str, str | int]:
    sendable = reason[:LONGEST_REASON].encode(errors="replace").decode()  # half a surrogate pair is not
    return {AMQP_REASON_HEADER: sendable, _DIED_AT: repr(at), REDELIVERIES: redeliveries}


def _time_part(at: float) -> str:
    return f"{min(int(max(at, 0.0) * 1_000_000), _LATEST):014x}"


def _stays(name: str | bytes) -> bool:
    """Whether a header belongs to the place the message was in. pika leaves names that are not UTF-8 as bytes."""
    return isinstance(name, str) and _NOT_CARRIED.fullmatch(name) is not None


def _decoded(properties: bytes) -> BasicProperties:
    """As much as can be read: clients write headers that pika cannot (a time in milliseconds is in no year it knows),
    and a raise in the middle of receiving would end the connection, and so every other message on it."""
    for readable in (bytes, _without_headers):
        with suppress(Exception):
            return BasicProperties().decode(readable(properties))
    return BasicProperties()


def _without_headers(properties: bytes) -> bytes:
    flags, start = struct.unpack_from(">H", properties)[0], 2
    for flag in (BasicProperties.FLAG_CONTENT_TYPE, BasicProperties.FLAG_CONTENT_ENCODING):  # these stand before them
        start += 1 + properties[start] if flags & flag else 0
    end = start + 4 + struct.unpack_from(">I", properties, start)[0]
    return struct.pack(">H", flags & ~_HAS_HEADERS) + properties[2:start] + properties[end:]


def _number(value: object) -> int:
    return int(value) if isinstance(value, int) else 0


# -- letters ------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    tag: int
    properties: bytes
    body: bytes


class _Chunk(Generic[Item]):
    """Of letters, as many as go together."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._bytes = 0

    def is_full_with(self, item: Item, found: _Found) -> bool:
        """Takes it in."""
        self._items.append(item)
        self._bytes += len(found.body)
        return len(self._items) >= CHUNK or self._bytes >= CHUNK_BYTES

    def emptied(self) -> list[Item]:
        items, self._items, self._bytes = self._items, [], 0
        return items


class _Reader:
    """Reads letters in their order. A plain client's has no id: it gets one by its content, and by how many of the
    same stand before it."""

    def __init__(self, queue: str, delivery_limit: int) -> None:
        self._queue = queue
        self._delivery_limit = delivery_limit
        self._same: Counter[str] = Counter()

    def letter(self, found: _Found) -> DeadLetter:
        properties = _decoded(found.properties)
        headers: dict[str, Any] = properties.headers or {}
        at = _died_at(properties, headers)
        return DeadLetter(
            _own_id(headers) or self._plain_id(properties, found.body, at),
            self._queue,
            found.body,
            _reason(headers),
            at,
            self._redeliveries(headers),
        )

    def _redeliveries(self, headers: dict[str, Any]) -> int:
        """The server does not say how often it delivered what it moved for that, but that it was as often as it may."""
        carried_along = _number(headers.get(REDELIVERIES))
        is_worn_out = AMQP_REASON_HEADER not in headers and _death(headers).get("reason") == _LIMIT_REACHED
        return carried_along + self._delivery_limit - 1 if is_worn_out else carried_along

    def _plain_id(self, properties: BasicProperties, body: bytes, at: float) -> str:
        named = f"{properties.message_id}\0{properties.correlation_id}\0".encode(errors="replace")
        plain = f"{_time_part(at)}-{blake2b(named + body, digest_size=7).hexdigest()}"
        self._same[plain] += 1
        return plain if self._same[plain] == 1 else f"{plain}-{self._same[plain]}"


def _own_id(headers: dict[str, Any]) -> str | None:
    letter = headers.get(_LETTER)
    return letter if isinstance(letter, str) and _ID.fullmatch(letter) else None


def _was_given_back(properties: bytes) -> bool:
    """As its queue counted. Where the count cannot be read it may be any."""
    if _COUNTERS[0].encode() not in properties:  # told without reading them: there may be many letters
        return False
    headers = _decoded(properties).headers
    return headers is None or _number(headers.get(_COUNTERS[0])) > 0


def _renewed(found: _Found, letter: DeadLetter) -> bytes:
    """The same letter, whose deliveries nobody has counted yet. Its id stays: a plain one's is made of what stays."""
    own = _own_id(_decoded(found.properties).headers or {})
    ours: dict[str, str | int] = {_LETTER: own} if own else {}
    return carried(found.properties, **ours, **_told(letter.reason, letter.at, letter.redeliveries))


def _death(headers: dict[str, Any]) -> dict[str, Any]:
    """What the server wrote when it moved the message itself."""
    deaths = headers.get("x-death")
    return deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}


def _reason(headers: dict[str, Any]) -> str:
    if isinstance(told := headers.get(AMQP_REASON_HEADER), str):
        return told
    if isinstance(death := _death(headers).get("reason"), str):
        return f"moved by RabbitMQ: {_DEATHS.get(death, death)}"
    return NO_REASON


def _died_at(properties: BasicProperties, headers: dict[str, Any]) -> float:
    """0 when nobody told: a plain client's letter has no time unless its client gave it one."""
    with suppress(ValueError, TypeError, OverflowError):
        at = float(headers[_DIED_AT]) if _DIED_AT in headers else _told_by_server(properties, headers)
        return at if isfinite(at) else 0.0
    return 0.0


def _told_by_server(properties: BasicProperties, headers: dict[str, Any]) -> float:
    time = _death(headers).get("time")
    return time.timestamp() if isinstance(time, datetime) else float(properties.timestamp or 0)


# -- the quarantine -----------------------------------------------------------------------------------------------


class _Visit:
    """The letters of one dead-letter queue, handed over in their order and held until the channel closes."""

    def __init__(self, channel: Channel, queue: str, publish: "_Publish", delivery_limit: int) -> None:
        self._channel = channel
        self._queue = queue
        self._publish = publish
        self._reader = _Reader(source_name(queue), delivery_limit)
        self._worn = _Chunk[tuple[_Found, Parcel]]()  # those that were given back before, and what takes their place
        self._renewed: list[int] = []  # the tags of those whose place is taken
        self._renewable = RENEWED_BYTES  # so many more
        self._held: dict[int, None] = {}  # the tags of what is not settled, ascending
        self._may_hold = 0  # that were consumed
        self._count = 0
        self._seen = 0
        self._came = 0
        self._came_bytes = 0
        self._came_before = 0  # those asked for last
        self._arrived: deque[_Found] = deque()
        self._signal = asyncio.Event()
        channel.on_close = lambda _: self._signal.set()
        channel.listen(Deliveries(self._on_message, channel.got))

    def _on_message(self, tag: int, _: bool, properties: bytes, body: bytes) -> None:
        self._held[tag] = None
        self._came += 1
        self._came_bytes += len(body)
        self._arrived.append(_Found(tag, properties, body))
        self._signal.set()

    async def enter(self, window: int) -> None:
        """Asks for the first letter alone: only that answer tells how many there are, when some were just given
        back. A count that is asked for does not wait for them."""
        try:
            behind = await self._channel.get(self._queue)
        except Refused as refusal:
            if refusal.code != NOT_FOUND:
                raise
            behind = None
        if behind is not None:
            self._count = behind + 1
            self._came_before = self._came
        if behind and window:
            await self._consume(window)

    async def _consume(self, more: int) -> None:
        """So many more may be held: a prefetch counts for each consumer. None at all would be worse: a quorum queue
        takes that for 2,000."""
        await self._channel.call("basic_qos", prefetch_count=more)
        await self._channel.call("basic_consume", queue=self._queue, on_message_callback=unused)
        self._may_hold += more

    def read(self, found: _Found) -> DeadLetter:
        """Once for each."""
        return self._reader.letter(found)

    async def keep(self, found: _Found, letter: DeadLetter) -> None:
        """It stays. One that was given back before is published anew: its queue, or a policy that nobody tells of, may
        have the server drop what is given back twice. It is then the last, so that the next look renews others."""
        if self._renewable > 0 and _was_given_back(found.properties):
            self._renewable -= len(found.body)
            worn = found, Parcel(self._queue, _renewed(found, letter), found.body)
            if self._worn.is_full_with(worn, found):
                await self._renew()

    async def _renew(self) -> None:
        """The old ones are held until the end: for each that left, a new one would be handed over."""
        if worn := self._worn.emptied():
            await _to_its_end(self._publish_anew(worn))

    async def _publish_anew(self, worn: Sequence[tuple[_Found, Parcel]]) -> None:
        refused = set[int]()
        try:
            await self._publish([parcel for _, parcel in worn])
        except NotConfirmed as error:
            refused = set(map(id, error.parcels))
        except BrokerError:
            self._renewable = 0  # one may look all the same; they stay as they are
            return
        self._renewed += [found.tag for found, parcel in worn if id(parcel) not in refused]

    async def leave(self) -> None:
        """First no more may come: what is given back while somebody consumes is delivered to him again."""
        if self._channel.fault is None:
            for tag in self._channel.raw.consumer_tags:
                await self._channel.call("basic_cancel", consumer_tag=tag)
            await self._renew()
            self.settle_renewed()
            self._channel.raw.basic_nack(0, multiple=True, requeue=True)

    def settle_renewed(self) -> None:
        if self._channel.is_open:
            self.settle(self._renewed)
            self._renewed = []

    async def __aiter__(self) -> AsyncIterator[_Found]:
        while self._seen < self._count:
            if self._seen % _TURN == 0:
                await asyncio.sleep(0)  # while they come faster than they are read, nothing else here waits
            if not self._arrived and not await self._comes():
                return
            self._seen += 1
            yield self._arrived.popleft()

    async def _comes(self) -> bool:
        patience = self._came_bytes / max(self._came, 1) / _SLOWEST
        if self._holds_all_it_may():
            self._came_before = self._came
            await self._consume(self._next_few())
        patience += _PATIENCE if self._came > self._came_before else _FIRST_PATIENCE
        while not self._arrived:
            if self._channel.fault is not None:
                raise self._channel.fault
            if not await self._has_signal(patience):
                return False
        return True

    def _holds_all_it_may(self) -> bool:
        return len(self._held) - (_GOT in self._held) >= self._may_hold

    def _next_few(self) -> int:
        """All at once the server would read into its memory before it hands over the first."""
        fitting = ASKED_BYTES * self._came // max(self._came_bytes, 1)
        return max(1, min(self._count - self._seen, fitting, _ASKED + 2 * self._came, _MOST_PREFETCH))

    def settle(self, tags: Sequence[int]) -> None:
        """One ack for all up to the oldest that is still held, and one for each behind it. Of many the server would
        lose some that it has not passed on to the queue when the channel closes: they would be there twice."""
        for tag in tags:
            del self._held[tag]
        oldest = next(iter(self._held), None)
        together = tags if oldest is None else [tag for tag in tags if tag < oldest]
        if together:
            self._channel.raw.basic_ack(max(together), multiple=True)
        for tag in set(tags).difference(together):
            self._channel.raw.basic_ack(tag)

    async def _has_signal(self, patience: float) -> bool:
        self._signal.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._signal.wait()
        return self._signal.is_set()


class DeadLetters:
    """The dead letters of every queue. One at a time looks at those of a queue, of all processes: two would hide them
    from each other, and be shown what the other one published anew."""

    def __init__(self, connection: Connection, publish: "_Publish", delivery_limit: int) -> None:
        self._connection = connection
        self._publish = publish
        self._delivery_limit = delivery_limit
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of the queues looked at now

    async def peek(self, queue: str, limit: int, after: str | None) -> list[DeadLetter]:
        if after is not None and not _ID.fullmatch(after):
            raise NotAnId(after)
        oldest = Oldest(limit)

        def put(letter: DeadLetter) -> None:
            if after is None or letter.id > after:
                oldest.put(cut(letter))

        await self.look_through(queue, put)
        return oldest.letters()

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        wanted = None if ids is None else set(ids)
        async with self._visit(queue) as letters:
            async for found in letters:
                letter = letters.read(found)
                await letters.keep(found, letter)
                if wanted is None or letter.id in wanted:
                    see(letter)

    async def redrive(self, queue: str, ids: Collection[str] | None) -> int:
        """Raises NotConfirmed when the queue has no room: those that it took have left, and the others have not."""
        target = source_name(queue)
        return await (self._take_all(queue, target) if ids is None else self._take_some(queue, set(ids), target))

    async def discard(self, queue: str, ids: Collection[str]) -> int:
        return await self._take_some(queue, set(ids), None)

    async def _take_all(self, queue: str, target: str) -> int:
        """What is there now: what comes meanwhile, perhaps for the second time, stays."""
        chunk = _Chunk[_Found]()
        taken = 0
        async with self._visit(queue, window=CHUNK) as letters:
            async for found in letters:
                if chunk.is_full_with(found, found):
                    taken += await _to_its_end(self._flush(letters, chunk, target))
            return taken + await _to_its_end(self._flush(letters, chunk, target))

    async def _take_some(self, queue: str, wanted: set[str], target: str | None) -> int:
        if not wanted:
            return 0
        chunk = _Chunk[_Found]()
        taken = 0
        async with self._visit(queue) as letters:
            async for found in letters:
                letter = letters.read(found)
                if letter.id not in wanted:
                    await letters.keep(found, letter)
                elif chunk.is_full_with(found, found):
                    taken += await _to_its_end(self._flush(letters, chunk, target))
            return taken + await _to_its_end(self._flush(letters, chunk, target))

    async def _flush(self, letters: _Visit, chunk: "_Chunk[_Found]", target: str | None) -> int:
        """Lets the chunk leave, for the queue `target` or for good."""
        leaving = chunk.emptied()
        if target is not None:
            parcels = [Parcel(target, carried(found.properties), found.body) for found in leaving]
            try:
                await self._publish(parcels)
            except NotConfirmed as error:
                refused = set(map(id, error.parcels))
                pairs = zip(leaving, parcels, strict=True)
                letters.settle([found.tag for found, parcel in pairs if id(parcel) not in refused])
                raise
        letters.settle([found.tag for found in leaving])
        return len(leaving)

    @asynccontextmanager
    async def _visit(self, queue: str, window: int = 0) -> AsyncIterator[_Visit]:
        """Hands over the letters that are there now; `window`: how many may be held at once, 0 is all. Whatever was not
        settled is in quarantine again at the end."""
        name = dlq_name(queue)
        async with self._turns.setdefault(name, asyncio.Lock()), self._turn_of_all(name):
            channel = await self._connection.channel()
            visit = _Visit(channel, name, self._publish, self._delivery_limit)
            try:
                await visit.enter(window)
                yield visit
                await visit.leave()
            finally:
                visit.settle_renewed()
                await channel.close()

    @asynccontextmanager
    async def _turn_of_all(self, name: str) -> AsyncIterator[None]:
        sign = await self._sign(name)
        try:
            yield
        finally:
            if sign is not None:
                with suppress(BrokerError):  # else it goes with the connection
                    await sign.call("queue_delete", queue=_sign_of(name))
                await sign.close()

    async def _sign(self, name: str) -> Channel | None:
        """None: it may not be made, or another process has it for long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _TURN_WITHIN
        while True:
            channel = await self._connection.channel()
            try:
                await channel.call("queue_declare", queue=_sign_of(name), exclusive=True)
            except Refused as refusal:
                if refusal.code != LOCKED or loop.time() > until:
                    return None
            except BaseException:
                channel.abandon()
                raise
            else:
                return channel
            await asyncio.sleep(_GLANCE)


_Publish = Callable[[Sequence[Parcel]], Awaitable[None]]


async def _to_its_end(moving: Coroutine[Any, Any, T]) -> T:
    """Also when whoever waits is cancelled: what was published and not settled yet would be there twice."""
    task = asyncio.create_task(moving)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _sign_of(name: str) -> str:
    return _SIGN + blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()


class Oldest:
    """The oldest of the letters that were seen, as many as a page has."""

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, 0)
        self._kept: list[DeadLetter] = []
        self.held = 0  # bytes

    def put(self, letter: DeadLetter) -> None:
        self._kept.append(letter)
        self.held += len(letter.body)
        if len(self._kept) > 2 * self._limit or self.held > 3 * DEAD_LETTER_PAGE_BYTES:  # now and then
            self._kept = self.letters()
            self.held = sum(len(kept.body) for kept in self._kept)

    def letters(self) -> list[DeadLetter]:
        page = DeadLetterPage(self._limit)
        page.fill(sorted(self._kept, key=lambda letter: letter.id))
        return page.letters
