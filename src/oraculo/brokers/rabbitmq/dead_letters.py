"""Looking at dead letters, moving them back, and discarding them.

AMQP has no way to look at a queue. So a look takes all messages without settling them, and gives them back: nothing is
lost by it, whatever happens meanwhile. It must be all, because a quorum queue puts what is given back behind what was
given back before. Pages go by the ids, which begin with the time of death, and not by the order of the queue.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from oraculo.brokers.dead_letter_page import DeadLetterPage, cut
from oraculo.brokers.rabbitmq.connection import LOCKED, NOT_FOUND, Channel, Connection, Refused, unused
from oraculo.brokers.rabbitmq.frames import Deliveries, Parcel
from oraculo.brokers.rabbitmq.properties import LETTER_ID, LetterReader, carried, renewed, was_given_back
from oraculo.core.chunks import slices
from oraculo.errors import BrokerError
from oraculo.ports.broker import Receipt, ensure_taken
from oraculo.ports.broker_admin import DEAD_LETTER_PAGE_BYTES, DeadLetter, NotAnId
from oraculo.wire.naming import dlq_name, source_name

T = TypeVar("T")
Publish = Callable[[Sequence[Parcel]], Awaitable[Sequence[Receipt]]]

CHUNK = 500  # dead letters that are moved at once
CHUNK_BYTES = 1024 * 1024  # size of these, but for a single one: the line may be slow
RENEWED_BYTES = 16 * 1024 * 1024  # of letters that one look publishes anew; they wait in memory
ASKED_BYTES = 16 * 1024 * 1024  # of letters asked for at once, judged by those before
_ASKED = 100  # letters asked for at first; later at most twice as many as came
_PATIENCE = 5.0  # seconds for the next letter: a quorum queue reads all from disk first, or another client has it
_MAX_PREFETCH = 65_535
_GOT = 1  # the tag of the letter that is asked for alone, before any is consumed
_TURN = "oraculo.olhada."  # begins the name of an exclusive queue, which says whose turn it is to look
_TURN_WITHIN = 15.0  # seconds; then it looks without a turn, and may see fewer
_TURN_PAUSE = 0.1
_READ_TOGETHER = 50  # letters; then the rest of the event loop runs


class _Found(NamedTuple):
    tag: int
    properties: bytes
    body: bytes


class _Look:
    """The letters of one dead-letter queue, in their order, held until the channel closes."""

    def __init__(self, channel: Channel, queue: str, publish: Publish, delivery_limit: int) -> None:
        self._channel = channel
        self._queue = queue
        self._publish = publish
        self._reader = LetterReader(source_name(queue), delivery_limit)
        self._worn: list[tuple[_Found, DeadLetter]] = []
        self._renewable = RENEWED_BYTES  # so many more
        self._held: dict[int, None] = {}  # the tags of unsettled letters, ascending
        self._may_hold = 0  # so many, by the prefetch of all consumers
        self._expected = 0
        self._seen = 0
        self._came = 0
        self._came_bytes = 0
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

    async def begin(self) -> None:
        """Ask for the first letter alone.

        Only its answer counts letters that were just given back. The count of a passive declare does not.
        """
        try:
            behind = await self._channel.get(self._queue)
        except Refused as refusal:
            if refusal.code != NOT_FOUND:
                raise
            behind = None
        if behind is not None:
            self._expected = behind + 1

    async def __aiter__(self) -> AsyncIterator[_Found]:
        while self._seen < self._expected:
            if self._seen % _READ_TOGETHER == 0:
                await asyncio.sleep(0)
            if not self._arrived and not await self._comes():
                return
            self._seen += 1
            yield self._arrived.popleft()

    async def _comes(self) -> bool:
        if len(self._held) - (_GOT in self._held) >= self._may_hold:
            await self._ask_for(self._next_few())
        while not self._arrived:
            if self._channel.fault is not None:
                raise self._channel.fault
            self._signal.clear()
            try:
                await asyncio.wait_for(self._signal.wait(), _PATIENCE)
            except TimeoutError:
                return False
        return True

    async def _ask_for(self, more: int) -> None:
        """Add a consumer with a prefetch of its own. Without any, a quorum queue would take 2,000."""
        await self._channel.call("basic_qos", prefetch_count=more)
        await self._channel.call("basic_consume", queue=self._queue, on_message_callback=unused)
        self._may_hold += more

    def _next_few(self) -> int:
        """Return how many to ask for: the server reads them all into memory before it delivers the first."""
        fitting = ASKED_BYTES * self._came // max(self._came_bytes, 1)
        return max(1, min(self._expected - self._seen, fitting, _ASKED + 2 * self._came, _MAX_PREFETCH))

    def read(self, found: _Found) -> DeadLetter:
        """Read a letter. Call this once for each, in their order."""
        return self._reader.read(found.properties, found.body)

    def keep(self, found: _Found, letter: DeadLetter) -> None:
        """Let a letter stay.

        One that was given back before is published anew at the end. Its queue, or a policy, may have the server drop
        what is given back twice.
        """
        if self._renewable > 0 and was_given_back(found.properties):
            self._renewable -= len(found.body)
            self._worn.append((found, letter))

    async def end(self) -> None:
        """Give the letters back. First the consumers end, or the server would deliver them here again."""
        if self._channel.fault is not None:
            return
        for tag in self._channel.raw.consumer_tags:
            await self._channel.call("basic_cancel", consumer_tag=tag)
        for worn in slices(self._worn, lambda each: len(each[0].body), CHUNK_BYTES):
            if not await _to_its_end(self._renew(worn)):
                break  # one may look all the same; they stay as they are
        self._channel.raw.basic_nack(0, multiple=True, requeue=True)

    async def _renew(self, worn: Sequence[tuple[_Found, DeadLetter]]) -> bool:
        parcels = [Parcel(self._queue, renewed(found.properties, letter), found.body) for found, letter in worn]
        try:
            receipts = await self._publish(parcels)
        except BrokerError:
            return False
        self.settle_taken([found for found, _ in worn], receipts)
        return not any(receipt.error for receipt in receipts)

    def settle_taken(self, letters: Sequence[_Found], receipts: Sequence[Receipt]) -> None:
        pairs = zip(letters, receipts, strict=True)
        self.settle([found.tag for found, receipt in pairs if receipt.error is None])

    def settle(self, tags: Sequence[int]) -> None:
        """Ack all up to the oldest that is still held at once, and the others one by one.

        The server may lose some of many single acks when the channel closes, and would have these letters twice.
        """
        if self._channel.fault is not None:
            raise self._channel.fault
        for tag in tags:
            del self._held[tag]
        oldest = next(iter(self._held), None)
        together = tags if oldest is None else [tag for tag in tags if tag < oldest]
        if together:
            self._channel.raw.basic_ack(max(together), multiple=True)
        for tag in set(tags).difference(together):
            self._channel.raw.basic_ack(tag)


class DeadLetters:
    """The dead letters of every queue.

    One look at a time goes on at a queue, of all processes: two would hide letters from each other.
    """

    def __init__(self, connection: Connection, publish: Publish, delivery_limit: int) -> None:
        self._connection = connection
        self._publish = publish
        self._delivery_limit = delivery_limit
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # in this process, by queue

    async def peek(self, queue: str, limit: int, after: str | None) -> list[DeadLetter]:
        if after is not None and not LETTER_ID.fullmatch(after):
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
        async with self._look(queue) as letters:
            async for found in letters:
                letter = letters.read(found)
                letters.keep(found, letter)
                if wanted is None or letter.id in wanted:
                    see(letter)

    async def redrive(self, queue: str, ids: Collection[str] | None) -> int:
        """Move letters back to their queue. Raises the first error of those that it did not take; these stay."""
        return await self._take(queue, ids, source_name(queue))

    async def discard(self, queue: str, ids: Collection[str]) -> int:
        return await self._take(queue, ids, None)

    async def _take(self, queue: str, ids: Collection[str] | None, target: str | None) -> int:
        """Take out the named letters, or all that are there now: what comes meanwhile stays."""
        wanted = None if ids is None else set(ids)
        if wanted is not None and not wanted:
            return 0
        chunk, size, taken = list[_Found](), 0, 0
        async with self._look(queue) as letters:
            async for found in letters:
                if wanted is not None and (letter := letters.read(found)).id not in wanted:
                    letters.keep(found, letter)
                    continue
                chunk.append(found)
                size += len(found.body)
                if len(chunk) >= CHUNK or size >= CHUNK_BYTES:
                    taken += await _to_its_end(self._move(letters, chunk, target))
                    chunk, size = [], 0
            return taken + await _to_its_end(self._move(letters, chunk, target))

    async def _move(self, letters: _Look, leaving: Sequence[_Found], target: str | None) -> int:
        """Move letters to the queue `target`, or discard them."""
        if not leaving:
            return 0
        if target is None:
            letters.settle([found.tag for found in leaving])
        else:
            receipts = await self._publish([Parcel(target, carried(found.properties), found.body) for found in leaving])
            letters.settle_taken(leaving, receipts)
            ensure_taken(receipts)
        return len(leaving)

    @asynccontextmanager
    async def _look(self, queue: str) -> AsyncIterator[_Look]:
        """Take the letters that are there now. At the end those that were not settled are in their queue again."""
        name = dlq_name(queue)
        async with self._turns.setdefault(name, asyncio.Lock()), self._turn_of_all_processes(name):
            channel = await self._connection.channel()
            try:
                look = _Look(channel, name, self._publish, self._delivery_limit)
                await look.begin()
                yield look
                await look.end()
            finally:
                await channel.close()

    @asynccontextmanager
    async def _turn_of_all_processes(self, name: str) -> AsyncIterator[None]:
        turn = _TURN + blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()
        channel = await self._taken_turn(turn)
        try:
            yield
        finally:
            if channel is not None:
                with suppress(BrokerError):  # else it goes with the connection
                    await channel.call("queue_delete", queue=turn)
                await channel.close()

    async def _taken_turn(self, turn: str) -> Channel | None:
        """Return the channel that has the turn; None when our user may not have one, or another process keeps it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _TURN_WITHIN
        while True:
            channel = await self._connection.channel()
            try:
                await channel.call("queue_declare", queue=turn, exclusive=True)
            except Refused as refusal:
                if refusal.code != LOCKED or loop.time() > until:
                    return None
            except BaseException:
                channel.abandon()
                raise
            else:
                return channel
            await asyncio.sleep(_TURN_PAUSE)


async def _to_its_end(moving: Coroutine[Any, Any, T]) -> T:
    """Finish a move also when the caller is cancelled: what was published and not settled would be there twice."""
    task = asyncio.create_task(moving)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Oldest:
    """The oldest of the letters that were put in, as many as a page has."""

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, 0)
        self._kept: list[DeadLetter] = []
        self.held = 0  # bytes

    def put(self, letter: DeadLetter) -> None:
        self._kept.append(letter)
        self.held += len(letter.body)
        if len(self._kept) > 2 * self._limit or self.held > 3 * DEAD_LETTER_PAGE_BYTES:
            self._kept = self.letters()
            self.held = sum(len(kept.body) for kept in self._kept)

    def letters(self) -> list[DeadLetter]:
        page = DeadLetterPage(self._limit)
        page.fill(sorted(self._kept, key=lambda letter: letter.id))
        return page.letters
